/** A time scale that folds long stretches: between any two boundaries the room grows with a power below one. */

export interface Scale {
  /** Place of a time, 0 to 1. */
  at(ms: number): number;
  from: number;
  to: number;
}

export function linearScale(from: number, to: number): Scale {
  const length = Math.max(1, to - from);
  return { from, to, at: (ms) => Math.min(1, Math.max(0, (ms - from) / length)) };
}

export function foldedScale(boundaries: number[], power = 0.35): Scale {
  const points = [...new Set(boundaries)].sort((a, b) => a - b);
  const from = points[0] ?? 0;
  const to = points.at(-1) ?? from + 1;
  if (points.length < 3) return linearScale(from, to);
  const starts: number[] = [0];
  for (let i = 1; i < points.length; i++) {
    const gap = (points[i] as number) - (points[i - 1] as number);
    starts.push((starts[i - 1] as number) + Math.max(gap, 1) ** power);
  }
  const total = starts.at(-1) as number;
  return {
    from,
    to,
    at(ms) {
      if (ms <= from) return 0;
      if (ms >= to) return 1;
      let low = 0;
      let high = points.length - 1;
      while (low < high - 1) {
        const middle = (low + high) >> 1;
        if ((points[middle] as number) <= ms) low = middle;
        else high = middle;
      }
      const share = (ms - (points[low] as number)) / ((points[high] as number) - (points[low] as number) || 1);
      return ((starts[low] as number) + share * ((starts[high] as number) - (starts[low] as number))) / total;
    },
  };
}
