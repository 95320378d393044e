/** The worker of one log view: bytes, index of lines, following and searching. */
import { logs, type LogHit, type LogRef } from '../api/api';
import { ApiError, HEADERS, readEvents } from '../lib/call';
import { LineIndex } from './index';
import type { FromWorker, ToWorker } from './protocol';

const PIECE = 512 * 1024;
/** Read around a place that is jumped to: enough for the first screens. */
const JUMP = 128 * 1024;
const KEEP = 64 * 1024 * 1024;
const LINES_MAX = 1_200_000;
const STATE_MS = 50;

let log: LogRef | null = null;
let index = new LineIndex(0);
let size = 0;
let first = 0;
let attached = false;
let ended: { status: string; exit_status: number | null; termination_reason: string | null } | null = null;
let failure: string | null = null;
let generation = 0;
let stream: AbortController | null = null;
let search: AbortController | null = null;
let extending = false;
let stateTimer: ReturnType<typeof setTimeout> | null = null;
let shift = 0;
let lastMark = 0;
let newMarks: [number, number][] = [];

const decoder = new TextDecoder();
const post = (message: FromWorker) => postMessage(message);

interface Base64Array {
  fromBase64?: (text: string) => Uint8Array;
}
const native = (Uint8Array as unknown as Base64Array).fromBase64;
function fromBase64(text: string): Uint8Array {
  if (native) return native.call(Uint8Array, text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

function postState(landed: number | null = null): void {
  if (stateTimer !== null) clearTimeout(stateTimer);
  stateTimer = null;
  post({ type: 'state', state: { start: index.start, end: index.end, first, size, lines: index.lines, attached, ended, error: failure }, shift, landed });
  shift = 0;
  if (newMarks.length) {
    post({ type: 'marks', marks: newMarks });
    newMarks = [];
  }
}
function postStateSoon(): void {
  stateTimer ??= setTimeout(() => postState(), STATE_MS);
}

async function raw(offset: number, limit: number): Promise<Uint8Array> {
  if (!log) return new Uint8Array();
  const response = await fetch(logs.rawPath(log, { offset, limit }), { headers: HEADERS, credentials: 'same-origin', cache: 'no-store' });
  if (!response.ok) {
    let message = `The server answered ${response.status}.`;
    try {
      const { detail } = (await response.json()) as { detail: { msg?: string } | { msg?: string }[] };
      message = (Array.isArray(detail) ? detail[0]?.msg : detail.msg) ?? message;
    } catch {
      // The status says enough.
    }
    throw new ApiError(response.status, message);
  }
  size = Math.max(size, Number(response.headers.get('X-Log-Size') ?? 0));
  first = Number(response.headers.get('X-Log-First') ?? 0);
  return new Uint8Array(await response.arrayBuffer());
}

/** Loads the part around an offset, beginning with a whole line. */
async function load(at: number | 'end', mine: number): Promise<void> {
  stream?.abort();
  attached = false;
  failure = null;
  try {
    if (at === 'end' || size === 0) await raw(0, 0);
    if (mine !== generation) return;
    const wanted = at === 'end' ? size : Math.max(first, Math.min(at, size));
    const from = Math.max(first, wanted - (at === 'end' ? PIECE : JUMP / 2));
    const bytes = await raw(from, at === 'end' ? PIECE : JUMP);
    if (mine !== generation) return;
    const skip = from > first ? bytes.indexOf(10) + 1 : 0;
    index = new LineIndex(from + skip);
    index.append(bytes.subarray(skip));
    shift = 0;
    if (index.end >= size) follow(mine);
    postState(at === 'end' ? Math.max(0, index.lines - 1) : index.find(wanted));
  } catch (error) {
    if (mine !== generation) return;
    failure = error instanceof Error ? error.message : String(error);
    postState();
  }
}

/** Reads what is added, from the end of the part. */
function follow(mine: number): void {
  if (!log || ended) return;
  attached = true;
  const abort = (stream = new AbortController());
  const ref = log;
  void (async () => {
    while (mine === generation && !abort.signal.aborted && !ended) {
      try {
        await readEvents(logs.streamPath(ref, { offset: index.end, follow: true }), { signal: abort.signal }, (event) => {
          if (mine !== generation || abort.signal.aborted) return;
          if (event.event === 'log') {
            const piece = JSON.parse(event.data) as { offset: number; timestamp: string; message: string };
            let bytes = fromBase64(piece.message);
            // A piece that was read already is left out, a part of one is cut.
            if (piece.offset + bytes.length <= index.end) return;
            if (piece.offset < index.end) bytes = bytes.subarray(index.end - piece.offset);
            const at = Date.parse(piece.timestamp);
            if (at - lastMark >= 1000) {
              lastMark = at;
              newMarks.push([index.end, at]);
            }
            index.append(bytes);
            size = Math.max(size, index.end);
            trimStart();
            postStateSoon();
          } else if (event.event === 'end') {
            const end = JSON.parse(event.data) as { status: string; exit_status: number | null; termination_reason: string | null };
            ended = { status: end.status, exit_status: end.exit_status, termination_reason: end.termination_reason };
            attached = false;
            postState();
          }
        });
        failure = null;
      } catch (error) {
        if (abort.signal.aborted || mine !== generation) return;
        failure = error instanceof ApiError ? error.message : 'The connection was lost; trying again.';
        postStateSoon();
      }
      if (!ended && !abort.signal.aborted) await new Promise((done) => setTimeout(done, 1000));
    }
  })();
}

function trimStart(): void {
  let gone = index.size > KEEP * 1.1 ? index.trimStart(KEEP) : 0;
  if (index.lines > LINES_MAX * 1.1) gone += index.trimStart(index.end - index.line(index.lines - LINES_MAX).offset);
  shift -= gone;
}

async function extend(where: 'before' | 'after'): Promise<void> {
  if (extending) return;
  extending = true;
  const mine = generation;
  try {
    if (where === 'before' && index.start > first) {
      const from = Math.max(first, index.start - PIECE);
      const bytes = await raw(from, index.start - from);
      if (mine !== generation) return;
      const newline = from > first ? bytes.indexOf(10) : -1;
      // A piece without a line end is a part of one long line: it is taken as it is.
      const skip = newline >= 0 && newline + 1 < bytes.length ? newline + 1 : 0;
      shift += index.prepend(bytes.subarray(skip));
      if (index.size > KEEP && !attached) index.trimEnd(KEEP);
      postState();
    } else if (where === 'after' && !attached && index.end < size) {
      const bytes = await raw(index.end, PIECE);
      if (mine !== generation) return;
      index.append(bytes);
      trimStart();
      if (index.end >= size) follow(mine);
      postState();
    }
  } catch (error) {
    failure = error instanceof Error ? error.message : String(error);
    postState();
  } finally {
    extending = false;
  }
}

async function find(message: Extract<ToWorker, { type: 'search' }>): Promise<void> {
  search?.abort();
  if (!log) return;
  const abort = (search = new AbortController());
  let hits: LogHit[] = [];
  let scanned = 0;
  let whole = size;
  let more = false;
  let timer: ReturnType<typeof setTimeout> | null = null;
  const flush = (done: boolean, error: string | null = null) => {
    if (timer !== null) clearTimeout(timer);
    timer = null;
    post({ type: 'hits', hits, scanned, size: whole, done, more, error });
    hits = [];
  };
  try {
    await readEvents(logs.searchPath(log, { q: message.q, regex: message.regex, ignore_case: message.ignoreCase, limit: 10_000, context: message.context }), { signal: abort.signal }, (event) => {
      if (abort.signal.aborted) return;
      if (event.event === 'hit') hits.push(JSON.parse(event.data) as LogHit);
      else if (event.event === 'progress') ({ scanned, size: whole } = JSON.parse(event.data) as { scanned: number; size: number });
      else if (event.event === 'end') ({ more } = JSON.parse(event.data) as { more: boolean });
      timer ??= setTimeout(() => flush(false), 60);
    });
    if (!abort.signal.aborted) flush(true);
  } catch (error) {
    if (!abort.signal.aborted) flush(true, error instanceof Error ? error.message : String(error));
  }
}

onmessage = ({ data }: MessageEvent<ToWorker>) => {
  switch (data.type) {
    case 'open':
      generation++;
      search?.abort();
      log = data.log;
      size = 0;
      ended = null;
      lastMark = 0;
      void load(data.at, generation);
      break;
    case 'seek': {
      const inside = data.at === 'end' ? attached || (ended !== null && index.end >= size) : data.at >= index.start && data.at < index.end;
      if (inside) postState(data.at === 'end' ? Math.max(0, index.lines - 1) : index.find(data.at));
      else void load(data.at, ++generation);
      break;
    }
    case 'window': {
      const from = Math.max(0, Math.min(data.first, index.lines));
      const to = Math.min(index.lines, data.first + data.count);
      const lines = [];
      for (let i = from; i < to; i++) {
        const line = index.line(i);
        lines.push({ offset: line.offset, length: line.length, text: decoder.decode(index.bytes(line)), cut: line.cut });
      }
      post({ type: 'lines', first: from, lines, ticket: data.ticket });
      break;
    }
    case 'extend':
      void extend(data.where);
      break;
    case 'search':
      void find(data);
      break;
    case 'search-stop':
      search?.abort();
      break;
    case 'text': {
      const parts: string[] = [];
      for (let i = Math.max(0, data.from); i < Math.min(index.lines, data.to); i++) {
        const line = index.line(i);
        parts.push(decoder.decode(index.bytes(line)) + (line.cut ? '' : '\n'));
      }
      post({ type: 'text', text: parts.join(''), ticket: data.ticket });
      break;
    }
  }
};
