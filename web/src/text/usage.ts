/** Rows of usage as lines of a plot. */
import type { UsageRow } from '../api/api';

export interface UsageLine {
  label: string;
  values: number[];
}

/** One line for each group of rows, the largest first; those above `limit` are added up as the last one. */
export function usageSeries(rows: UsageRow[], unit: 'gpu_hours' | 'cpu_hours', limit: number): { times: string[]; lines: UsageLine[] } {
  const times = [...new Set(rows.map((row) => row.from ?? ''))].sort();
  const found = new Map<string, number[]>();
  for (const row of rows) {
    const label = [row.project, row.user, row.class].filter((part) => part != null).join(' · ') || 'all';
    const values = found.get(label) ?? times.map(() => 0);
    const at = times.indexOf(row.from ?? '');
    values[at] = (values[at] ?? 0) + row[unit];
    found.set(label, values);
  }
  const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);
  const lines = [...found].map(([label, values]) => ({ label, values })).sort((a, b) => sum(b.values) - sum(a.values));
  if (lines.length <= limit) return { times, lines };
  const rest = lines.slice(limit - 1);
  return { times, lines: [...lines.slice(0, limit - 1), { label: `${rest.length} others`, values: times.map((_, n) => rest.reduce((total, line) => total + (line.values[n] ?? 0), 0)) }] };
}
