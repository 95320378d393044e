import { expect, test } from 'vitest';
import type { QueueEntry } from '../../src/api/api';
import { queueName, ruleText, splitQueues } from '../../src/text/queue';

const entry = (project: string | null, position: number) => ({ project, position }) as QueueEntry;
const names = (entries: QueueEntry[]) => splitQueues(entries)?.map((queue) => queue.map((one) => `${one.project}${one.position}`).join(' '));

test('runs of two queues are told apart, also where they are listed in turns', () => {
  expect(names([])).toEqual([]);
  expect(names([entry('a', 0), entry('b', 0), entry('a', 1), entry('b', 1), entry('a', 2)])).toEqual(['a0 a1 a2', 'b0 b1']);
  // A project that was not seen before, and one whose name is hidden, belong where their number is the next.
  expect(names([entry('a', 0), entry('b', 0), entry('a', 1), entry('c', 2), entry(null, 1)])).toEqual(['a0 a1 c2', 'b0 null1']);
});

test('a list that does not tell the queues apart is not split', () => {
  expect(splitQueues([entry('a', 0), entry('b', 0), entry(null, 1)])).toBeNull();
  expect(splitQueues([entry('a', 3)])).toBeNull();
});

test('a queue is named after the projects that may be seen', () => {
  expect(queueName([entry('b', 0), entry('a', 1), entry('b', 2)])).toBe('a, b');
  expect(queueName([entry(null, 0), entry('a', 1)])).toBe('a, other projects');
  expect(ruleText('usage')).toBe('its project used less');
});
