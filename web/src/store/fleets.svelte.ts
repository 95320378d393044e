/** All instances that are not over, grouped by fleet; used by the overview, fleets and instances. */
import { rows, type InstanceRow } from '../api/api';
import { instances, onClear, onReload } from './store.svelte';

let loaded = $state(false);
let loading: Promise<void> | null = null;
// Instances that were read before may be gone since, and another session may see others.
onReload(() => { if (loading) { loading = null; void loadInstances().catch(() => {}); } });

onClear(() => {
  loading = null;
  loaded = false;
});

/** Asks once for all instances; the feed keeps them fresh afterwards. */
export async function loadInstances(): Promise<void> {
  loading ??= (async () => {
    let cursor: string | undefined;
    const known = new Set<string>();
    for (let page = 0; page < 20; page++) {
      const answer = await rows.instances({ statuses: ['pending', 'provisioning', 'idle', 'busy', 'terminating'], sort: 'name', limit: 500, ...(cursor ? { cursor } : {}) });
      instances.applyRows(answer.rows, (row) => row.id, answer.as_of);
      for (const row of answer.rows) known.add(row.id);
      if (answer.next === null) {
        // Those that ended while nothing told of it are in no answer.
        for (const row of [...instances.table.rows.values()]) if (row.status !== 'terminated' && !known.has(row.id)) instances.table.remove(row.id, answer.as_of);
        instances.version++;
        break;
      }
      cursor = answer.next;
    }
    loaded = true;
  })().catch((error: unknown) => {
    loading = null;
    throw error;
  });
  return loading;
}

export const fleetInstances = {
  get loaded(): boolean {
    return loaded;
  },
  /** Instances by `PROJECT/FLEET`, each by number. */
  byFleet(): Map<string, InstanceRow[]> {
    void instances.version;
    const found = new Map<string, InstanceRow[]>();
    for (const row of instances.table.rows.values()) {
      if (row.status === 'terminated') continue;
      const key = `${row.project}/${row.fleet ?? ''}`;
      const list = found.get(key);
      if (list) list.push(row);
      else found.set(key, [row]);
    }
    for (const list of found.values()) list.sort((a, b) => a.instance_num - b.instance_num);
    return new Map([...found].sort(([, a], [, b]) => b.reduce((n, row) => n + row.gpus, 0) - a.reduce((n, row) => n + row.gpus, 0)));
  },
};

