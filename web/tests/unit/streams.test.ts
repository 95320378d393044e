import { expect, test } from 'vitest';
import { LOG_STREAMS_MAX, LogStreams } from '../../src/feed/streams';

test('so many logs have a stream, in the order in which they asked, and a stream is handed on', () => {
  const granted: string[] = [];
  const streams = new LogStreams<string>((owner, id) => granted.push(`${owner}/${id}`));
  streams.want('one', '0');
  streams.want('one', '0');
  streams.want('two', '0');
  streams.want('two', '1');
  streams.want('three', '0');
  expect(LOG_STREAMS_MAX).toBe(2);
  expect(granted).toEqual(['one/0', 'two/0']);
  streams.release('three', '0');
  streams.drop('one');
  expect(granted).toEqual(['one/0', 'two/0', 'two/1']);
  streams.want('three', '0');
  streams.drop('two');
  expect(granted).toEqual(['one/0', 'two/0', 'two/1', 'three/0']);
});
