import { describe, expect, it } from 'vitest';
import { fits, widths } from '../../src/text/columns';
import { random } from './random';

describe('widths of columns', () => {
  it('are given, or shares of what is left', () => {
    expect(widths([100, { share: 1 }, { share: 3 }], 520, 10)).toEqual([100, 100, 300]);
  });

  it('give a share its least width, and the others less', () => {
    expect(widths([{ share: 1, least: 150 }, { share: 1 }], 210, 10)).toEqual([150, 50]);
    expect(widths([{ share: 1, least: 150 }, { share: 1 }], 100, 10)).toEqual([150, 0]);
  });

  it('fill the table without exceeding it', () => {
    const next = random(7);
    for (let n = 0; n < 200; n++) {
      const wanted = Array.from({ length: 1 + Math.floor(next() * 8) }, () => (next() < 0.5 ? Math.floor(next() * 90) : { share: 0.5 + next() * 2, least: Math.floor(next() * 60) }));
      const found = widths(wanted, 1200, 12);
      const sum = found.reduce((total, width) => total + width, 12 * (wanted.length - 1));
      expect(sum).toBeLessThanOrEqual(1200);
      if (wanted.some((width) => typeof width !== 'number')) expect(sum).toBeGreaterThan(1200 - wanted.length);
    }
  });
});

describe('a text', () => {
  it('fits if no font makes it wider than its cell', () => {
    expect(fits('', 0)).toBe(true);
    expect(fits('running', 90)).toBe(true);
    expect(fits('mmmmmmm', 90)).toBe(false);
    expect(fits('a reason that is longer than the cell', 200)).toBe(false);
    expect(fits('日本語', 47)).toBe(false);
  });
});
