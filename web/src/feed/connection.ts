/** The connection to the feed: one at a time, opened again when it is lost or silent. Used by worker and page alike. */
import { changesPath, completeRow, type Block, type FeedChange, type FeedGone, type FeedHello, type Summary } from '../api/api';
import { ApiError, readEvents } from '../lib/call';

export type FeedMessage =
  | { type: 'hello'; hello: FeedHello }
  | { type: 'batch'; changes: FeedChange[]; gone: FeedGone[] }
  | { type: 'counts'; summary: Summary }
  | { type: 'resync' }
  | { type: 'state'; state: FeedState }
  | { type: 'blocks'; blocks: Map<string, Block[]> }
  /** Whether a log may be followed by a stream of its own. */
  | { type: 'log-stream'; id: string; isGranted: boolean };

export type FromTab = { type: 'leave' } | { type: 'blocks'; areWanted: boolean } | { type: 'log'; id: string; isWanted: boolean };

export interface FeedState {
  connected: boolean;
  /** When something last came, by the browser's clock. */
  lastMessageAt: number;
  /** Answer of the server to the last try, null when there was none. */
  status: number | null;
  message: string | null;
}

/** The server says something every 5 s. */
const SILENCE_MAX = 16_000;
const BATCH_MS = 40;
const PAUSE_MAX = 10_000;

export class FeedConnection {
  #emit: (message: FeedMessage) => void;
  #seq: number | null = null;
  #lastMessageAt = Date.now();
  #reportedAt = 0;
  #abort: AbortController | null = null;
  #changes: FeedChange[] = [];
  #gone: FeedGone[] = [];
  #timer: ReturnType<typeof setTimeout> | null = null;
  #pause = 0;
  #stopped = true;
  #connected = false;
  hello: FeedHello | null = null;

  constructor(emit: (message: FeedMessage) => void) {
    this.#emit = emit;
  }

  get state(): FeedState {
    return { connected: this.#connected, lastMessageAt: this.#lastMessageAt, status: null, message: null };
  }

  start(): void {
    if (!this.#stopped) return;
    this.#stopped = false;
    void this.#run();
  }

  stop(): void {
    this.#stopped = true;
    this.#abort?.abort();
  }

  async #run(): Promise<void> {
    while (!this.#stopped) {
      const abort = (this.#abort = new AbortController());
      const watch = setInterval(() => {
        if (Date.now() - this.#lastMessageAt > SILENCE_MAX) abort.abort();
      }, 1000);
      let status: number | null = null;
      let message: string | null = null;
      this.#lastMessageAt = Math.max(this.#lastMessageAt, Date.now() - SILENCE_MAX + 8000);
      try {
        await readEvents(
          changesPath(this.#seq),
          { signal: abort.signal, ...(this.#seq === null ? {} : { lastEventId: String(this.#seq) }), onBytes: () => this.#touch(), onOpen: () => this.#open() },
          (event) => this.#dispatch(event.event, event.data),
        );
      } catch (error) {
        if (error instanceof ApiError) {
          status = error.status;
          message = error.message;
          if (error.retryAfter !== null) this.#pause = error.retryAfter * 1000;
        }
      }
      clearInterval(watch);
      this.#connected = false;
      if (this.#stopped) return;
      this.#emit({ type: 'state', state: { connected: false, lastMessageAt: this.#lastMessageAt, status, message } });
      this.#pause = Math.min(Math.max(this.#pause * 2, 250), PAUSE_MAX);
      await new Promise((done) => setTimeout(done, this.#pause));
    }
  }

  #open(): void {
    this.#pause = 0;
    this.#connected = true;
    this.#touch(true);
  }

  #touch(now = false): void {
    this.#lastMessageAt = Date.now();
    if (now || this.#lastMessageAt - this.#reportedAt > 2000) {
      this.#reportedAt = this.#lastMessageAt;
      this.#emit({ type: 'state', state: this.state });
    }
  }

  #dispatch(event: string, data: string): void {
    switch (event) {
      case 'hello':
        this.hello = JSON.parse(data) as FeedHello;
        this.#seq ??= this.hello.seq;
        this.#emit({ type: 'hello', hello: this.hello });
        break;
      case 'change': {
        const change = JSON.parse(data) as FeedChange;
        if (change.row) completeRow(change.kind, change.row);
        this.#seq = Math.max(this.#seq ?? 0, change.seq);
        this.#changes.push(change);
        this.#flushSoon();
        break;
      }
      case 'gone': {
        const gone = JSON.parse(data) as FeedGone;
        this.#seq = Math.max(this.#seq ?? 0, gone.seq);
        this.#gone.push(gone);
        this.#flushSoon();
        break;
      }
      case 'counts':
        this.#emit({ type: 'counts', summary: JSON.parse(data) as Summary });
        break;
      case 'resync':
        this.#emit({ type: 'resync' });
        break;
    }
  }

  #flushSoon(): void {
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      const changes = this.#changes;
      const gone = this.#gone;
      this.#changes = [];
      this.#gone = [];
      this.#emit({ type: 'batch', changes, gone });
    }, BATCH_MS);
  }
}
