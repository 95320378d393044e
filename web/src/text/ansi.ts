/**
 * Terminal text to segments with class names.
 *
 * Colours (16 and 256), bold, dim, italic, underline and inverse become classes of a fixed table. Every other control
 * sequence is left out of the text when it only moves a cursor or sets a title, and shown as a symbol when it is a lone
 * control character. Direction marks are shown. Nothing here makes HTML.
 */

export interface Segment {
  text: string;
  /** Class names from the fixed table, separated by spaces; empty for plain text. */
  classes: string;
  /** Index of the first character in the line that was parsed. */
  at: number;
  /** Whether the text stands for characters that are not shown as they are. */
  shown?: true;
}

export interface ParsedLine {
  segments: Segment[];
  /** How often the line was overwritten by a carriage return. */
  overwritten: number;
}

interface Style {
  fg: number | null;
  bg: number | null;
  bold: boolean;
  dim: boolean;
  italic: boolean;
  underline: boolean;
  inverse: boolean;
}

const plain = (): Style => ({ fg: null, bg: null, bold: false, dim: false, italic: false, underline: false, inverse: false });

/** The 256 colours have 16 classes of their own; the rest goes to the nearest of these. */
const NEAREST: number[] = nearestTable();

// eslint-disable-next-line no-control-regex
const SPECIAL = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;

export function parseLine(line: string): ParsedLine {
  let text = line;
  let overwritten = 0;
  let base = 0;
  if (text.endsWith('\n')) text = text.slice(0, -1);
  while (text.endsWith('\r')) text = text.slice(0, -1);
  const last = text.lastIndexOf('\r');
  if (last >= 0) {
    for (let i = text.indexOf('\r'); i >= 0; i = text.indexOf('\r', i + 1)) overwritten++;
    base = last + 1;
    text = text.slice(base);
  }
  if (!SPECIAL.test(text)) {
    return { segments: text ? [{ text, classes: '', at: base }] : [], overwritten };
  }
  return { segments: parseSpecial(text, base), overwritten };
}

function parseSpecial(text: string, base: number): Segment[] {
  const segments: Segment[] = [];
  let style = plain();
  let classes = '';
  let from = 0;
  const flush = (to: number) => {
    if (to > from) segments.push({ text: text.slice(from, to), classes, at: base + from });
  };
  const ends = new StringEnds(text);
  let i = 0;
  while (i < text.length) {
    const code = text.charCodeAt(i);
    if (code >= 0x20 && code < 0x7f) {
      i++;
      continue;
    }
    if (code === 0x09 || (code >= 0xa0 && !isMark(code))) {
      i++;
      continue;
    }
    if (code === 0x1b || code === 0x9b) {
      const sequence = readSequence(text, i, ends);
      if (sequence) {
        flush(i);
        if (sequence.final === 'm') {
          style = select(style, sequence.parameters);
          classes = classNames(style);
        }
        i = sequence.end;
        from = i;
        continue;
      }
    }
    flush(i);
    segments.push({ text: symbol(code), classes: 'a-ctl', at: base + i, shown: true });
    i++;
    from = i;
  }
  flush(text.length);
  return segments;
}

function isMark(code: number): boolean {
  return (
    code === 0x061c || (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
    (code >= 0x2060 && code <= 0x2069) || code === 0xfeff
  );
}

/** How a character that must not act is shown. */
export function symbol(code: number): string {
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return '\u2421';
  return `<U+${code.toString(16).toUpperCase().padStart(4, '0')}>`;
}

interface Sequence {
  end: number;
  /** Final character of a control sequence; empty for strings such as titles. */
  final: string;
  parameters: string;
}

const SEQUENCE_MAX = 256;
const STRING_MAX = 4096;

/** Where control strings (titles, links) end; each place of the line is looked at once, whatever is asked. */
class StringEnds {
  #bell = -1;
  #terminator = -1;

  constructor(readonly text: string) {}

  /** Offset after the end of a string that begins at `from`; infinite when it has none. */
  after(from: number): number {
    if (this.#bell < from) this.#bell = this.#find('\x07', from);
    if (this.#terminator < from) this.#terminator = this.#find('\x1b\\', from);
    return Math.min(this.#bell + 1, this.#terminator + 2);
  }

  #find(what: string, from: number): number {
    const at = this.text.indexOf(what, from);
    return at < 0 ? Infinity : at;
  }
}

/** The escape sequence at `start`; null when it is cut off or none. */
function readSequence(text: string, start: number, ends: StringEnds): Sequence | null {
  let i = start + 1;
  let kind = '[';
  if (text.charCodeAt(start) === 0x1b) {
    kind = text[i] ?? '';
    i++;
  }
  if (kind === '[') {
    const first = i;
    const limit = Math.min(text.length, first + SEQUENCE_MAX);
    while (i < limit) {
      const code = text.charCodeAt(i);
      if (code >= 0x40 && code <= 0x7e) return { end: i + 1, final: text[i] ?? '', parameters: text.slice(first, i) };
      if (code < 0x20 || code > 0x3f) return null;
      i++;
    }
    return null;
  }
  if (kind === ']' || kind === 'P' || kind === '_' || kind === '^') {
    const end = ends.after(i);
    return end - i <= STRING_MAX ? { end, final: '', parameters: '' } : null;
  }
  if (kind >= '(' && kind <= '/') return { end: Math.min(i + 1, text.length), final: '', parameters: '' };
  if (kind >= '0' && kind <= '~') return { end: i, final: '', parameters: '' };
  return null;
}

function select(before: Style, parameters: string): Style {
  const style = { ...before };
  const numbers = parameters === '' ? [0] : parameters.split(/[;:]/).map((part) => (part === '' ? 0 : Number(part)));
  for (let i = 0; i < numbers.length; i++) {
    const n = numbers[i] ?? 0;
    if (n === 0) Object.assign(style, plain());
    else if (n === 1) style.bold = true;
    else if (n === 2) style.dim = true;
    else if (n === 3) style.italic = true;
    else if (n === 4) style.underline = true;
    else if (n === 7) style.inverse = true;
    else if (n === 22) style.bold = style.dim = false;
    else if (n === 23) style.italic = false;
    else if (n === 24) style.underline = false;
    else if (n === 27) style.inverse = false;
    else if (n >= 30 && n <= 37) style.fg = n - 30;
    else if (n === 39) style.fg = null;
    else if (n >= 40 && n <= 47) style.bg = n - 40;
    else if (n === 49) style.bg = null;
    else if (n >= 90 && n <= 97) style.fg = n - 82;
    else if (n >= 100 && n <= 107) style.bg = n - 92;
    else if (n === 38 || n === 48) {
      let colour: number | null = null;
      if (numbers[i + 1] === 5) {
        const index = numbers[i + 2] ?? 0;
        colour = index >= 0 && index <= 255 ? (NEAREST[index] ?? null) : null;
        i += 2;
      } else if (numbers[i + 1] === 2) {
        colour = nearest(numbers[i + 2] ?? 0, numbers[i + 3] ?? 0, numbers[i + 4] ?? 0);
        i += 4;
      }
      if (n === 38) style.fg = colour;
      else style.bg = colour;
    }
  }
  return style;
}

function classNames(style: Style): string {
  const names: string[] = [];
  if (style.inverse) names.push('a-inv');
  if (style.fg !== null) names.push(`a-f${style.fg}`);
  if (style.bg !== null) names.push(`a-b${style.bg}`);
  if (style.bold) names.push('a-bold');
  if (style.dim) names.push('a-dim');
  if (style.italic) names.push('a-it');
  if (style.underline) names.push('a-ul');
  return names.join(' ');
}

function nearestTable(): number[] {
  const table: number[] = [];
  for (let i = 0; i < 16; i++) table.push(i);
  const levels = [0, 95, 135, 175, 215, 255];
  for (let i = 16; i < 232; i++) {
    const n = i - 16;
    table.push(nearest(levels[Math.floor(n / 36)] ?? 0, levels[Math.floor(n / 6) % 6] ?? 0, levels[n % 6] ?? 0));
  }
  for (let i = 232; i < 256; i++) {
    const grey = 8 + (i - 232) * 10;
    table.push(nearest(grey, grey, grey));
  }
  return table;
}

function nearest(r: number, g: number, b: number): number {
  const palette: [number, number, number][] = [
    [0, 0, 0], [205, 0, 0], [0, 205, 0], [205, 205, 0], [0, 0, 238], [205, 0, 205], [0, 205, 205], [229, 229, 229],
    [127, 127, 127], [255, 0, 0], [0, 255, 0], [255, 255, 0], [92, 92, 255], [255, 0, 255], [0, 255, 255], [255, 255, 255],
  ];
  let best = 0;
  let distance = Infinity;
  palette.forEach(([pr, pg, pb], index) => {
    const d = (pr - r) ** 2 + (pg - g) ** 2 + (pb - b) ** 2;
    if (d < distance) {
      distance = d;
      best = index;
    }
  });
  return best;
}

/** The text without control sequences, for copying. */
export function plainText(line: string): string {
  return parseLine(line).segments.map((segment) => segment.text).join('');
}

/** Cuts segments at the ranges of hits; characters of a hit get the class `a-hit`. Ranges are of the parsed line. */
export function highlight(segments: Segment[], hits: { from: number; to: number; current: boolean }[]): Segment[] {
  if (hits.length === 0) return segments;
  const cut: Segment[] = [];
  for (const segment of segments) {
    if (segment.shown) {
      cut.push(segment);
      continue;
    }
    const end = segment.at + segment.text.length;
    let from = segment.at;
    for (const hit of hits) {
      const start = Math.max(from, hit.from);
      const stop = Math.min(end, hit.to);
      if (start >= stop) continue;
      if (start > from) cut.push({ text: segment.text.slice(from - segment.at, start - segment.at), classes: segment.classes, at: from });
      const mark = hit.current ? 'a-hit a-hit-now' : 'a-hit';
      cut.push({ text: segment.text.slice(start - segment.at, stop - segment.at), classes: `${segment.classes} ${mark}`.trim(), at: start });
      from = stop;
    }
    if (from < end) cut.push({ text: segment.text.slice(from - segment.at), classes: segment.classes, at: from });
  }
  return cut;
}
