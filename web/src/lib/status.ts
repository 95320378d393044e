/** What a status looks like: one of six tones, each with a shape and a word. */

export type Tone = 'runs' | 'waits' | 'failed' | 'done' | 'prepares' | 'ends';

const TONES: Record<string, Tone> = {
  // runs and jobs
  pending: 'waits', submitted: 'waits', provisioning: 'prepares', pulling: 'prepares', running: 'runs',
  terminating: 'ends', terminated: 'done', aborted: 'done', failed: 'failed', done: 'done',
  // instances, fleets, volumes
  idle: 'done', busy: 'runs', active: 'runs', healthy: 'runs', warning: 'waits', failure: 'failed',
  unreachable: 'failed', draining: 'ends',
  // managed jobs
  PENDING: 'waits', STARTING: 'prepares', RUNNING: 'runs', RECOVERING: 'prepares', SUCCEEDED: 'done', CANCELLING: 'ends',
  CANCELLED: 'done', FAILED: 'failed', FAILED_SETUP: 'failed', FAILED_PRECHECKS: 'failed', FAILED_NO_RESOURCE: 'failed',
  FAILED_CONTROLLER: 'failed',
  // containers
  Queued: 'waits', Locked: 'prepares', Running: 'runs', Complete: 'done', Cancelled: 'done',
  // deployments
  rolling: 'prepares', complete: 'runs', superseded: 'done', asleep: 'waits',
  // offers
  available: 'runs', not_available: 'failed', no_quota: 'failed', no_balance: 'failed', unknown: 'done',
};

export const SHAPES: Record<Tone, string> = { runs: '●', waits: '◆', failed: '■', done: '○', prepares: '◐', ends: '◑' };

export function tone(status: string): Tone {
  return TONES[status] ?? 'done';
}

const WORDS: Record<string, string> = {
  submitted: 'waiting', pending: 'pending', FAILED_SETUP: 'setup failed', FAILED_PRECHECKS: 'checks failed',
  FAILED_NO_RESOURCE: 'no capacity', FAILED_CONTROLLER: 'controller failed', not_available: 'not available', no_quota: 'no quota',
  no_balance: 'no balance',
};

/** The status in words. */
export function word(status: string): string {
  return WORDS[status] ?? status.toLowerCase().replaceAll('_', ' ');
}

/** Statuses of runs in the order in which counts are shown. */
export const RUN_STATUSES = ['running', 'submitted', 'pending', 'provisioning', 'terminating', 'failed', 'terminated', 'done'] as const;

export function isFinal(status: string): boolean {
  return ['terminated', 'failed', 'done', 'aborted', 'SUCCEEDED', 'CANCELLED', 'Complete', 'Cancelled'].includes(status) || status.startsWith('FAILED');
}
