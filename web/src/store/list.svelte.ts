/**
 * A list of rows that is paged by the server and kept fresh by the feed.
 *
 * What is read does not move: rows change in place, rows that are new wait in `fresh` until they are asked for.
 */
import type { FeedChange, FeedGone, Kind, Rows, RowsRequest } from '../api/api';
import type { CallOptions } from '../lib/call';
import { matches } from '../text/filter';
import { holdRows, onChanges, onClear, type LiveTable } from './store.svelte';

const PAGE = 200;
const NEXT_PAGE = 500;
/** Pauses before a page that failed is asked for again. */
const AGAIN_MS = [1000, 2000, 5000, 10_000];
export const ROWS_MAX = 10_000;

/** Beginning of a list that was shown in this tab. */
interface Beginning {
  order: string[];
  total: number;
  more: boolean;
  counts: Record<string, number>;
}
/** By kind and request, the last one last. */
const remembered = new Map<string, Beginning>();
const REMEMBERED_MAX = 20;
onClear(() => remembered.clear());

export class RowList<Row extends { id: string }> {
  order = $state.raw<string[]>([]);
  total = $state(0);
  more = $state(false);
  counts = $state.raw<Record<string, number>>({});
  fresh = $state.raw<string[]>([]);
  loading = $state(false);
  loaded = $state(false);
  error = $state.raw<unknown>(null);
  #request: RowsRequest = {};
  #next: string | null = null;
  /** Ids of `order`. */
  #known = new Set<string>();
  /** Time at which the beginning was read, in microseconds. */
  #asOf = 0;
  #abort: AbortController | null = null;
  /** Index up to which rows are wanted. */
  #wanted = 0;
  #isPaging = false;
  #isFirst = true;
  #failures = 0;
  #againTimer: ReturnType<typeof setTimeout> | null = null;
  #countTimer: ReturnType<typeof setTimeout> | null = null;
  #stop: () => void;

  constructor(
    readonly table: LiveTable<Row>,
    readonly kind: Kind,
    readonly fetchRows: (body: RowsRequest, options?: CallOptions) => Promise<Rows<Row>>,
  ) {
    const stop = onChanges((changes, gone) => this.#changed(changes, gone));
    const release = holdRows(() => [...this.#known, ...this.fresh]);
    this.#stop = () => {
      stop();
      release();
    };
  }

  /** Asks for the beginning of a list. */
  async load(request: RowsRequest): Promise<void> {
    this.#abort?.abort();
    const abort = (this.#abort = new AbortController());
    this.#request = request;
    // Pages of the list before do not belong to this one.
    this.#next = null;
    this.loading = true;
    const key = `${this.kind} ${JSON.stringify(request)}`;
    // No state is read here: an effect that loads a list would load it again.
    if (this.#isFirst) this.#show(remembered.get(key));
    this.#isFirst = false;
    try {
      const answer = await this.fetchRows({ ...request, limit: PAGE }, { signal: abort.signal });
      if (abort.signal.aborted) return;
      this.table.applyRows(answer.rows, (row) => row.id, answer.as_of);
      this.#known = new Set(answer.rows.map((row) => row.id));
      this.order = answer.rows.map((row) => row.id);
      this.#asOf = answer.as_of;
      this.#next = answer.next;
      this.total = answer.total;
      this.more = answer.more;
      this.counts = answer.counts;
      this.fresh = [];
      this.error = null;
      this.loaded = true;
      remembered.delete(key);
      remembered.set(key, { order: this.order, total: this.total, more: this.more, counts: this.counts });
      const oldest = remembered.size > REMEMBERED_MAX ? remembered.keys().next().value : undefined;
      if (oldest !== undefined) remembered.delete(oldest);
    } catch (error) {
      if (abort.signal.aborted) return;
      this.error = error;
    }
    if (!abort.signal.aborted) this.loading = false;
  }

  /** Shows what this tab knows of a list until the server answers. */
  #show(known: Beginning | undefined): void {
    if (!known) return;
    const order = known.order.filter((id) => this.table.table.rows.has(id));
    this.#known = new Set(order);
    this.order = order;
    this.total = known.total;
    this.more = known.more;
    this.counts = known.counts;
    this.loaded = true;
  }

  /** Makes sure that the row at an index is there, page after page. */
  ensure(index: number): void {
    this.#wanted = index;
    // Who asks is told when the list begins anew, also while a page is on its way.
    if (index < this.order.length || this.#isPaging || this.#againTimer !== null) return;
    this.#isPaging = true;
    void this.#readPages().finally(() => (this.#isPaging = false));
  }

  async #readPages(): Promise<void> {
    while (this.#next !== null && this.#wanted >= this.order.length && this.order.length < ROWS_MAX) {
      const abort = this.#abort;
      try {
        const answer = await this.fetchRows({ ...this.#request, cursor: this.#next, limit: NEXT_PAGE }, abort ? { signal: abort.signal } : {});
        this.#failures = 0;
        // The list began anew meanwhile: its pages follow.
        if (abort !== this.#abort) continue;
        this.table.applyRows(answer.rows, (row) => row.id, answer.as_of);
        const added = answer.rows.map((row) => row.id).filter((id) => !this.#known.has(id));
        for (const id of added) this.#known.add(id);
        this.order = this.order.concat(added);
        // A list that is not sorted by time has new rows on later pages, too.
        if (this.fresh.some((id) => this.#known.has(id))) this.fresh = this.fresh.filter((id) => !this.#known.has(id));
        this.#next = answer.next;
      } catch {
        if (abort !== this.#abort) continue;
        this.#readAgainSoon();
        return;
      }
    }
  }

  #readAgainSoon(): void {
    const pause = AGAIN_MS[Math.min(this.#failures++, AGAIN_MS.length - 1)] ?? 0;
    this.#againTimer = setTimeout(() => {
      this.#againTimer = null;
      this.ensure(this.#wanted);
    }, pause);
  }

  row(id: string): Row | undefined {
    return this.table.get(id);
  }

  /** Puts the rows that came meanwhile on top. */
  showFresh(): void {
    void this.load(this.#request);
  }

  close(): void {
    this.#abort?.abort();
    this.#stop();
    if (this.#countTimer !== null) clearTimeout(this.#countTimer);
    if (this.#againTimer !== null) clearTimeout(this.#againTimer);
    this.#next = null;
  }

  #changed(changes: FeedChange[], gone: FeedGone[]): void {
    let touched = false;
    let fresh: string[] | null = null;
    for (const change of changes) {
      if (change.kind !== this.kind) continue;
      touched = true;
      if (this.#known.has(change.id) || !change.row || !this.loaded) continue;
      if (!matches(change.row, this.#request) || !this.#isNew(change, change.row)) continue;
      fresh ??= [...this.fresh];
      if (!fresh.includes(change.id)) fresh.push(change.id);
    }
    if (fresh) {
      if (this.order.length === 0) void this.load(this.#request);
      else this.fresh = fresh;
    }
    const away = new Set(gone.filter((entry) => entry.kind === this.kind).map((entry) => entry.id));
    if (away.size) {
      touched = true;
      const left = this.order.filter((id) => !away.has(id));
      this.total -= this.order.length - left.length;
      this.order = left;
    }
    if (touched && this.loaded) this.#countSoon();
  }

  /** Whether a row that is not in the order is new in the list, and not one of a page that was not read yet. */
  #isNew(change: FeedChange, row: NonNullable<FeedChange['row']>): boolean {
    if (this.#next === null) return true;
    const created = Date.parse('submitted_at' in row ? row.submitted_at : row.created_at) * 1000;
    const statuses = this.#request.statuses ?? [];
    return created > this.#asOf || (statuses.length > 0 && change.from !== null && !statuses.includes(change.from));
  }

  #countSoon(): void {
    this.#countTimer ??= setTimeout(async () => {
      this.#countTimer = null;
      try {
        const answer = await this.fetchRows({ ...this.#request, limit: 0 }, this.#abort ? { signal: this.#abort.signal } : {});
        this.counts = answer.counts;
        this.more = answer.more;
      } catch {
        // Counts come again with the next change.
      }
    }, 2000);
  }
}
