/** Widths of the columns of a table, and whether a text fits into one. */

/** Pixels, or a share of what is left with a least width. */
export type Width = number | { share: number; least?: number };

/** Widths in whole pixels that fill `total`, with `gap` between them. Shares give up room before anything is wider than the table. */
export function widths(wanted: Width[], total: number, gap: number): number[] {
  const found = wanted.map((width) => (typeof width === 'number' ? width : 0));
  let left = total - gap * Math.max(0, wanted.length - 1) - found.reduce((sum, width) => sum + width, 0);
  // A share below its least width gets that, and the others divide what remains.
  let open = wanted.flatMap((width, n) => (typeof width === 'number' ? [] : [{ n, share: width.share, least: width.least ?? 0 }]));
  for (;;) {
    const shares = open.reduce((sum, one) => sum + one.share, 0);
    const small = open.filter((one) => (Math.max(0, left) * one.share) / shares < one.least);
    if (small.length === 0) {
      for (const one of open) found[one.n] = Math.floor((Math.max(0, left) * one.share) / shares);
      return found;
    }
    for (const one of small) {
      found[one.n] = one.least;
      left -= one.least;
    }
    open = open.filter((one) => !small.includes(one));
  }
}

const NARROW = /[ijlft.,:;'|!()[\] -]/;
const WIDE = /[mwMW@%]/;
/** Upper bounds of the widths of characters at 14 pixels, over the fonts of the page. */
const PIXELS = Array.from({ length: 128 }, (_, code) => {
  const letter = String.fromCharCode(code);
  return NARROW.test(letter) ? 6.5 : WIDE.test(letter) ? 14.5 : /[A-Z]/.test(letter) ? 11 : 9.6;
});

/** Whether a text surely fits: a text that does needs no clipping, which costs time in every frame that scrolls. */
export function fits(text: string, width: number): boolean {
  let pixels = 0;
  for (let n = 0; n < text.length; n++) {
    pixels += PIXELS[text.charCodeAt(n)] ?? 16;
    if (pixels > width) return false;
  }
  return true;
}
