/** Blocks of instances, read through one stream while something shows them. Used by the worker of all tabs, or by the page. */
import { metrics, type Block, type BlockSample } from '../api/api';
import { readEvents } from '../lib/call';

const PAUSE = 3000;

export class BlockStream {
  /** What the stream told so far: blocks by the id of their instance. */
  known = new Map<string, Block[]>();
  #emit: (blocks: Map<string, Block[]>) => void;
  #abort: AbortController | null = null;

  constructor(emit: (blocks: Map<string, Block[]>) => void) {
    this.#emit = emit;
  }

  start(): void {
    if (this.#abort) return;
    this.#abort = new AbortController();
    void this.#run(this.#abort.signal);
  }

  stop(): void {
    this.#abort?.abort();
    this.#abort = null;
    this.known = new Map();
  }

  async #run(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      try {
        await readEvents(metrics.streamPath(), { signal }, (event) => {
          if (event.event !== 'sample' || signal.aborted) return;
          const sample = JSON.parse(event.data) as BlockSample;
          const next = new Map(this.known);
          for (const instance of sample.instances) next.set(instance.id, instance.blocks);
          this.known = next;
          this.#emit(next);
        });
      } catch {
        // Asked again below.
      }
      if (!signal.aborted) await new Promise((done) => setTimeout(done, PAUSE));
    }
  }
}
