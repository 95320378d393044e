import { afterEach, describe, expect, it, vi } from 'vitest';
import { completeRow, type RunRow } from '../../src/api/api';
import { FeedConnection, type FeedMessage } from '../../src/feed/connection';

const encoder = new TextEncoder();
const change = (seq: number) => `id: ${seq}\nevent: change\ndata: ${JSON.stringify({ seq, as_of: seq, kind: 'run', id: `r${seq}`, row: { id: `r${seq}`, name: 'x' } })}\n\n`;

/** A server that answers each connection with the next text and then ends it. */
function serve(texts: string[]): { headers: Headers; path: string }[] {
  const seen: { headers: Headers; path: string }[] = [];
  vi.stubGlobal('fetch', (path: string, init: RequestInit) => {
    seen.push({ headers: new Headers(init.headers), path });
    const text = texts[seen.length - 1];
    if (text === undefined) return new Promise(() => {});
    if (text === '503') return Promise.resolve(new Response('{"detail":{"msg":"starting"}}', { status: 503 }));
    return Promise.resolve(new Response(new ReadableStream({ start(controller) { controller.enqueue(encoder.encode(text)); controller.close(); } })));
  });
  return seen;
}

afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

describe('the feed', () => {
  it('resumes after the last change it heard, and sends the header', async () => {
    vi.useFakeTimers();
    const seen = serve(['event: hello\ndata: {"seq":5,"ui_version":"a","server_version":"1","now":"2026-01-01T00:00:00Z"}\n\n' + change(6) + change(7), '503', change(8)]);
    const messages: FeedMessage[] = [];
    const connection = new FeedConnection((message) => messages.push(message));
    connection.start();
    await vi.advanceTimersByTimeAsync(5000);
    expect(seen.length).toBeGreaterThanOrEqual(3);
    expect(seen[0]?.headers.get('X-Windlass-UI')).toBe('1');
    expect(seen[0]?.headers.get('Last-Event-ID')).toBeNull();
    expect(seen[1]?.headers.get('Last-Event-ID')).toBe('7');
    expect(seen[1]?.path).toContain('since=7');
    const ids = messages.flatMap((message) => (message.type === 'batch' ? message.changes.map((entry) => entry.id) : []));
    expect(ids).toEqual(['r6', 'r7', 'r8']);
    expect(messages.some((message) => message.type === 'state' && message.state.status === 503)).toBe(true);
    connection.stop();
  });
});

describe('rows', () => {
  it('have null where a field was left out', () => {
    const row = completeRow('run', { id: 'a', name: 'x' } as RunRow);
    expect(row.queue_position).toBeNull();
    expect(row.reason).toBeNull();
    expect(completeRow('run', { queue_position: 0 } as RunRow).queue_position).toBe(0);
  });
});
