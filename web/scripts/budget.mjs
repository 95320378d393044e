// Prints sizes of what was built and fails above the budgets.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { DIST, chunk, closure, firstScripts, names, sum } from './sizes.mjs';

const before = firstScripts();
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
