// Sizes of what was built.
import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

export const DIST = process.env.WINDLASS_WEB_DIST ?? fileURLToPath(new URL('../dist', import.meta.url));
const ASSETS = join(DIST, 'assets');

/** Files, without their compressed forms. */
export const names = readdirSync(ASSETS).filter((name) => !/\.(gz|br)$/.test(name));
export const size = (name, kind) => readFileSync(join(ASSETS, `${name}.${kind}`)).length;
export const sum = (list, kind) => [...list].reduce((total, name) => total + size(name, kind), 0);

/** A chunk with everything that it imports at once. */
export function closure(first, found = new Set()) {
  if (found.has(first)) return found;
  found.add(first);
  for (const match of readFileSync(join(ASSETS, first), 'utf8').matchAll(/(?:from|import)\s*["'`]\.\/([^"'`]+\.js)["'`]/g)) closure(match[1], found);
  return found;
}
export function chunk(prefix) {
  const found = names.find((name) => name.startsWith(prefix) && name.endsWith('.js'));
  if (!found) throw new Error(`no chunk ${prefix}`);
  return found;
}

/** Scripts that are loaded before the first page can be used. */
export function firstScripts() {
  const entry = /assets\/(index-[^"]+\.js)"/.exec(readFileSync(join(DIST, 'index.html'), 'utf8'))[1];
  return closure(chunk('Overview-'), closure(entry));
}
export const firstScript = () => sum(firstScripts(), 'gz');

const without = (list) => [...list].filter((name) => !firstScripts().has(name));
/** Styles of pages; those of plots and of the terminal come with them. */
export const styles = () => sum(names.filter((name) => name.endsWith('.css') && !/^(uPlot|terminal|xterm)/.test(name)), 'gz');
export const plots = () => sum(without(closure(chunk('uPlot'))), 'gz');
export const terminal = () => sum(without(closure(chunk('terminal-'))), 'gz');
export const editor = () => sum(without(closure(chunk('editor-'))), 'gz');
export const allOfDist = () => sum(names, 'br') + readFileSync(join(DIST, 'index.html.br')).length;
