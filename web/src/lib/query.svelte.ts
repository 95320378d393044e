/** A request to the server whose answer is shown, and repeated when something changed. */
import { onClear } from '../store/store.svelte';
import type { CallOptions } from './call';

/** Last answers by key, for pages that are opened again in this tab. */
const remembered = new Map<string, unknown>();
onClear(() => remembered.clear());

export class Query<T> {
  value = $state.raw<T | null>(null);
  error = $state.raw<unknown>(null);
  loading = $state(false);
  #abort: AbortController | null = null;
  #fetch: (options: CallOptions) => Promise<T>;
  #key: string | null;

  /** With a key, the last answer of this tab is shown until the next is there. */
  constructor(fetch: (options: CallOptions) => Promise<T>, key: string | null = null) {
    this.#fetch = fetch;
    this.#key = key;
    if (key !== null) this.value = (remembered.get(key) as T | undefined) ?? null;
  }

  /** Asks; the last answer stays until the next is there. */
  load = async (): Promise<void> => {
    this.#abort?.abort();
    const abort = (this.#abort = new AbortController());
    this.loading = true;
    try {
      const value = await this.#fetch({ signal: abort.signal });
      if (abort.signal.aborted) return;
      this.value = value;
      if (this.#key !== null) remembered.set(this.#key, value);
      this.error = null;
    } catch (error) {
      if (abort.signal.aborted) return;
      this.error = error;
    }
    if (!abort.signal.aborted) this.loading = false;
  };

  stop(): void {
    this.#abort?.abort();
  }
}

const POLL_MS = 30_000;

/** Asks again every 30 s while the page is seen, for what the feed does not tell; answers how to stop. */
export function poll(load: () => unknown): () => void {
  const timer = setInterval(() => {
    if (!document.hidden) load();
  }, POLL_MS);
  return () => clearInterval(timer);
}
