import { describe, expect, it } from 'vitest';
import { LINE_MAX, LineIndex } from '../../src/log/index';
import { random } from './random';

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** What the index has to say, found the slow way. */
function naive(bytes: Uint8Array, start: number): { offset: number; text: string }[] {
  const lines: { offset: number; text: string }[] = [];
  let from = 0;
  while (from < bytes.length) {
    const newline = bytes.indexOf(10, from);
    const stop = newline < 0 ? bytes.length : newline;
    let at = from;
    while (stop - at > LINE_MAX) {
      lines.push({ offset: start + at, text: decoder.decode(bytes.subarray(at, at + LINE_MAX)) });
      at += LINE_MAX;
    }
    lines.push({ offset: start + at, text: decoder.decode(bytes.subarray(at, stop)) });
    from = newline < 0 ? bytes.length : newline + 1;
  }
  return lines;
}

function all(index: LineIndex): { offset: number; text: string }[] {
  return Array.from({ length: index.lines }, (_, i) => {
    const line = index.line(i);
    return { offset: line.offset, text: decoder.decode(index.bytes(line)) };
  });
}

function text(next: () => number, size: number): Uint8Array {
  let made = '';
  while (made.length < size) {
    const kind = next();
    if (kind < 0.15) made += '\n';
    else if (kind < 0.17) made += 'x'.repeat(Math.floor(next() * 3 * LINE_MAX));
    else made += `${'word '.repeat(Math.floor(next() * 20))}\n`;
  }
  return encoder.encode(made);
}

describe('index of lines', () => {
  it('agrees with a naive one for any pieces', () => {
    for (let seed = 1; seed <= 60; seed++) {
      const next = random(seed);
      const bytes = text(next, 40_000);
      const start = Math.floor(next() * 1000);
      const index = new LineIndex(start);
      let at = 0;
      while (at < bytes.length) {
        const size = Math.max(1, Math.floor(next() ** 3 * 9000));
        index.append(bytes.subarray(at, at + size));
        at += size;
      }
      expect(all(index)).toEqual(naive(bytes, start));
    }
  });

  it('agrees after it grew at the front', () => {
    for (let seed = 1; seed <= 20; seed++) {
      const next = random(seed);
      const bytes = text(next, 30_000);
      const middle = bytes.indexOf(10, Math.floor(bytes.length / 2)) + 1;
      const index = new LineIndex(middle);
      index.append(bytes.subarray(middle));
      const before = index.lines;
      const added = index.prepend(bytes.subarray(0, middle));
      expect(added).toBe(index.lines - before);
      expect(all(index)).toEqual(naive(bytes, 0));
    }
  });

  it('keeps whole lines when it is cut', () => {
    const next = random(7);
    const bytes = text(next, 60_000);
    const index = new LineIndex(0);
    index.append(bytes);
    const whole = all(index);
    const gone = index.trimStart(20_000);
    expect(index.size).toBeLessThanOrEqual(20_000);
    expect(all(index)).toEqual(whole.slice(gone));
    index.append(encoder.encode('more\nand more'));
    expect(all(index).at(-1)?.text).toBe('and more');
    const left = all(index);
    index.trimEnd(12_000);
    expect(index.size).toBeLessThanOrEqual(12_000);
    expect(all(index)).toEqual(left.slice(0, index.lines));
  });

  it('finds the line of a byte', () => {
    const index = new LineIndex(100);
    index.append(encoder.encode('one\ntwo\nthree'));
    expect(index.find(100)).toBe(0);
    expect(index.find(103)).toBe(0);
    expect(index.find(104)).toBe(1);
    expect(index.find(110)).toBe(2);
    expect(index.find(99_999)).toBe(2);
    expect(index.find(0)).toBe(0);
  });
});
