/** Sizes, money and numbers in words. */

/** Dollars: `$0.42`, `$12.40`, `$1,204`. */
export function money(dollars: number): string {
  if (dollars === 0) return '$0';
  if (dollars < 0) return `−${money(-dollars)}`;
  if (dollars < 0.01) return '<$0.01';
  if (dollars < 1000) return `$${dollars.toFixed(2)}`;
  return `$${group(Math.round(dollars))}`;
}

/** Bytes with a binary unit: `812 B`, `4.2 KiB`, `1.5 GiB`. */
export function bytes(n: number): string {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let value = n;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return unit === 0 ? `${Math.round(value)} B` : `${value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** Thousands apart: `12,400`. */
export function group(n: number): string {
  return Math.round(n).toString().replace(/\B(?=(\d{3})+(?!\d))/g, ',');
}

/** Short number: `812`, `12.4k`, `1.2M`. */
export function short(n: number): string {
  if (n < 10_000) return group(n);
  if (n < 1_000_000) return `${(n / 1000).toFixed(n < 100_000 ? 1 : 0)}k`;
  return `${(n / 1_000_000).toFixed(1)}M`;
}

/** Share as a whole percentage. */
export function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}

/** `1 run`, `3 runs`. */
export function count(n: number, noun: string, plural = `${noun}s`): string {
  return `${group(n)} ${n === 1 ? noun : plural}`;
}

/** A word for a shell: quoted when it has to be. */
export function shellWord(text: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** A number with at most one digit after the point: `8`, `0.5`, `2,500`. */
export function amount(n: number): string {
  const rounded = Math.round(n * 10) / 10;
  return Number.isInteger(rounded) ? group(rounded) : `${group(Math.trunc(rounded))}.${Math.round(Math.abs(rounded - Math.trunc(rounded)) * 10)}`;
}

/** The part of a request that decides where it fits: its GPUs where it has some, else all of it. */
export function mainResources(words: string): string {
  const [first = ''] = words.split(', ');
  return first.includes('×') ? first : words;
}
