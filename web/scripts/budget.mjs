// Prints sizes of what was built and fails above the budgets.
import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const DIST = fileURLToPath(new URL('../dist', import.meta.url));
const ASSETS = join(DIST, 'assets');
const names = readdirSync(ASSETS).filter((name) => !/\.(gz|br)$/.test(name));
const size = (name, kind) => readFileSync(join(ASSETS, `${name}.${kind}`)).length;
const text = (name) => readFileSync(join(ASSETS, name), 'utf8');
const sum = (list, kind) => list.reduce((total, name) => total + size(name, kind), 0);

/** A chunk with everything that it imports at once. */
function closure(first, found = new Set()) {
  if (found.has(first)) return found;
  found.add(first);
  for (const match of text(first).matchAll(/(?:from|import)\s*["'`]\.\/([^"'`]+\.js)["'`]/g)) closure(match[1], found);
  return found;
}
const html = readFileSync(join(DIST, 'index.html'), 'utf8');
const entry = /assets\/(index-[^"]+\.js)"/.exec(html)[1];
const chunk = (prefix) => names.find((name) => name.startsWith(prefix) && name.endsWith('.js')) ?? fail(`no chunk ${prefix}`);
function fail(message) {
  throw new Error(message);
}
const before = closure(entry);
closure(chunk('Overview-'), before);
const without = (list) => [...list].filter((name) => !before.has(name));
const css = names.filter((name) => name.endsWith('.css'));
const own = css.filter((name) => !/^(uPlot|terminal|xterm)/.test(name));
const KB = 1024;
const rows = [
  ['script before the first page is usable', [...before], 60],
  ['styles', own, 12],
  ['plots', without(closure(chunk('uPlot'))), 25],
  ['terminal', without(closure(chunk('terminal-'))), 85],
  ['editor', without(closure(chunk('editor-'))), 130],
];
let over = 0;
const line = (label, gz, br, limit, kind) => {
  const used = kind === 'gz' ? gz : br;
  const bad = used > limit * KB;
  over += bad ? 1 : 0;
  console.log(`${bad ? 'OVER ' : 'ok   '} ${label.padEnd(42)} gz ${(gz / KB).toFixed(1).padStart(7)} KB   br ${(br / KB).toFixed(1).padStart(7)} KB   limit ${limit} KB ${kind}`);
};
for (const [label, list, limit] of rows) line(label, sum(list, 'gz'), sum(list, 'br'), limit, 'gz');
const all = sum(names, 'br') + readFileSync(join(DIST, 'index.html.br')).length;
line('all of dist', sum(names, 'gz') + readFileSync(join(DIST, 'index.html.gz')).length, all, 350, 'br');
if (over > 0) {
  console.error(`${over} budget${over > 1 ? 's are' : ' is'} exceeded`);
  process.exit(1);
}
