// Logs made up by offset: any part of any size without keeping it.

const encoder = new TextEncoder();
const BLOCK_LINES = 2048;
const WIDTH = { time: 12, step: 9, num: 6 };

function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const ESC = '\x1b';
const green = (s) => `${ESC}[32m${s}${ESC}[0m`;
const yellow = (s) => `${ESC}[33m${s}${ESC}[0m`;
const dim = (s) => `${ESC}[2m${s}${ESC}[0m`;
const cyan = (s) => `${ESC}[36m${s}${ESC}[0m`;

// A line of a template: T time, S step, L loss-like number. Each has a fixed width.
function template(n, next) {
  const r = next();
  if (n % 256 === 255) return `${dim('{T}')} ${green('checkpoint')} step {S} written to /ckpt/step-{S} in 4.2s`;
  if (n % 97 === 96) return `${dim('{T}')} ${cyan('eval')}  step {S} accuracy {L} perplexity {L} over 2048 samples`;
  if (r < 0.012) return `${dim('{T}')} ${yellow('WARN')}  gradient norm {L} above 1.0, clipped`;
  if (r < 0.018) return `${dim('{T}')} ${yellow('WARN')}  rank 3 is {L} s behind, waiting at the barrier`;
  if (r < 0.05) return `${dim('{T}')} INFO  data shard ${String(Math.floor(next() * 9000) + 1000)}.tar opened, 12,288 samples`;
  return `${dim('{T}')} INFO  step {S} loss {L} lr 3.0e-04 grad {L} tok/s ${41000 + Math.floor(next() * 3000)}`;
}

const cache = new Map();
function blockTemplates(seed) {
  let block = cache.get(seed);
  if (!block) {
    const next = random(seed * 7919 + 1);
    const lines = Array.from({ length: BLOCK_LINES }, (_, n) => template(n, next));
    const sizes = lines.map((line) => line.replaceAll('{T}', 'x'.repeat(WIDTH.time)).replaceAll('{S}', 'x'.repeat(WIDTH.step)).replaceAll('{L}', 'x'.repeat(WIDTH.num)).length + 1);
    const starts = new Float64Array(BLOCK_LINES + 1);
    for (let i = 0; i < BLOCK_LINES; i++) starts[i + 1] = starts[i] + sizes[i];
    block = { lines, starts, size: starts[BLOCK_LINES] };
    cache.set(seed, block);
    if (cache.size > 200) cache.delete(cache.keys().next().value);
  }
  return block;
}

/** A log: fixed head, as many body lines as time went by, fixed tail once it ended. */
export class Log {
  constructor({ seed, startedAt, endedAt, linesPerSecond, head = '', tail = '', fixedLines = null }) {
    Object.assign(this, { seed, startedAt, endedAt, rate: linesPerSecond, fixedLines });
    this.head = encoder.encode(head);
    this.tail = encoder.encode(tail);
    this.block = blockTemplates(seed % 16);
  }

  lines(now) {
    if (this.fixedLines !== null) return this.fixedLines;
    const end = this.endedAt === null ? now : Math.min(this.endedAt, now);
    return Math.max(0, Math.floor(((end - this.startedAt) / 1000) * this.rate));
  }

  #bodyOffset(line) {
    return Math.floor(line / BLOCK_LINES) * this.block.size + this.block.starts[line % BLOCK_LINES];
  }

  size(now) {
    const ended = this.endedAt !== null && now >= this.endedAt;
    return this.head.length + this.#bodyOffset(this.lines(now)) + (ended ? this.tail.length : 0);
  }

  #bodyLine(n) {
    const at = new Date(this.startedAt + (n / this.rate) * 1000);
    const time = at.toISOString().slice(11, 23);
    const step = String(n + 1).padStart(WIDTH.step);
    let k = 0;
    return this.block.lines[n % BLOCK_LINES]
      .replaceAll('{T}', time)
      .replaceAll('{S}', step)
      .replaceAll('{L}', () => {
        const value = 0.8 + 3.4 * Math.exp(-n / 40_000) + 0.25 * Math.abs(Math.sin(n * 12.9898 + k++ * 78.233));
        return value.toFixed(4).slice(0, WIDTH.num).padStart(WIDTH.num);
      });
  }

  /** Line of the body that holds a byte. */
  lineAt(offset) {
    const body = Math.max(0, offset - this.head.length);
    const block = Math.floor(body / this.block.size);
    const rest = body - block * this.block.size;
    let low = 0;
    let high = BLOCK_LINES - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.block.starts[middle] <= rest) low = middle;
      else high = middle - 1;
    }
    return block * BLOCK_LINES + low;
  }

  offsetOfLine(n) {
    return this.head.length + this.#bodyOffset(n);
  }

  timeAt(offset, now) {
    if (offset < this.head.length) return this.startedAt;
    return Math.min(this.startedAt + (this.lineAt(offset) / this.rate) * 1000, this.endedAt ?? now);
  }

  read(offset, limit, now) {
    const size = this.size(now);
    const end = Math.min(size, offset + limit);
    if (offset >= end) return Buffer.alloc(0);
    const parts = [];
    if (offset < this.head.length) parts.push(Buffer.from(this.head.subarray(offset, Math.min(end, this.head.length))));
    const bodyEnd = this.head.length + this.#bodyOffset(this.lines(now));
    const from = Math.max(offset, this.head.length);
    const to = Math.min(end, bodyEnd);
    if (from < to) {
      const first = this.lineAt(from);
      const last = this.lineAt(to - 1);
      const lines = [];
      for (let n = first; n <= last; n++) lines.push(this.#bodyLine(n), '\n');
      const bytes = Buffer.from(lines.join(''));
      const skip = from - this.offsetOfLine(first);
      parts.push(bytes.subarray(skip, skip + (to - from)));
    }
    if (end > bodyEnd) {
      const at = Math.max(0, offset - bodyEnd);
      parts.push(Buffer.from(this.tail.subarray(at, at + (end - Math.max(offset, bodyEnd)))));
    }
    return Buffer.concat(parts);
  }
}
