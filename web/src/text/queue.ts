/**
 * Queues for instances. Projects that share fleets wait in one queue, and positions count from 0 in each; the server lists
 * the runs of all queues in one order.
 */
import type { QueueEntry } from '../api/api';

/** The runs of each queue, in order. */
export function splitQueues(entries: QueueEntry[]): QueueEntry[][] {
  const queues = new Map<number, QueueEntry[]>();
  for (const entry of entries) {
    const queue = queues.get(entry.queue);
    if (queue) queue.push(entry);
    else queues.set(entry.queue, [entry]);
  }
  return [...queues.values()];
}

/** The projects of a queue, as a heading: those that the caller may see. */
export function queueName(entries: QueueEntry[]): string {
  const names = [...new Set(entries.map((entry) => entry.project).filter((name) => name !== null))].sort();
  const isPartHidden = entries.some((entry) => entry.project === null);
  return [...names, ...(isPartHidden ? ['other projects'] : [])].join(', ');
}

/** Rule that puts a run before another one, in the words of `windlass why`. */
export function ruleText(rule: string): string {
  const words: Record<string, string> = { class: 'higher class', share: 'its project is within its share', usage: 'its project used less', priority: 'higher priority' };
  return words[rule] ?? 'waits for longer';
}
