/** Short messages about what was done or refused. */
import { ApiError } from './call';

export interface Toast {
  id: number;
  tone: 'done' | 'failed';
  text: string;
  detail: string | null;
}

let next = 1;
export const toasts = $state<Toast[]>([]);

export function notify(text: string, tone: Toast['tone'] = 'done', detail: string | null = null): void {
  const id = next++;
  toasts.push({ id, tone, text, detail });
  if (toasts.length > 4) toasts.shift();
  setTimeout(() => dismiss(id), tone === 'done' ? 5_000 : 12_000);
}

export function dismiss(id: number): void {
  const at = toasts.findIndex((toast) => toast.id === id);
  if (at >= 0) toasts.splice(at, 1);
}

/** Says that something was refused: message, code and fields. */
export function notifyRefused(what: string, error: unknown): void {
  if (error instanceof ApiError) {
    const code = error.code && error.code !== 'error' ? ` (${error.code})` : '';
    notify(what, 'failed', `${error.message}${code}`);
  } else {
    notify(what, 'failed', error instanceof Error ? error.message : String(error));
  }
}

/** Copies text; works on plain HTTP too, where there is no clipboard. */
export async function copy(text: string, what = 'Copied'): Promise<void> {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyBySelection(text);
    notify(what);
  } catch {
    notify('Copying was refused by the browser', 'failed');
  }
}

function copyBySelection(text: string): void {
  const area = document.createElement('textarea');
  area.value = text;
  area.className = 'offscreen';
  document.body.append(area);
  area.select();
  document.execCommand('copy');
  area.remove();
}
