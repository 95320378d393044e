/** A request to the server whose answer is shown, and repeated when something changed. */
import type { CallOptions } from './call';

export class Query<T> {
  value = $state.raw<T | null>(null);
  error = $state.raw<unknown>(null);
  loading = $state(false);
  #abort: AbortController | null = null;
  #fetch: (options: CallOptions) => Promise<T>;

  constructor(fetch: (options: CallOptions) => Promise<T>) {
    this.#fetch = fetch;
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
