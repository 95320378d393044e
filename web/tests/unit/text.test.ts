import { describe, expect, it } from 'vitest';
import { EventParser, query, webAddress, type StreamEvent } from '../../src/lib/call';
import { bytes, count, mainResources, money, shellWord, short } from '../../src/text/format';
import { duration, fineDuration, readDuration, shortDuration } from '../../src/text/time';

describe('durations', () => {
  it('have the two largest units', () => {
    expect([0, 1, 59, 60, 61, 3600, 3660, 3605, 86400, 90061, 864000].map(duration)).toEqual([
      '0s', '1s', '59s', '1m', '1m 1s', '1h', '1h 1m', '1h', '1d', '1d 1h', '10d',
    ]);
    expect(duration(-75)).toBe('−1m 15s');
    expect(shortDuration(7500)).toBe('2h');
    expect(fineDuration(1.25)).toBe('1.3s');
  });

  it('are read', () => {
    expect(readDuration('2h')).toBe(7200);
    expect(readDuration('1d 2h')).toBe(93600);
    expect(readDuration('90s')).toBe(90);
    expect(readDuration('')).toBeNull();
    expect(readDuration('soon')).toBeNull();
  });
});

describe('numbers', () => {
  it('are short', () => {
    expect([0, 0.004, 0.42, 12.4, 1204.4].map(money)).toEqual(['$0', '<$0.01', '$0.42', '$12.40', '$1,204']);
    expect([12, 2048, 1024 ** 3 * 1.5].map(bytes)).toEqual(['12 B', '2.0 KiB', '1.5 GiB']);
    expect([812, 12_400, 187_000, 1_200_000].map(short)).toEqual(['812', '12.4k', '187k', '1.2M']);
    expect([count(1, 'run'), count(3, 'run')]).toEqual(['1 run', '3 runs']);
  });

  it('go into shells and queries', () => {
    expect([mainResources('8 × H100 80 GB, 96 CPU, 512 GB'), mainResources('8 CPU, 16 GB')]).toEqual(['8 × H100 80 GB', '8 CPU, 16 GB']);
    expect(shellWord('train-7')).toBe('train-7');
    expect(shellWord("it's")).toBe(`'it'\\''s'`);
    expect(query('/a', { b: 1, c: null, d: 'x y', f: undefined })).toBe('/a?b=1&d=x+y');
  });
});

describe('event streams', () => {
  it('come in any pieces', () => {
    const wire = ': alive\n\nevent: hello\ndata: {"a":1}\n\nid: 7\r\nevent: change\r\ndata: one\r\ndata: two\r\n\r\n';
    for (let size = 1; size < wire.length; size++) {
      const parser = new EventParser();
      const seen: StreamEvent[] = [];
      for (let at = 0; at < wire.length; at += size) parser.push(wire.slice(at, at + size), (event) => seen.push(event));
      expect(seen).toEqual([
        { event: 'hello', id: '', data: '{"a":1}' },
        { event: 'change', id: '7', data: 'one\ntwo' },
      ]);
    }
  });
});

describe('addresses of services', () => {
  it('are only those of the web', () => {
    (globalThis as { location?: unknown }).location = { href: 'http://localhost/ui/' };
    expect(webAddress('https://a.example/')).toBe('https://a.example/');
    expect(webAddress('/proxy/services/p/r/')).toBe('/proxy/services/p/r/');
    expect(webAddress('javascript:alert(1)')).toBeNull();
    expect(webAddress('data:text/html,x')).toBeNull();
    expect(webAddress(7)).toBeNull();
  });
});
