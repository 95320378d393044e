/**
 * Queues for instances. Projects that share fleets wait in one queue, and positions count from 0 in each; the server lists
 * the runs of all queues in one order.
 */
import type { QueueEntry } from '../api/api';

/** The runs of each queue, in order; null if the list does not tell the queues apart. */
export function splitQueues(entries: QueueEntry[]): QueueEntry[][] | null {
  const queues: { entries: QueueEntry[]; projects: Set<string> }[] = [];
  for (const entry of entries) {
    const candidates = queues.filter((queue) => queue.entries.length === entry.position);
    const own = candidates.find((queue) => entry.project !== null && queue.projects.has(entry.project));
    if (!own && entry.position > 0 && candidates.length !== 1) return null;
    const queue = own ?? (entry.position === 0 ? { entries: [], projects: new Set<string>() } : candidates[0]);
    if (!queue) return null;
    if (entry.position === 0) queues.push(queue);
    queue.entries.push(entry);
    if (entry.project !== null) queue.projects.add(entry.project);
  }
  return queues.map((queue) => queue.entries);
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
