/**
 * A list of rows that is paged by the server and kept fresh by the feed.
 *
 * What is read does not move: rows change in place, rows that are new wait in `fresh` until they are asked for.
 */
import type { FeedChange, FeedGone, Kind, Rows, RowsRequest } from '../api/api';
import type { CallOptions } from '../lib/call';
import { matches } from '../text/filter';
import { holdRows, onChanges, type LiveTable } from './store.svelte';

const PAGE = 200;
const NEXT_PAGE = 500;
export const ROWS_MAX = 10_000;

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
  #known = new Set<string>();
  #abort: AbortController | null = null;
  #paging: Promise<void> | null = null;
  #countTimer: ReturnType<typeof setTimeout> | null = null;
  #stop: () => void;

  constructor(
    readonly table: LiveTable<Row>,
    readonly kind: Kind,
    readonly fetchRows: (body: RowsRequest, options?: CallOptions) => Promise<Rows<Row>>,
  ) {
    const stop = onChanges((changes, gone) => this.#changed(changes, gone));
    const release = holdRows(() => this.#known);
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
    this.loading = true;
    try {
      const answer = await this.fetchRows({ ...request, limit: PAGE }, { signal: abort.signal });
      if (abort.signal.aborted) return;
      this.table.applyRows(answer.rows, (row) => row.id, answer.as_of);
      this.#known = new Set(answer.rows.map((row) => row.id));
      this.order = answer.rows.map((row) => row.id);
      this.#next = answer.next;
      this.total = answer.total;
      this.more = answer.more;
      this.counts = answer.counts;
      this.fresh = [];
      this.error = null;
      this.loaded = true;
    } catch (error) {
      if (abort.signal.aborted) return;
      this.error = error;
    }
    if (!abort.signal.aborted) this.loading = false;
  }

  /** Makes sure that the row at an index is there, page after page. */
  ensure(index: number): void {
    if (index < this.order.length || this.#next === null || this.#paging || this.order.length >= ROWS_MAX) return;
    const abort = this.#abort;
    this.#paging = (async () => {
      while (this.#next !== null && this.order.length <= index && this.order.length < ROWS_MAX && !abort?.signal.aborted) {
        try {
          const answer = await this.fetchRows({ ...this.#request, cursor: this.#next, limit: NEXT_PAGE }, abort ? { signal: abort.signal } : {});
          if (abort?.signal.aborted) return;
          this.table.applyRows(answer.rows, (row) => row.id, answer.as_of);
          const added = answer.rows.map((row) => row.id).filter((id) => !this.#known.has(id));
          for (const id of added) this.#known.add(id);
          this.order = this.order.concat(added);
          this.#next = answer.next;
        } catch {
          return;
        }
      }
    })().finally(() => (this.#paging = null));
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
  }

  #changed(changes: FeedChange[], gone: FeedGone[]): void {
    let touched = false;
    let fresh: string[] | null = null;
    for (const change of changes) {
      if (change.kind !== this.kind) continue;
      touched = true;
      if (this.#known.has(change.id) || !change.row || !this.loaded) continue;
      if (!matches(change.row, this.#request)) continue;
      this.#known.add(change.id);
      fresh ??= [...this.fresh];
      fresh.push(change.id);
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
