/** Things that are done to runs and jobs, asked about first. */
import { jobs, runs, type RunRow } from '../api/api';
import { count, shellWord } from '../text/format';
import { confirm } from './confirm.svelte';
import { isFinal } from './status';
import { notify, notifyRefused } from './toast.svelte';

function byProject(rows: RunRow[]): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const row of rows) found.set(row.project, [...(found.get(row.project) ?? []), row.name]);
  return found;
}

export async function stopRuns(rows: RunRow[]): Promise<void> {
  const active = rows.filter((row) => !isFinal(row.status) && row.status !== 'terminating');
  if (active.length === 0) return notify('Nothing of this is active');
  const waiting = active.filter((row) => row.status === 'submitted' || row.status === 'pending').length;
  const what = active.length === 1 ? (active[0]?.name ?? '') : count(active.length, 'run');
  const answer = await confirm({
    title: `Stop ${what}?`,
    says: [
      active.length === waiting ? 'It leaves the queue and does not start.' : 'Programs are asked to end and have the time of `stop_duration` to say goodbye. Logs are kept.',
      ...(waiting > 0 && waiting < active.length ? [`${count(waiting, 'run')} of them ${waiting === 1 ? 'waits and leaves' : 'wait and leave'} the queue.`] : []),
    ],
    names: active.map((row) => `${row.project}/${row.name}`),
    action: 'Stop',
    option: { label: 'Abort', hint: '(do not wait for programs to end)' },
    command: `windlass stop -y ${active.slice(0, 3).map((row) => shellWord(row.name)).join(' ')}${active.length > 3 ? ' …' : ''}`,
  });
  if (!answer.yes) return;
  for (const [project, names] of byProject(active)) {
    try {
      await runs.stop(project, { runs_names: names, abort: answer.option });
      notify(names.length === 1 ? `Stopping ${names[0]}` : `Stopping ${count(names.length, 'run')} of ${project}`);
    } catch (error) {
      notifyRefused(`Stopping was refused in ${project}`, error);
    }
  }
}

export async function deleteRuns(rows: RunRow[]): Promise<boolean> {
  const over = rows.filter((row) => isFinal(row.status));
  if (over.length === 0) {
    notify('Only runs that are over can be deleted', 'failed', 'Stop them first.');
    return false;
  }
  const answer = await confirm({
    title: `Delete ${over.length === 1 ? over[0]?.name : count(over.length, 'run')}?`,
    says: ['It is no longer listed. Its events, and what it cost, stay.'],
    names: over.map((row) => `${row.project}/${row.name}`),
    action: 'Delete',
  });
  if (!answer.yes) return false;
  for (const [project, names] of byProject(over)) {
    try {
      await runs.remove(project, { runs_names: names });
      notify(`Deleted ${names.length === 1 ? names[0] : count(names.length, 'run')}`);
    } catch (error) {
      notifyRefused('Deleting was refused', error);
      return false;
    }
  }
  return true;
}

export async function cancelJobs(project: string, ids: number[]): Promise<void> {
  const answer = await confirm({
    title: ids.length === 1 ? `Cancel job ${ids[0]}?` : `Cancel ${count(ids.length, 'job')}?`,
    says: ['Its tasks are asked to end, and none of them is recovered again.'],
    names: ids.map(String),
    action: 'Cancel the job',
    command: `windlass jobs cancel -y ${ids.slice(0, 4).join(' ')}`,
  });
  if (!answer.yes) return;
  try {
    await jobs.cancel(project, { job_ids: ids });
    notify(ids.length === 1 ? `Cancelling job ${ids[0]}` : `Cancelling ${count(ids.length, 'job')}`);
  } catch (error) {
    notifyRefused('Cancelling was refused', error);
  }
}
