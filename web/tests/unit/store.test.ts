import { describe, expect, it } from 'vitest';
import { Table } from '../../src/store/table';
import { random, shuffle } from './random';

interface Row {
  status: string;
}
type Step = { id: string; asOf: number; row: Row | null };

function play(steps: Step[]): [string, Row][] {
  const table = new Table<Row>();
  for (const step of steps) {
    if (step.row) table.put(step.id, step.row, step.asOf);
    else table.remove(step.id, step.asOf);
  }
  return [...table.rows].sort(([a], [b]) => a.localeCompare(b));
}

describe('rows of a kind', () => {
  it('are the same for any order and any repeats', () => {
    for (let seed = 1; seed <= 100; seed++) {
      const next = random(seed);
      const steps: Step[] = Array.from({ length: 60 }, (_, n) => ({
        id: `r${Math.floor(next() * 8)}`,
        asOf: n + 1,
        row: next() < 0.2 ? null : { status: `s${n}` },
      }));
      const expected = play(steps);
      const twice = [...steps, ...steps.filter(() => next() < 0.5)];
      expect(play(shuffle(twice, next))).toEqual(expected);
    }
  });

  it('tell whether something changed', () => {
    const table = new Table<Row>();
    expect(table.put('a', { status: 'new' }, 5)).toBe(true);
    expect(table.put('a', { status: 'old' }, 4)).toBe(false);
    expect(table.put('a', { status: 'same' }, 5)).toBe(false);
    expect(table.remove('a', 4)).toBe(false);
    expect(table.remove('a', 6)).toBe(true);
    expect(table.put('a', { status: 'late' }, 6)).toBe(false);
    expect(table.put('a', { status: 'again' }, 7)).toBe(true);
  });

  it('let go of what nothing shows', () => {
    const table = new Table<Row>();
    table.put('a', { status: 'x' }, 1);
    table.put('b', { status: 'x' }, 1);
    table.keepOnly(new Set(['b']));
    expect([...table.rows.keys()]).toEqual(['b']);
  });
});
