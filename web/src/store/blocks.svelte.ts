/** Blocks of instances as the server tells them, shared by everything that draws them. */
import type { Block } from '../api/api';
import { onBlocks, wantBlocks } from './store.svelte';

let blocks = $state.raw<Map<string, Block[]>>(new Map());
let users = 0;
onBlocks((next) => (blocks = next));

/** Blocks by id of their instance. */
export function blocksOf(id: string): Block[] | undefined {
  return blocks.get(id);
}

/** Asks for blocks while something shows them. */
export function watchBlocks(): () => void {
  if (users++ === 0) wantBlocks(true);
  return () => {
    if (--users === 0) wantBlocks(false);
  };
}
