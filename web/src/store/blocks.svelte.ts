/** Blocks of instances as the metrics stream tells them, shared by everything that draws them. */
import { metrics, type Block, type BlockSample } from '../api/api';
import { readEvents } from '../lib/call';

let blocks = $state.raw<Map<string, Block[]>>(new Map());
let users = 0;
let abort: AbortController | null = null;

async function run(signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    try {
      await readEvents(metrics.streamPath(), { signal }, (event) => {
        if (event.event !== 'sample') return;
        const sample = JSON.parse(event.data) as BlockSample;
        const next = new Map(blocks);
        for (const instance of sample.instances) next.set(instance.id, instance.blocks);
        blocks = next;
      });
    } catch {
      // Asked again below.
    }
    if (!signal.aborted) await new Promise((done) => setTimeout(done, 3000));
  }
}

/** Blocks by id of their instance. */
export function blocksOf(id: string): Block[] | undefined {
  return blocks.get(id);
}

/** Keeps the stream open while something shows blocks. */
export function watchBlocks(): () => void {
  if (users++ === 0) {
    abort = new AbortController();
    void run(abort.signal);
  }
  return () => {
    if (--users === 0) {
      abort?.abort();
      abort = null;
    }
  };
}
