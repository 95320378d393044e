import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { highlight, parseLine, plainText } from '../../src/text/ansi';

const ESC = '\x1b';
const shape = (line: string) => parseLine(line).segments.map((s) => [s.text, s.classes]);

describe('terminal text', () => {
  it('leaves plain text as one segment', () => {
    expect(shape('hello, wörld')).toEqual([['hello, wörld', '']]);
    expect(shape('')).toEqual([]);
    expect(shape('line\n')).toEqual([['line', '']]);
  });

  it('turns colours into classes of the fixed table', () => {
    expect(shape(`${ESC}[31mred${ESC}[0m plain`)).toEqual([['red', 'a-f1'], [' plain', '']]);
    expect(shape(`${ESC}[1;92;44mx`)).toEqual([['x', 'a-f10 a-b4 a-bold']]);
    expect(shape(`${ESC}[38;5;196mx`)).toEqual([['x', 'a-f9']]);
    expect(shape(`${ESC}[38;2;250;10;10mx`)).toEqual([['x', 'a-f9']]);
    expect(shape(`${ESC}[7mx${ESC}[27my`)).toEqual([['x', 'a-inv'], ['y', '']]);
  });

  it('only ever uses classes of the table', () => {
    for (let n = 0; n < 256; n++) {
      for (const [, classes] of shape(`${ESC}[38;5;${n}m${ESC}[48;5;${n}mx`)) {
        for (const name of (classes as string).split(' ')) expect(name).toMatch(/^a-[fb](1[0-5]|\d)$/);
      }
    }
    expect(shape(`${ESC}[38;5;999mx`)).toEqual([['x', '']]);
  });

  it('does not obey cursor moves, titles or links', () => {
    expect(plainText(`a${ESC}[2Jb${ESC}[10;10Hc${ESC}]0;title\x07d${ESC}]8;;http://evil\x1b\\link${ESC}]8;;\x1b\\`)).toBe('abcdlink');
    expect(plainText(`a${ESC}(Bb`)).toBe('ab');
  });

  it('shows control characters and direction marks', () => {
    expect(plainText('a\x00b\x07c')).toBe('a\u2400b\u2407c');
    expect(plainText('abc\u202edef')).toBe('abc<U+202E>def');
    expect(plainText('zero\u200bwidth')).toBe('zero<U+200B>width');
    expect(plainText(`cut ${ESC}[`)).toBe('cut \u241b[');
  });

  it('shows what a carriage return left', () => {
    const parsed = parseLine(' 1%\r 2%\r 3%');
    expect(parsed.overwritten).toBe(2);
    expect(parsed.segments.map((s) => s.text).join('')).toBe(' 3%');
    expect(plainText('windows\r\n')).toBe('windows');
  });

  it('shows the corpus that is shared with the command line as it says', () => {
    const corpus = JSON.parse(readFileSync(new URL('../../../crates/cli/src/output/terminal_corpus.json', import.meta.url), 'utf8')) as { what: string; input: string; page: string }[];
    expect(corpus.length).toBeGreaterThan(10);
    for (const { what, input, page } of corpus) expect(plainText(input), what).toBe(page);
  });

  it('never grows without bound on hostile input', () => {
    const before = Date.now();
    for (let n = 0; n < 10; n++) {
      parseLine(`${ESC}[`.repeat(4_000));
      parseLine(`${ESC}]`.repeat(4_000));
    }
    expect(Date.now() - before).toBeLessThan(1000);
  });

  it('cuts segments at hits', () => {
    const { segments } = parseLine(`ab${ESC}[31mcdef`);
    const at = segments[1]?.at ?? 0;
    const cut = highlight(segments, [{ from: at + 1, to: at + 3, current: false }]);
    expect(cut.map((s) => [s.text, s.classes])).toEqual([['ab', ''], ['c', 'a-f1'], ['de', 'a-f1 a-hit'], ['f', 'a-f1']]);
  });
});
