/** Applies the patch of a cure to the text of a configuration, line by line, so that comments and order stay. */
import type { Patch } from '../api/api';

const INDENT = 2;

export function applyPatch(text: string, patch: Patch): string {
  let lines = text.replace(/\n$/, '').split('\n');
  for (const [path, value] of Object.entries(patch)) lines = setPath(lines, path.split('.'), value);
  return `${lines.join('\n')}\n`;
}

function setPath(lines: string[], path: string[], value: string | number | boolean | null): string[] {
  const next = [...lines];
  let from = 0;
  let to = next.length;
  for (let depth = 0; depth < path.length; depth++) {
    const name = path[depth] ?? '';
    const indent = ' '.repeat(depth * INDENT);
    const last = depth === path.length - 1;
    const at = next.findIndex((line, i) => i >= from && i < to && line.startsWith(`${indent}${name}:`));
    if (at < 0) {
      if (value === null) return next;
      const added = path.slice(depth).map((part, i, rest) => `${' '.repeat((depth + i) * INDENT)}${part}:${i === rest.length - 1 ? ` ${write(value)}` : ''}`);
      while (to > from && (next[to - 1] ?? '').trim() === '') to--;
      next.splice(to, 0, ...added);
      return next;
    }
    let end = at + 1;
    while (end < to && ((next[end] ?? '').trim() === '' || (next[end] ?? '').startsWith(`${indent} `))) end++;
    while (end > at + 1 && (next[end - 1] ?? '').trim() === '') end--;
    if (last) {
      if (value === null) next.splice(at, end - at);
      else next.splice(at, end - at, `${indent}${name}: ${write(value)}`);
      return next;
    }
    // A value on the same line gives way to a map.
    if (!/:\s*(#.*)?$/.test(next[at] ?? '')) next[at] = `${indent}${name}:`;
    from = at + 1;
    to = end;
  }
  return next;
}

function write(value: string | number | boolean): string {
  if (typeof value !== 'string') return String(value);
  return /^[\w.-]+$/.test(value) ? value : JSON.stringify(value);
}
