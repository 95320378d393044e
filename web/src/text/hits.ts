/** Hits of a search as ranges of characters. */

export interface Hit {
  /** Offset of its first byte in the log. */
  offset: number;
  /** Its bytes. */
  length: number;
}

export interface HitLine {
  offset: number;
  length: number;
  text: string;
  /** Its bytes, where they are not its characters one by one. */
  bytes: Uint8Array | null;
}

export interface HitRange {
  from: number;
  to: number;
  /** Whether it is the one that was gone to. */
  current: boolean;
}

const decoder = new TextDecoder('utf-8', { ignoreBOM: true });

/** Index of the first hit at an offset or after it; their number if there is none. Hits are in the order of the log. */
export function firstFrom(hits: readonly Hit[], offset: number): number {
  let low = 0;
  let high = hits.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((hits[middle]?.offset ?? 0) < offset) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Parts of a line that belong to hits. A hit can begin in the line before, of which this one is the rest. */
export function hitRanges(line: HitLine, hits: readonly Hit[], current: number): HitRange[] {
  let at = firstFrom(hits, line.offset);
  const before = hits[at - 1];
  if (before && before.offset + before.length > line.offset) at--;
  const end = line.offset + line.length;
  const place = (bytes: number) => (line.bytes ? decoder.decode(line.bytes.subarray(0, bytes)).length : bytes);
  const ranges: HitRange[] = [];
  for (let hit = hits[at]; hit && hit.offset < end; hit = hits[++at]) {
    const from = Math.max(hit.offset, line.offset) - line.offset;
    const to = Math.min(hit.offset + hit.length, end) - line.offset;
    if (to > from) ranges.push({ from: place(from), to: place(to), current: at === current });
  }
  return ranges;
}
