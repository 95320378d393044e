// The table of budgets in docs/ui.md, from docs/performance/ui.json: `node scripts/figures.mjs [--check]`.
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath, pathToFileURL } from 'node:url';

const FIGURES = fileURLToPath(new URL('../../docs/performance/ui.json', import.meta.url));
const PAGE = fileURLToPath(new URL('../../docs/ui.md', import.meta.url));
const MARKS = ['<!-- figures -->\n', '<!-- end -->'];

const number = (value) => value.toLocaleString('en-US', { maximumFractionDigits: 1 });

export function render(result) {
  const rows = Object.entries(result.figures).map(([name, { value, unit, budget }]) => {
    const measured = `${number(value)} ${unit}`;
    return budget === undefined ? `| ${name} | – | ${measured} | |` : `| ${name} | ≤ ${number(budget)} ${unit} | ${measured} | ${value <= budget ? '✓' : '**missed**'} |`;
  });
  const { machine, load_average_before: before, load_average: after } = result;
  return `
| what | budget | measured | |
| --- | ---: | ---: | --- |
${rows.join('\n')}

${result.date.slice(0, 16).replace('T', ' ')} UTC, commit ${result.commit}, profile \`${result.profile}\`, ${machine.cores} cores (${machine.cpu}); load average before ${before[0]}, after ${after[0]}.

`;
}

function withFigures(page) {
  const from = page.indexOf(MARKS[0]);
  const to = page.indexOf(MARKS[1], from);
  if (from < 0 || to < 0) throw new Error('docs/ui.md has no place for the figures');
  return page.slice(0, from + MARKS[0].length) + render(JSON.parse(readFileSync(FIGURES, 'utf8'))) + page.slice(to);
}

/** Writes the table. */
export function writeFigures() {
  writeFileSync(PAGE, withFigures(readFileSync(PAGE, 'utf8')));
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? '').href) {
  if (!process.argv.includes('--check')) writeFigures();
  else if (!existsSync(FIGURES)) {
    // Nothing was measured: then the page must not have figures either.
    if (/\| what \| budget \|/.test(readFileSync(PAGE, 'utf8'))) {
      console.error('docs/ui.md has figures, but docs/performance/ui.json is missing: run `cargo xtask bench ui` and commit it');
      process.exit(1);
    }
    console.log('no figures of the pages are committed: `cargo xtask bench ui` measures them');
  } else if (withFigures(readFileSync(PAGE, 'utf8')) !== readFileSync(PAGE, 'utf8')) {
    console.error('the figures of docs/ui.md are not those of docs/performance/ui.json: run `node scripts/figures.mjs` in web');
    process.exit(1);
  }
}
