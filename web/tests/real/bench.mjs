// Measures the pages at a real server, and writes ui.json into the directory of WINDLASS_BENCH_RESULTS.
import { execFileSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { cpus, loadavg } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { gzipSync } from 'node:zlib';
import { firstScript } from '../../scripts/sizes.mjs';
import { openBrowser, openSession, settle } from './browser.mjs';
import { startServer, waits } from './server.mjs';

const RUNS = Number(process.env.UI_RUNS ?? 10_000);
const LOG_MB = Number(process.env.UI_LOG_MB ?? 1000);
const quantile = (list, part) => [...list].sort((a, b) => a - b)[Math.min(list.length - 1, Math.floor(list.length * part))];
const round = (value, digits = 1) => Number(value.toFixed(digits));
const figures = {};
const note = (name, value, unit, budget) => {
  figures[name] = { value, unit, budget };
  console.log(`${String(value).padStart(10)} ${unit.padEnd(4)} ${name}${budget === undefined ? '' : ` (budget ${budget} ${unit})`}`);
};

note('script before the first page, gzip', round(firstScript() / 1024), 'KB', 60);
// Logs are limited to some megabytes an hour by default.
const server = await startServer({ args: ['--log-rate-max', 'off'] });
const browser = await openBrowser();
// A log that is long, and the runs of a list: they wait for what no instance has.
const log = await server.apply('long-log', { commands: [`seq -f 'step %.0f loss 1.2345 lr 3.0e-04 grad 0.71 tokens per second 123456' 1 100000000 | head -c ${LOG_MB}M`, 'echo needle-in-the-log'] });
const began = Date.now();
let next = 0;
const worker = async () => {
  while (next < RUNS) await server.apply(`row-${next++}`, waits('B200:8'));
};
await Promise.all(Array.from({ length: 16 }, worker));
console.log(`           ${RUNS} runs submitted in ${((Date.now() - began) / 1000).toFixed(0)} s`);
await server.until(log, (run) => ['done', 'failed'].includes(run.status));

// Cold first paint: a new context each time.
const paints = [];
for (let n = 0; n < 10; n++) {
  const own = await openSession(browser, server);
  const page = await own.context.newPage();
  await page.goto(`${server.url}/ui/`);
  await page.getByText('Needs attention').waitFor();
  paints.push(await page.evaluate(() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0));
  await own.close();
}
note('first paint, p75', round(quantile(paints, 0.75), 0), 'ms', 500);

const session = await openSession(browser, server);
const view = await session.view();
const { page } = view;
await view.open('/');
const clicks = [];
for (const [name, heading] of [['Runs', 'Runs'], ['Fleets', 'Fleets'], ['Events', 'Events'], ['Instances', 'Instances'], ['Costs', 'Costs'], ['Runs', 'Runs'], ['Fleets', 'Fleets'], ['Events', 'Events'], ['Instances', 'Instances'], ['Costs', 'Costs']]) {
  const start = Date.now();
  await page.locator('nav').getByRole('link', { name }).first().click();
  await page.getByRole('heading', { name: heading, level: 1 }).waitFor();
  await settle(page);
  clicks.push(Date.now() - start);
}
note('click to next page with data, p75', quantile(clicks, 0.75), 'ms', 100);

const lists = [];
for (let n = 0; n < 20; n++) {
  const start = performance.now();
  await server.call('/api/runs/rows', { limit: 100 });
  lists.push(performance.now() - start);
}
note(`runs/rows, 100 of ${RUNS}, p95`, round(quantile(lists, 0.95)), 'ms', 25);
note('runs/rows, 100 rows, gzip', round(gzipSync(JSON.stringify(await server.call('/api/runs/rows', { limit: 100 }))).length / 1024), 'KB');

await view.open('/runs');
await page.locator('.viewport .row').first().waitFor();
await page.keyboard.press('G');
await page.waitForFunction(() => { const rows = [...document.querySelectorAll('.viewport .row')]; return rows.length > 5 && rows.every((row) => !row.querySelector('.skeleton')) && document.querySelector('.viewport').scrollTop > 1000; }, null, { timeout: 60_000 });
const frames = await page.evaluate(async () => {
  const box = document.querySelector('.viewport');
  box.scrollTop = 0;
  const times = [];
  let last = performance.now();
  for (let n = 0; n < 300; n++) {
    box.scrollTop += 480;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times;
});
note(`frames while ${RUNS} rows scroll, p95`, round(quantile(frames, 0.95)), 'ms', 17);

// The same while many runs change: what is drawn must not wait for them.
const changing = Promise.all(Array.from({ length: 4 }, async (_, worker) => {
  for (let n = 0; n < 20; n++) await server.apply(`live-${worker}-${n}`, waits('B200:8'));
}));
const live = await page.evaluate(async () => {
  const box = document.querySelector('.viewport');
  const times = [];
  let last = performance.now();
  for (let n = 0; n < 300; n++) {
    box.scrollTop += n % 2 ? 480 : -240;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times;
});
await changing;
note(`frames while ${RUNS} rows scroll and runs come, p95`, round(quantile(live, 0.95)), 'ms', 17);

// One browser stops a run; the time is when both show it, by the clock of this machine.
const other = await openSession(browser, server);
const second = await other.view();
const agreements = [];
const sees = (name, { page: shown }) => shown.evaluate(() => new Promise((done) => {
  const look = () => (/terminat/.test(document.querySelector('.viewport .row')?.textContent ?? '') ? done(performance.timeOrigin + performance.now()) : requestAnimationFrame(look));
  look();
}));
for (let n = 0; n < 10; n++) {
  const name = `agree-${n}`;
  await server.apply(name, waits('B200:8'));
  for (const shown of [view, second]) {
    await shown.open(`/runs?q=${name}`);
    await shown.page.getByRole('link', { name }).first().waitFor();
  }
  const seen = Promise.all([sees(name, view), sees(name, second)]);
  await server.call('/api/project/main/runs/stop', { runs_names: [name], abort: false });
  const [one, two] = await seen;
  agreements.push(Math.abs(one - two));
}
await other.close();
note('two browsers differ, p95', round(quantile(agreements, 0.95), 0), 'ms', 300);

const delays = [];
for (let n = 0; n < 10; n++) {
  const name = `latency-${n}`;
  await server.apply(name, waits('B200:8'));
  await view.open(`/runs?q=${name}`);
  await page.getByRole('link', { name }).first().waitFor();
  const arrived = page.evaluate(() => new Promise((done) => {
    const look = () => (/terminat/.test(document.querySelector('.viewport .row')?.textContent ?? '') ? done(performance.timeOrigin + performance.now()) : requestAnimationFrame(look));
    look();
  }));
  await server.call('/api/project/main/runs/stop', { runs_names: [name], abort: false });
  const answered = Date.now();
  delays.push(Math.max(0, (await arrived) - answered));
}
note('event to the screen, p95', round(quantile(delays, 0.95), 0), 'ms', 300);

await view.open(`/runs/main/${log}?tab=logs&o=0`);
await page.getByRole('log').locator('.row').first().waitFor();
const jumps = await page.evaluate(async () => {
  const ruler = document.querySelector('.ruler');
  const box = ruler.getBoundingClientRect();
  const found = [];
  for (let n = 0; n < 40; n++) {
    const before = document.querySelector('[role="log"] .row')?.style.transform + document.querySelector('[role="log"] .row .text')?.textContent + location.search;
    const start = performance.now();
    ruler.dispatchEvent(new PointerEvent('pointerdown', { clientX: box.left + 4, clientY: box.top + box.height * ((n * 0.618) % 0.98), bubbles: true, buttons: 1 }));
    await new Promise((done) => {
      const look = () => (document.querySelector('[role="log"] .row')?.style.transform + document.querySelector('[role="log"] .row .text')?.textContent + location.search !== before || performance.now() - start > 2000 ? done() : requestAnimationFrame(look));
      look();
    });
    found.push(performance.now() - start);
  }
  return found;
});
note(`any place of a log of ${LOG_MB} MB, p95`, round(quantile(jumps, 0.95), 0), 'ms', 100);

const run = await server.run(log);
const query = new URLSearchParams({ run_name: log, job_submission_id: run.jobs[0].job_submissions[0].id, q: 'needle-in-the-log' });
const start = performance.now();
const response = await fetch(`${server.url}/api/project/main/logs/search?${query}`, { headers: { authorization: `Bearer ${server.token}` } });
const text = await response.text();
if (!text.includes('event: hit')) throw new Error(`the search found nothing: ${text.slice(-300)}`);
note(`search of ${LOG_MB} MB, all of it`, round(performance.now() - start, 0), 'ms', 5 * LOG_MB);

const heap = await page.evaluate(() => performance.memory?.usedJSHeapSize ?? 0);
note('heap of the tab', round(heap / 2 ** 20), 'MB', 200);
const status = readFileSync(`/proc/${server.child.pid}/status`, 'utf8');
note('memory of the server', round(Number(/VmRSS:\s+(\d+)/.exec(status)[1]) / 1024), 'MB');

await session.close();
await browser.close();
await server.stop();
if (process.env.WINDLASS_BENCH_RESULTS) {
  const git = (...words) => execFileSync('git', words, { cwd: fileURLToPath(new URL('.', import.meta.url)), encoding: 'utf8' }).trim();
  const result = { name: 'ui', date: new Date().toISOString(), commit: git('rev-parse', '--short', 'HEAD'), machine: { cpu: cpus()[0]?.model ?? 'unknown', cores: cpus().length }, load_average: loadavg().map((load) => round(load, 2)), runs: RUNS, log_mb: LOG_MB, figures };
  writeFileSync(join(process.env.WINDLASS_BENCH_RESULTS, 'ui.json'), `${JSON.stringify(result, null, 2)}\n`);
}
