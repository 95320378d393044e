/**
 * Bytes of a part of a log, and where its lines begin.
 *
 * The part is contiguous: `[start, end)` of the log. It grows at both ends and is cut at either. A line longer than
 * `LINE_MAX` is shown as several, so that no line is ever too long to draw.
 */

export const LINE_MAX = 8 * 1024;
const CHUNK = 256 * 1024;

export interface Line {
  /** Offset of its first byte in the log. */
  offset: number;
  /** Bytes without the line end. */
  length: number;
  /** Whether it goes on in the next one. */
  cut: boolean;
}

export class LineIndex {
  /** Offset in the log of the first byte that is kept. */
  start = 0;
  #bytes: Uint8Array;
  /** First byte that is used in `#bytes`. */
  #head = 0;
  #size = 0;
  /** Offsets in the log at which lines begin; the last line may be incomplete. */
  #starts: Float64Array;
  #startsHead = 0;
  #count = 0;

  constructor(start = 0) {
    this.start = start;
    this.#bytes = new Uint8Array(CHUNK);
    this.#starts = new Float64Array(4096);
  }

  /** Offset after the last byte that is kept. */
  get end(): number {
    return this.start + this.#size;
  }

  get size(): number {
    return this.#size;
  }

  /** Lines, the incomplete last one included. */
  get lines(): number {
    return this.#count;
  }

  append(bytes: Uint8Array): void {
    if (bytes.length === 0) return;
    this.#room(bytes.length);
    const from = this.#head + this.#size;
    this.#bytes.set(bytes, from);
    if (this.#count === 0) this.#push(this.start);
    let lineStart = this.#starts[this.#startsHead + this.#count - 1] as number;
    const base = this.end;
    // The last line was complete when its last byte is a line end: the next byte begins a new one.
    if (this.#size > 0 && this.#bytes[from - 1] === 10 && lineStart < base) {
      this.#push(base);
      lineStart = base;
    }
    let at = 0;
    while (at < bytes.length) {
      const newline = bytes.indexOf(10, at);
      const stop = newline < 0 ? bytes.length : newline;
      while (base + stop - lineStart > LINE_MAX) {
        lineStart += LINE_MAX;
        this.#push(lineStart);
      }
      if (newline < 0) break;
      at = newline + 1;
      if (at < bytes.length) {
        lineStart = base + at;
        this.#push(lineStart);
      }
    }
    this.#size += bytes.length;
  }

  /** Puts bytes before the first one; `start` moves back. Answers the number of lines that were added. */
  prepend(bytes: Uint8Array): number {
    if (bytes.length === 0) return 0;
    const rest = this.#bytes.slice(this.#head, this.#head + this.#size);
    const before = this.#count;
    this.start -= bytes.length;
    this.#bytes = new Uint8Array(Math.max(CHUNK, (bytes.length + rest.length) * 1.25));
    this.#head = 0;
    this.#size = 0;
    this.#count = 0;
    this.#startsHead = 0;
    this.append(bytes);
    this.append(rest);
    return this.#count - before;
  }

  /** Drops whole lines from the beginning until at most `max` bytes are kept. Answers the lines that went. */
  trimStart(max: number): number {
    if (this.#size <= max) return 0;
    const wanted = this.end - max;
    const lines = Math.min(this.find(wanted) + 1, this.#count - 1);
    if (lines <= 0) return 0;
    const newStart = this.#starts[this.#startsHead + lines] as number;
    this.#head += newStart - this.start;
    this.#size -= newStart - this.start;
    this.start = newStart;
    this.#startsHead += lines;
    this.#count -= lines;
    return lines;
  }

  /** Drops whole lines from the end until at most `max` bytes are kept. */
  trimEnd(max: number): void {
    if (this.#size <= max) return;
    const first = this.find(this.start + max);
    if (first <= 0) return;
    const newEnd = this.#starts[this.#startsHead + first] as number;
    this.#size = newEnd - this.start;
    this.#count = first;
  }

  /** The line that holds the byte at `offset`, or the nearest. */
  find(offset: number): number {
    let low = 0;
    let high = this.#count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if ((this.#starts[this.#startsHead + middle] as number) <= offset) low = middle;
      else high = middle - 1;
    }
    return Math.max(low, 0);
  }

  line(index: number): Line {
    const offset = this.#starts[this.#startsHead + index] as number;
    const next = index + 1 < this.#count ? (this.#starts[this.#startsHead + index + 1] as number) : this.end;
    const last = this.#bytes[this.#head + next - 1 - this.start];
    const ended = next > offset && last === 10;
    return { offset, length: next - offset - (ended ? 1 : 0), cut: !ended && index + 1 < this.#count };
  }

  bytes(line: Line): Uint8Array {
    const from = this.#head + line.offset - this.start;
    return this.#bytes.subarray(from, from + line.length);
  }

  #push(offset: number): void {
    if (this.#startsHead + this.#count === this.#starts.length) {
      const grown = new Float64Array(Math.max(4096, this.#count * 2));
      grown.set(this.#starts.subarray(this.#startsHead, this.#startsHead + this.#count));
      this.#starts = grown;
      this.#startsHead = 0;
    }
    this.#starts[this.#startsHead + this.#count] = offset;
    this.#count++;
  }

  #room(more: number): void {
    const needed = this.#head + this.#size + more;
    if (needed <= this.#bytes.length) return;
    const used = this.#bytes.subarray(this.#head, this.#head + this.#size);
    if (this.#head > this.#bytes.length / 2 && this.#size + more <= this.#bytes.length) {
      this.#bytes.copyWithin(0, this.#head, this.#head + this.#size);
    } else {
      const grown = new Uint8Array(Math.max(CHUNK, (this.#size + more) * 2));
      grown.set(used);
      this.#bytes = grown;
    }
    this.#head = 0;
  }
}
