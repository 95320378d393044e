import { expect, test } from 'vitest';
import type { QueueEntry } from '../../src/api/api';
import { queueName, ruleText, splitQueues } from '../../src/text/queue';

const entry = (project: string | null, position: number, queue = 0) => ({ project, position, queue }) as QueueEntry;
const names = (entries: QueueEntry[]) => splitQueues(entries).map((queue) => queue.map((one) => `${one.project}${one.position}`).join(' '));

test('runs of two queues are told apart, also where they are listed in turns', () => {
  expect(names([])).toEqual([]);
  expect(names([entry('a', 0), entry('b', 0, 1), entry('a', 1), entry('b', 1, 1), entry('a', 2)])).toEqual(['a0 a1 a2', 'b0 b1']);
  // Two hidden projects at the same position, which only the number of the queue tells apart.
  expect(names([entry(null, 0), entry(null, 0, 1), entry(null, 1, 1), entry('a', 1), entry(null, 2, 1)])).toEqual(['null0 a1', 'null0 null1 null2']);
});

test('a queue is named after the projects that may be seen', () => {
  expect(queueName([entry('b', 0), entry('a', 1), entry('b', 2)])).toBe('a, b');
  expect(queueName([entry(null, 0), entry('a', 1)])).toBe('a, other projects');
  expect(ruleText('usage')).toBe('its project used less');
});
