import { describe, expect, it } from 'vitest';
import { amount } from '../../src/text/format';
import { usageSeries } from '../../src/text/usage';

const row = (from: string, user: string, gpu_hours: number) => ({ from, user, jobs: 1, gpu_hours, cpu_hours: 2 * gpu_hours, cost: 0 });

describe('usage as lines', () => {
  it('has a value for each time, the largest group first', () => {
    expect(usageSeries([row('2026-11-02', 'ada', 1), row('2026-11-01', 'bob', 5), row('2026-11-01', 'ada', 2)], 'gpu_hours', 7)).toEqual({
      times: ['2026-11-01', '2026-11-02'],
      lines: [{ label: 'bob', values: [5, 0] }, { label: 'ada', values: [2, 1] }],
    });
  });

  it('adds up what does not fit, and loses nothing', () => {
    const { lines } = usageSeries(['a', 'b', 'c', 'd'].map((user, n) => row('2026-11-01', user, n + 1)), 'cpu_hours', 3);
    expect(lines).toEqual([{ label: 'd', values: [8] }, { label: 'c', values: [6] }, { label: '2 others', values: [6] }]);
  });
});

it('amounts have one digit at most', () => {
  expect([0, 8, 0.5, 2912.46, 41.04, 1234567].map(amount)).toEqual(['0', '8', '0.5', '2,912.5', '41', '1,234,567']);
});
