/** Cells of tables that several pages have. */
import type { Cell } from '../components/DataTable.svelte';
import { between, duration, moment, shortDuration } from '../text/time';
import { prefs } from './prefs.svelte';
import { SHAPES, tone, word } from './status';

/** A state with its shape; a link to the explanation where there is one. */
export function stateCell(status: string, label: string | null | undefined, href?: string): Cell {
  const kind = tone(status);
  return { text: label ?? word(status), tone: `t-${kind}`, shape: SHAPES[kind], ...(href === undefined ? {} : { href }) };
}

/** Time since a moment, which is shown when asked. */
export function ageCell(at: string, now: number): Cell {
  return { text: shortDuration(Math.max(0, between(at, now))), tone: 'muted', title: () => moment(at, prefs.zone) };
}

/** Time from a moment to another, or to now. */
export function durationCell(at: string, to: string | null, now: number): Cell {
  return { text: duration(Math.max(0, between(at, to ?? now))), title: () => moment(at, prefs.zone) };
}
