/** Keys: single ones can be switched off and never act inside fields. */
import { prefs } from './prefs.svelte';

export interface KeyBinding {
  /** As in `KeyboardEvent.key`; `Ctrl+k` for combinations. */
  key: string;
  label: string;
  act: (event: KeyboardEvent) => void;
  /** Where the help sheet lists it. */
  group?: string;
}

const stack = $state.raw<{ layers: KeyBinding[][] }>({ layers: [] });
let layers: KeyBinding[][] = [];

/** Adds keys while a page or dialog is open; the newest are asked first. Answers how to remove them. */
export function bindKeys(bindings: KeyBinding[]): () => void {
  layers = [...layers, bindings];
  stack.layers = layers;
  return () => {
    layers = layers.filter((layer) => layer !== bindings);
    stack.layers = layers;
  };
}

/** Every key that acts now, for the help sheet. */
export function activeKeys(): KeyBinding[] {
  return layers.flat();
}

function inField(target: EventTarget | null): boolean {
  const element = target as HTMLElement | null;
  if (!element?.closest) return false;
  return element.closest('input, textarea, select, [contenteditable], [role="textbox"], .no-keys') !== null;
}

export function listenForKeys(): void {
  addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.isComposing) return;
    const combined = event.ctrlKey || event.metaKey;
    if (event.altKey) return;
    const single = !combined && event.key.length === 1;
    const typed = event.composedPath()[0] ?? event.target;
    if (!combined && event.key !== 'Escape' && (inField(typed) || inField(event.target))) return;
    if (single && !prefs.keys) return;
    // Space and Enter belong to buttons and links that have the focus.
    if ((event.key === ' ' || event.key === 'Enter') && (event.target as HTMLElement | null)?.closest?.('button, a, summary')) return;
    if (document.querySelector('dialog[open]') && !combined && event.key !== 'Escape') return;
    const name = combined ? `Ctrl+${event.key.toLowerCase()}` : event.key;
    for (let i = layers.length - 1; i >= 0; i--) {
      const binding = layers[i]?.find((entry) => entry.key === name);
      if (binding) {
        event.preventDefault();
        binding.act(event);
        return;
      }
    }
  });
}
