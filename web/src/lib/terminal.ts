/** A terminal over a WebSocket. Loaded when a terminal is opened. */
import { FitAddon } from '@xterm/addon-fit';
import { Terminal } from '@xterm/xterm';
import '@xterm/xterm/css/xterm.css';

/**
 * xterm puts its rules into `<style>` elements, which the content policy forbids. Their text goes into constructed
 * sheets instead: every style element that xterm makes below the target is given such a sheet.
 */
function withSheets<T>(make: () => T): T {
  const original = document.createElement.bind(document);
  document.createElement = ((name: string, options?: ElementCreationOptions) => {
    if (name !== 'style') return original(name, options);
    const sheet = new CSSStyleSheet();
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
    const stand = original('span') as HTMLElement;
    stand.hidden = true;
    let text = '';
    Object.defineProperty(stand, 'textContent', { get: () => text, set: (value: string) => { text = value; sheet.replaceSync(value); } });
    const remove = stand.remove.bind(stand);
    stand.remove = () => {
      document.adoptedStyleSheets = document.adoptedStyleSheets.filter((other) => other !== sheet);
      remove();
    };
    return stand;
  }) as typeof document.createElement;
  try {
    return make();
  } finally {
    document.createElement = original;
  }
}

export function openTerminal(target: HTMLElement, path: string, onmessage: (text: string | null) => void): () => void {
  const terminal = new Terminal({ fontFamily: 'ui-monospace, Menlo, "DejaVu Sans Mono", monospace', fontSize: 13, cursorBlink: !matchMedia('(prefers-reduced-motion: reduce)').matches, theme: { background: '#0f1216', foreground: '#e6e9ee', cursor: '#6cb0ff' } });
  const fit = new FitAddon();
  terminal.loadAddon(fit);
  withSheets(() => terminal.open(target));
  fit.fit();
  const socket = new WebSocket(`${location.origin.replace(/^http/, 'ws')}${path}`, 'windlass.terminal.v1');
  socket.binaryType = 'arraybuffer';
  const encoder = new TextEncoder();
  const resize = () => {
    fit.fit();
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type: 'resize', columns: terminal.cols, rows: terminal.rows }));
  };
  const observer = new ResizeObserver(resize);
  observer.observe(target);
  socket.onopen = () => {
    onmessage(null);
    resize();
    terminal.focus();
  };
  let exited = false;
  socket.onmessage = ({ data }: MessageEvent<ArrayBuffer | string>) => {
    if (typeof data !== 'string') {
      terminal.write(new Uint8Array(data));
      return;
    }
    const message = JSON.parse(data) as { type: string; status?: number };
    if (message.type === 'exit') {
      exited = true;
      onmessage(`The shell ended with status ${message.status ?? 0}.`);
    }
  };
  socket.onclose = ({ code }) => {
    if (code === 4403) onmessage('Your right to this job ended.');
    else if (!exited) onmessage('The connection was lost.');
  };
  terminal.onData((text) => socket.readyState === WebSocket.OPEN && socket.send(encoder.encode(text)));
  return () => {
    observer.disconnect();
    socket.onclose = null;
    socket.close();
    terminal.dispose();
  };
}
