/** What the page knows: rows by kind, counts, and how fresh they are. */
import type { Block, ContainerRow, FeedChange, FeedGone, InstanceRow, Kind, ManagedJobRow, RunRow, Summary } from '../api/api';
import { BlockStream } from '../feed/blocks';
import { FeedConnection, type FeedMessage, type FeedState, type FromTab } from '../feed/connection';
import { LogStreams } from '../feed/streams';
import feedUrl from '../feed/feed.worker?sharedworker&url';
import { reportSessionLost } from '../lib/call';
import { time } from '../lib/clock.svelte';
import { workerUrl } from '../lib/trusted';
import { Table } from './table';

/** Rows of one kind with a counter that tells lists to look again. */
export class LiveTable<Row> {
  readonly table = new Table<Row>();
  version = $state(0);

  /** The row, tracked: reads again when any row of the kind changes. */
  get(id: string): Row | undefined {
    void this.version;
    return this.table.rows.get(id);
  }

  /** Rows of a list answer. */
  applyRows(rows: Row[], id: (row: Row) => string, asOf: number): void {
    let changed = false;
    for (const row of rows) changed = this.table.put(id(row), row, asOf) || changed;
    if (changed) this.version++;
  }
}

export const runs = new LiveTable<RunRow>();
export const managedJobs = new LiveTable<ManagedJobRow>();
export const instances = new LiveTable<InstanceRow>();
export const containers = new LiveTable<ContainerRow>();

const tables: Partial<Record<Kind, LiveTable<unknown>>> = {
  run: runs as LiveTable<unknown>,
  'managed-job': managedJobs as LiveTable<unknown>,
  instance: instances as LiveTable<unknown>,
  container: containers as LiveTable<unknown>,
};

let isLost = false;
let state = $state.raw<FeedState>({ connected: false, lastMessageAt: Date.now(), status: null, message: null });
let summary = $state.raw<Summary | null>(null);
let uiVersion = $state<string | null>(null);
let resyncs = $state(0);

export const feed = {
  get state(): FeedState {
    return state;
  },
  /** Newest summary of list or feed; the parts that the feed leaves out stay. */
  get summary(): Summary | null {
    return summary;
  },
  /** Entry script that the server would serve now. */
  get uiVersion(): string | null {
    return uiVersion;
  },
  /** Grows when everything has to be asked for again. */
  get resyncs(): number {
    return resyncs;
  },
};

export function applySummary(next: Summary): void {
  if (summary && summary.as_of > next.as_of) return;
  summary = { ...(summary ?? {}), ...next };
}

const RUNS_MAX = 20_000;
/** Ids that lists show: the rest may go, so that a tab of many hours stays small. */
const inUse = new Set<() => Iterable<string>>();

export function holdRows(ids: () => Iterable<string>): () => void {
  inUse.add(ids);
  return () => inUse.delete(ids);
}

function prune(): void {
  if (runs.table.rows.size <= RUNS_MAX) return;
  const keep = new Set<string>();
  for (const ids of inUse) for (const id of ids()) keep.add(id);
  runs.table.keepOnly(keep);
}

/** What pages do when changes were missed: after the feed was lost, and when the server says so. */
const reloads = new Set<() => void>();

/** Calls back when everything has to be asked for again; answers how to stop. */
export function onReload(act: () => void): () => void {
  reloads.add(act);
  return () => reloads.delete(act);
}

const clears = new Set<() => void>();

/** Calls back when a session has ended. */
export function onClear(act: () => void): void {
  clears.add(act);
}

/** Forgets what was read, at the end of a session: another user may log in next. */
export function clearRows(): void {
  for (const table of Object.values(tables)) {
    table.table.clear();
    table.version++;
  }
  summary = null;
  for (const listener of blockListeners) listener(new Map());
  for (const act of clears) act();
}

type Listener = (changes: FeedChange[], gone: FeedGone[]) => void;
const listeners = new Set<Listener>();

/** Calls back for every batch of changes; answers how to stop. */
export function onChanges(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Calls `act` soon after something of these kinds changed, at most once in `ms`, and when changes were missed. */
export function onKinds(kinds: Kind[], act: () => void, ms = 500, wanted: (change: FeedChange | FeedGone) => boolean = () => true): () => void {
  let timer: ReturnType<typeof setTimeout> | null = null;
  const stop = onChanges((changes, gone) => {
    if (timer !== null) return;
    const hit = [...changes, ...gone].some((change) => kinds.includes(change.kind) && wanted(change));
    if (hit) timer = setTimeout(() => ((timer = null), act()), ms);
  });
  reloads.add(act);
  return () => {
    if (timer !== null) clearTimeout(timer);
    reloads.delete(act);
    stop();
  };
}

function applyMessage(message: FeedMessage): void {
  switch (message.type) {
    case 'state': {
      const isBack = message.state.connected && isLost;
      isLost = !message.state.connected && (isLost || state.connected);
      state = message.state;
      if (state.status === 401) reportSessionLost();
      // Not every change has an event that the feed repeats.
      if (isBack) for (const act of [...reloads]) act();
      break;
    }
    case 'hello':
      time.set(message.hello.now);
      uiVersion = message.hello.ui_version;
      break;
    case 'counts':
      applySummary(message.summary);
      break;
    case 'resync':
      resyncs++;
      for (const act of [...reloads]) act();
      break;
    case 'blocks':
      for (const listener of blockListeners) listener(message.blocks);
      break;
    case 'log-stream':
      logViews.get(message.id)?.(message.isGranted);
      break;
    case 'batch': {
      const touched = new Set<LiveTable<unknown>>();
      for (const change of message.changes) {
        const table = tables[change.kind];
        if (table && change.row && table.table.put(change.id, change.row, change.as_of)) touched.add(table);
      }
      for (const gone of message.gone) {
        const table = tables[gone.kind];
        if (table?.table.remove(gone.id, gone.as_of)) touched.add(table);
      }
      prune();
      for (const table of touched) table.version++;
      for (const listener of listeners) listener(message.changes, message.gone);
      break;
    }
  }
}

let leave: (() => void) | null = null;
/** Tells the worker, or what stands in for it. */
let tell: (message: FromTab) => void = () => {};
const blockListeners = new Set<(blocks: Map<string, Block[]>) => void>();
let areBlocksWanted = false;
/** Views that follow a log. */
const logViews = new Map<string, (isGranted: boolean) => void>();
let lastView = 0;

export function onBlocks(listener: (blocks: Map<string, Block[]>) => void): void {
  blockListeners.add(listener);
}

export function wantBlocks(areWanted: boolean): void {
  areBlocksWanted = areWanted;
  tell({ type: 'blocks', areWanted });
}

/** Asks for a stream for a log while this tab is seen; `act` is told whether there is one. Answers how to stop. */
export function wantLogStream(act: (isGranted: boolean) => void): () => void {
  const id = String(lastView++);
  logViews.set(id, act);
  if (!document.hidden) tell({ type: 'log', id, isWanted: true });
  return () => {
    logViews.delete(id);
    tell({ type: 'log', id, isWanted: false });
  };
}

document.addEventListener('visibilitychange', () => {
  for (const [id, act] of logViews) {
    if (document.hidden) act(false);
    tell({ type: 'log', id, isWanted: !document.hidden });
  }
});

/** Connects to the feed: through the worker of all tabs, or directly where there is none. */
export function openFeed(): void {
  if (leave) return;
  if (typeof SharedWorker === 'function') {
    const worker = new SharedWorker(workerUrl(feedUrl), { type: 'module', name: 'windlass-feed' });
    worker.port.onmessage = ({ data }: MessageEvent<FeedMessage>) => applyMessage(data);
    worker.port.start();
    tell = (message) => worker.port.postMessage(message);
    leave = () => {
      tell({ type: 'leave' });
      worker.port.close();
    };
  } else {
    const connection = new FeedConnection(applyMessage);
    const blocks = new BlockStream((known) => applyMessage({ type: 'blocks', blocks: known }));
    const logs = new LogStreams<null>((_, id, isGranted) => applyMessage({ type: 'log-stream', id, isGranted }));
    connection.start();
    tell = (message) => {
      if (message.type === 'blocks') blocks[message.areWanted ? 'start' : 'stop']();
      else if (message.type === 'log') logs[message.isWanted ? 'want' : 'release'](null, message.id);
    };
    leave = () => {
      connection.stop();
      blocks.stop();
    };
  }
  if (areBlocksWanted) tell({ type: 'blocks', areWanted: true });
  for (const id of logViews.keys()) tell({ type: 'log', id, isWanted: !document.hidden });
  addEventListener('pagehide', closeFeed, { once: true });
  addEventListener('pageshow', (event) => event.persisted && openFeed(), { once: true });
}

export function closeFeed(): void {
  leave?.();
  leave = null;
  tell = () => {};
}
