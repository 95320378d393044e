/** Times and durations in words. */

const UNITS: [number, string][] = [
  [86_400, 'd'],
  [3_600, 'h'],
  [60, 'm'],
  [1, 's'],
];

/** Seconds as the two largest units: `45s`, `3m 20s`, `2h 5m`, `3d 4h`. */
export function duration(seconds: number): string {
  const negative = seconds < 0;
  let rest = Math.floor(Math.abs(seconds));
  const parts: string[] = [];
  for (const [size, unit] of UNITS) {
    const n = Math.floor(rest / size);
    rest -= n * size;
    if (n > 0) parts.push(`${n}${unit}`);
    else if (parts.length === 1) break;
    if (parts.length === 2) break;
  }
  const text = parts.length ? parts.join(' ') : '0s';
  return negative && text !== '0s' ? `−${text}` : text;
}

/** The largest unit alone: `45s`, `3m`, `2h`, `3d`. */
export function shortDuration(seconds: number): string {
  return duration(seconds).split(' ')[0] ?? '0s';
}

/** Seconds below a minute with one digit: for phases, where tenths matter. */
export function fineDuration(seconds: number): string {
  return seconds >= 0 && seconds < 10 ? `${seconds.toFixed(1)}s` : duration(seconds);
}

export function millis(time: string): number {
  return Date.parse(time);
}

/** Seconds between two times. */
export function between(from: string, to: string | number): number {
  return ((typeof to === 'number' ? to : millis(to)) - millis(from)) / 1000;
}

const pad = (n: number, width = 2) => String(n).padStart(width, '0');

export type Zone = 'local' | 'utc';

/** `14:08:52` */
export function clock(ms: number, zone: Zone = 'local'): string {
  const at = new Date(ms);
  return zone === 'utc'
    ? `${pad(at.getUTCHours())}:${pad(at.getUTCMinutes())}:${pad(at.getUTCSeconds())}`
    : `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

/** `2026-11-17` */
export function day(ms: number, zone: Zone = 'local'): string {
  const at = new Date(ms);
  return zone === 'utc'
    ? `${at.getUTCFullYear()}-${pad(at.getUTCMonth() + 1)}-${pad(at.getUTCDate())}`
    : `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

/** `2026-11-17 14:08:52` */
export function moment(time: string | number, zone: Zone = 'local'): string {
  const ms = typeof time === 'number' ? time : millis(time);
  return Number.isNaN(ms) ? '' : `${day(ms, zone)} ${clock(ms, zone)}`;
}

/** Time of today, else with its day: `14:08` or `Nov 12 14:08`. */
export function shortMoment(time: string | number, now: number): string {
  const ms = typeof time === 'number' ? time : millis(time);
  if (Number.isNaN(ms)) return '';
  const text = clock(ms).slice(0, 5);
  if (day(ms) === day(now)) return text;
  const months = ['Jan', 'Feb', 'Mar', 'Apr', 'May', 'Jun', 'Jul', 'Aug', 'Sep', 'Oct', 'Nov', 'Dec'];
  const at = new Date(ms);
  return `${months[at.getMonth()]} ${at.getDate()} ${text}`;
}

/** Reads `45s`, `3m`, `2h`, `7d` and sums of them as seconds; null when it is none. */
export function readDuration(text: string): number | null {
  const match = /^(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?$/.exec(text.trim());
  if (!match || text.trim() === '') return null;
  const [, d, h, m, s] = match;
  return Number(d ?? 0) * 86_400 + Number(h ?? 0) * 3_600 + Number(m ?? 0) * 60 + Number(s ?? 0);
}
