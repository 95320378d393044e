/** One call to the server: JSON there, JSON back, refusals as `ApiError`. */

export interface CallOptions {
  method?: 'GET' | 'POST';
  signal?: AbortSignal;
  /** Sends an `Idempotency-Key`, so that a repeat after a lost answer is safe. */
  idempotent?: boolean;
  /** Does not report a lost session to the app. */
  quiet?: boolean;
}

/** A refusal or a failure to get an answer. `status` 0: no answer. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly code: string | null = null,
    readonly fields: string[] = [],
    readonly retryAfter: number | null = null,
    /** Names the request in the log of the server. */
    readonly requestId: string | null = null,
  ) {
    super(message);
    this.name = 'ApiError';
  }

  get notFound(): boolean {
    return this.status === 404 || this.code === 'resource_not_exists';
  }

  get forbidden(): boolean {
    return this.status === 403;
  }
}

export const HEADERS = { 'X-Windlass-UI': '1' } as const;

const RETRIES = 2;
let onLostSession: () => void = () => {};

/** Sets what happens when the server no longer knows the session. */
export function onSessionLost(act: () => void): void {
  onLostSession = act;
}

/** Says that the server no longer knows the session. */
export function reportSessionLost(): void {
  onLostSession();
}

/** A path with a query; absent values are left out. */
export function query(path: string, args: Record<string, string | number | boolean | null | undefined>): string {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(args)) {
    if (value !== undefined && value !== null) parts.set(name, String(value));
  }
  const text = parts.toString();
  return text ? `${path}?${text}` : path;
}

/** An address of a service, if it is one that a link may lead to. */
export function webAddress(value: unknown): string | null {
  if (typeof value !== 'string') return null;
  try {
    const { protocol } = new URL(value, location.href);
    return protocol === 'https:' || protocol === 'http:' ? value : null;
  } catch {
    return null;
  }
}

/** A key that is new with each call. `crypto.randomUUID` does not exist on plain HTTP. */
export function newKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

export async function call<Answer>(path: string, body: unknown, options: CallOptions = {}): Promise<Answer> {
  const method = options.method ?? 'POST';
  const headers: Record<string, string> = { ...HEADERS };
  if (method === 'POST') headers['Content-Type'] = 'application/json';
  if (options.idempotent) headers['Idempotency-Key'] = newKey();
  const init: RequestInit = { method, headers, credentials: 'same-origin', redirect: 'error' };
  if (options.signal) init.signal = options.signal;
  if (method === 'POST') init.body = JSON.stringify(body ?? {});
  for (let attempt = 0; ; attempt++) {
    try {
      const response = await fetch(path, init);
      if (response.ok) {
        const text = await response.text();
        return (text ? JSON.parse(text) : null) as Answer;
      }
      throw await refusal(response);
    } catch (error) {
      if (options.signal?.aborted) throw error;
      const failure = error instanceof ApiError ? error : new ApiError(0, 'The server does not answer.');
      if (failure.status === 401 && !options.quiet) onLostSession();
      const again = failure.status === 0 || failure.status === 503 || failure.status === 429;
      if (!again || attempt >= RETRIES) throw failure;
      await pause(failure.retryAfter === null ? 300 * 2 ** attempt : Math.min(failure.retryAfter, 5) * 1000);
    }
  }
}

async function refusal(response: Response): Promise<ApiError> {
  const after = Number(response.headers.get('Retry-After'));
  const retryAfter = Number.isFinite(after) && after > 0 ? after : null;
  let message = `The server answered ${response.status}.`;
  let code: string | null = null;
  let fields: string[] = [];
  try {
    const { detail } = (await response.json()) as { detail: unknown };
    const first = (Array.isArray(detail) ? detail[0] : detail) as Record<string, unknown> | string | undefined;
    if (typeof first === 'string') message = first;
    else if (first) {
      if (typeof first.msg === 'string') message = first.msg;
      if (typeof first.code === 'string') code = first.code;
      if (Array.isArray(first.loc)) fields = first.loc.map(String);
    }
  } catch {
    // The body is no JSON: a proxy answered. The status says enough.
  }
  return new ApiError(response.status, message, code, fields, retryAfter, response.headers.get('X-Request-Id'));
}

function pause(ms: number): Promise<void> {
  return new Promise((done) => setTimeout(done, ms));
}

/** One event of a `text/event-stream`. */
export interface StreamEvent {
  event: string;
  id: string;
  data: string;
}

/** Splits a stream of text into events. */
export class EventParser {
  #rest = '';
  #event = '';
  #id = '';
  #data: string[] = [];

  push(text: string, emit: (event: StreamEvent) => void): void {
    this.#rest += text;
    let from = 0;
    for (;;) {
      const end = this.#rest.indexOf('\n', from);
      if (end < 0) break;
      const line = this.#rest.slice(from, this.#rest[end - 1] === '\r' ? end - 1 : end);
      from = end + 1;
      this.#line(line, emit);
    }
    this.#rest = this.#rest.slice(from);
  }

  #line(line: string, emit: (event: StreamEvent) => void): void {
    if (line === '') {
      if (this.#data.length) emit({ event: this.#event || 'message', id: this.#id, data: this.#data.join('\n') });
      this.#event = '';
      this.#data = [];
      return;
    }
    if (line[0] === ':') return;
    const colon = line.indexOf(':');
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(line[colon + 1] === ' ' ? colon + 2 : colon + 1);
    if (name === 'data') this.#data.push(value);
    else if (name === 'event') this.#event = value;
    else if (name === 'id') this.#id = value;
  }
}

/**
 * Reads an event stream with `fetch`, because `EventSource` cannot send the header of section "security".
 * `onBytes` is called for everything that comes, comments included. Ends when the server ends it.
 */
export async function readEvents(
  path: string,
  options: { signal: AbortSignal; lastEventId?: string; onBytes?: () => void; onOpen?: () => void },
  emit: (event: StreamEvent) => void,
): Promise<void> {
  const headers: Record<string, string> = { ...HEADERS, Accept: 'text/event-stream' };
  if (options.lastEventId) headers['Last-Event-ID'] = options.lastEventId;
  const response = await fetch(path, { headers, credentials: 'same-origin', redirect: 'error', signal: options.signal, cache: 'no-store' });
  if (!response.ok || !response.body) throw await refusal(response);
  options.onOpen?.();
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    options.onBytes?.();
    parser.push(decoder.decode(value, { stream: true }), emit);
  }
}
