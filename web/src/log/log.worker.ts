/** The worker of one log view: bytes, index of lines, following and searching. */
import { logs, type LogHit, type LogRef } from '../api/api';
import { ApiError, HEADERS, readEvents } from '../lib/call';
import { isFinal } from '../lib/status';
import { LineIndex } from './index';
import type { FromWorker, ToWorker } from './protocol';

const PIECE = 512 * 1024;
/** Read around a place that is jumped to: enough for the first screens. */
const JUMP = 128 * 1024;
const KEEP = 64 * 1024 * 1024;
const LINES_MAX = 1_200_000;
const STATE_MS = 50;
/** Pause between two reads of a log that has no stream. */
const POLL_MS = 2000;
const HITS_MAX = 10_000;
/** Pause before a search goes on with what was added to the log. */
const SEARCH_AGAIN_MS = 300;
const WINDOW_HITS_MAX = 1000;
const WINDOW_SEARCH_MS = 150;

let log: LogRef | null = null;
let index = new LineIndex(0);
let size = 0;
let first = 0;
let attached = false;
let ended: { status: string; exit_status: number | null; termination_reason: string | null } | null = null;
let failure: string | null = null;
let generation = 0;
let stream: AbortController | null = null;
let hasStream = false;
let search: Search | null = null;
let extending = false;
let stateTimer: ReturnType<typeof setTimeout> | null = null;
let searchTimer: ReturnType<typeof setTimeout> | null = null;
/** Offsets of the lines that the page asked for last. */
let seen = { from: 0, to: 0 };
let windowSearch: AbortController | null = null;
let windowTimer: ReturnType<typeof setTimeout> | null = null;
let shift = 0;
let lastMark = 0;
let newMarks: [number, number][] = [];

/** A search, which goes on when the log grows. */
interface Search {
  request: Extract<ToWorker, { type: 'search' }>;
  abort: AbortController;
  /** Offsets of the hits that the page knows. */
  offsets: number[];
  /** Bytes that were searched; null until the first pass has ended. */
  scanned: number | null;
  isRunning: boolean;
  /** Whether nothing is added any more. */
  isOver: boolean;
  /** Whether it found more than it lists. */
  hasMore: boolean;
}

const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
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
  searchAdded();
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
  stream?.abort();
  const abort = (stream = new AbortController());
  const ref = log;
  // The job has ended; a stream reads what is left of its log and ends by itself.
  let isOver = false;
  void (async () => {
    while (mine === generation && !abort.signal.aborted && !ended) {
      try {
        await readEvents(logs.streamPath(ref, { offset: index.end, follow: hasStream || isOver }), { signal: abort.signal }, (event) => {
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
            if (!hasStream && !isOver) {
              isOver = isFinal(end.status);
              return;
            }
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
      if (!ended && !isOver && !abort.signal.aborted) await new Promise((done) => setTimeout(done, hasStream ? 1000 : POLL_MS));
    }
  })();
}

function isAscii(bytes: Uint8Array): boolean {
  for (const byte of bytes) if (byte > 127) return false;
  return true;
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

function startSearch(request: Search['request']): void {
  stopSearch();
  search = { request, abort: new AbortController(), offsets: [], scanned: null, isRunning: false, isOver: false, hasMore: false };
  if (log) void scan(search);
}
function stopSearch(): void {
  search?.abort.abort();
  search = null;
  windowSearch?.abort();
  windowSearch = null;
}

/** Where a search goes on: whole lines before what was searched, for their context and for a line that was not complete. */
function resumeAt({ scanned, request }: Search): number {
  if (scanned === null || scanned < index.start || scanned > index.end || index.lines === 0) return 0;
  let line = Math.max(0, index.find(scanned) - 2 * request.context - 1);
  while (line > 0 && index.line(line - 1).cut) line--;
  return line === 0 && index.start > first ? 0 : index.line(line).offset;
}

/** Searches what was not searched yet. */
async function scan(mine: Search): Promise<void> {
  if (!log || mine.isRunning || mine.isOver) return;
  mine.isRunning = true;
  const { q, regex, ignoreCase, context, ticket } = mine.request;
  const isFirst = mine.scanned === null;
  const begin = resumeAt(mine);
  mine.offsets = mine.offsets.filter((offset) => offset < begin);
  let from: number | null = begin;
  let hits: LogHit[] = [];
  let scanned = begin;
  let whole = size;
  let more = false;
  let timer: ReturnType<typeof setTimeout> | null = null;
  const flush = (done: boolean, error: string | null = null) => {
    if (timer !== null) clearTimeout(timer);
    timer = null;
    // Another search has begun since.
    if (mine.abort.signal.aborted) return;
    post({ type: 'hits', ticket, from, hits, scanned, size: whole, done: done || !isFirst, more, error });
    from = null;
    hits = [];
  };
  try {
    const args = { q, regex, ignore_case: ignoreCase, from: begin, limit: HITS_MAX - mine.offsets.length, context };
    await readEvents(logs.searchPath(log, args), { signal: mine.abort.signal }, (event) => {
      if (event.event === 'hit') {
        const hit = JSON.parse(event.data) as LogHit;
        mine.offsets.push(hit.offset);
        hits.push(hit);
      } else if (event.event === 'progress') ({ scanned, size: whole } = JSON.parse(event.data) as { scanned: number; size: number });
      else if (event.event === 'end') ({ more } = JSON.parse(event.data) as { more: boolean });
      // What is searched again replaces the hits there at once, and not one after the other.
      if (isFirst) timer ??= setTimeout(() => flush(false), 60);
    });
    mine.scanned = scanned;
    mine.isOver = mine.hasMore = more;
    flush(true);
    if (more) markWindowSoon();
  } catch (error) {
    mine.isOver = true;
    flush(true, error instanceof Error ? error.message : String(error));
  }
  mine.isRunning = false;
  searchAdded();
}

/** Searches the lines that are seen, if the list of hits ends before them. */
async function markWindow(): Promise<void> {
  const mine = search;
  const { from, to } = seen;
  if (!mine?.hasMore || !log || to <= (mine.offsets.at(-1) ?? 0)) return;
  windowSearch?.abort();
  const abort = (windowSearch = new AbortController());
  const { q, regex, ignoreCase, ticket } = mine.request;
  const hits: LogHit[] = [];
  try {
    await readEvents(logs.searchPath(log, { q, regex, ignore_case: ignoreCase, from, limit: WINDOW_HITS_MAX }), { signal: abort.signal }, (event) => {
      if (event.event === 'hit') {
        const hit = JSON.parse(event.data) as LogHit;
        if (hit.offset < to) hits.push(hit);
        else abort.abort();
      } else if (event.event === 'progress' && (JSON.parse(event.data) as { scanned: number }).scanned >= to) abort.abort();
    });
  } catch {
    // The search tells what is wrong.
  }
  if (windowSearch === abort && mine === search) post({ type: 'window-hits', ticket, hits });
}
function markWindowSoon(): void {
  windowTimer ??= setTimeout(() => {
    windowTimer = null;
    void markWindow();
  }, WINDOW_SEARCH_MS);
}

/** Lets the search go on if the log is longer than what was searched. */
function searchAdded(): void {
  if (!search || search.isRunning || search.isOver || search.scanned === null || size <= search.scanned || searchTimer !== null) return;
  searchTimer = setTimeout(() => {
    searchTimer = null;
    if (search && search.scanned !== null && size > search.scanned) void scan(search);
  }, SEARCH_AGAIN_MS);
}

onmessage = ({ data }: MessageEvent<ToWorker>) => {
  switch (data.type) {
    case 'open':
      generation++;
      log = data.log;
      size = 0;
      ended = null;
      lastMark = 0;
      void load(data.at, generation);
      // The search that is wanted may have been told before the log.
      if (search) startSearch(search.request);
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
        const bytes = index.bytes(line);
        const text = decoder.decode(bytes);
        lines.push({ offset: line.offset, length: line.length, text, bytes: isAscii(bytes) ? null : bytes.slice(), cut: line.cut });
      }
      post({ type: 'lines', first: from, lines, ticket: data.ticket });
      const last = lines.at(-1);
      seen = { from: lines[0]?.offset ?? 0, to: last ? last.offset + last.length : 0 };
      if (search?.hasMore) markWindowSoon();
      break;
    }
    case 'extend':
      void extend(data.where);
      break;
    case 'search':
      startSearch(data);
      break;
    case 'search-stop':
      stopSearch();
      break;
    case 'stream':
      if (hasStream === data.isGranted) break;
      hasStream = data.isGranted;
      if (attached) follow(generation);
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
