import { describe, expect, it } from 'vitest';
import { highlight, parseLine } from '../../src/text/ansi';
import { firstFrom, hitRanges } from '../../src/text/hits';

const encoder = new TextEncoder();
const line = (text: string, offset = 0) => {
  const bytes = encoder.encode(text);
  return { offset, length: bytes.length, text, bytes: bytes.length === text.length ? null : bytes };
};
const marked = (shown: ReturnType<typeof line>, hits: { offset: number; length: number }[], current = -1) =>
  hitRanges(shown, hits, current).map(({ from, to, current: is }) => `${shown.text.slice(from, to)}${is ? '*' : ''}`);

describe('hits of a search', () => {
  it('are found by their offsets', () => {
    const hits = [{ offset: 3, length: 1 }, { offset: 9, length: 2 }];
    expect([0, 3, 4, 9, 10].map((offset) => firstFrom(hits, offset))).toEqual([0, 0, 1, 1, 2]);
    expect(firstFrom([], 5)).toBe(0);
  });

  it('are marked in their line only', () => {
    const hits = [{ offset: 2, length: 4 }, { offset: 104, length: 4 }, { offset: 110, length: 4 }, { offset: 205, length: 4 }];
    expect(marked(line('one step two step', 100), hits, 2)).toEqual(['step', 'wo s*']);
  });

  it('count bytes and not characters', () => {
    expect(marked(line('größer → 12', 50), [{ offset: 50 + encoder.encode('größer → ').length, length: 2 }])).toEqual(['12']);
    expect(marked(line('größer', 0), [{ offset: 0, length: encoder.encode('größ').length }])).toEqual(['größ']);
    const cat = '🐈 cat';
    expect(marked(line(cat), [{ offset: 5, length: 3 }])).toEqual(['cat']);
  });

  it('are right after bytes that are no text', () => {
    const bytes = Uint8Array.from([0xff, 0xfe, 0x20, 0x61, 0x62]);
    const text = new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes);
    const ranges = hitRanges({ offset: 0, length: 5, text, bytes }, [{ offset: 3, length: 2 }], 0);
    expect(ranges.map(({ from, to }) => text.slice(from, to))).toEqual(['ab']);
  });

  it('go on in the rest of a line that is shown as several', () => {
    const hits = [{ offset: 6, length: 8 }];
    expect(marked(line('0123456789', 0), hits)).toEqual(['6789']);
    expect(marked(line('abcdefghij', 10), hits)).toEqual(['abcd']);
  });

  it('are marked across colours', () => {
    const text = '\x1b[32mcheck\x1b[0mpoint 7';
    const { segments } = parseLine(text);
    const cut = highlight(segments, hitRanges(line(text), [{ offset: 5, length: text.indexOf(' 7') - 5 }], 0));
    expect(cut.map((segment) => [segment.text, segment.classes])).toEqual([['check', 'a-f2 a-hit a-hit-now'], ['point', 'a-hit a-hit-now'], [' 7', '']]);
  });
});
