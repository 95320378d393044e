// Measures the pages at a real server, and writes ui.json into the directory of WINDLASS_BENCH_RESULTS.
import { execFileSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { cpus, loadavg } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { gzipSync } from 'node:zlib';
import { allOfDist, editor, firstScript, plots, styles, terminal } from '../../scripts/sizes.mjs';
import { writeFigures } from '../../scripts/figures.mjs';
import { openBrowser, openSession, settle } from './browser.mjs';
import { startServer, waitFor, waits } from './server.mjs';

const RUNS = Number(process.env.UI_RUNS ?? 10_000);
const LOG_MB = Number(process.env.UI_LOG_MB ?? 1000);
const quantile = (list, part) => [...list].sort((a, b) => a - b)[Math.min(list.length - 1, Math.floor(list.length * part))];
const round = (value, digits = 1) => Number(value.toFixed(digits));
const loadBefore = loadavg().map((load) => round(load, 2));
const figures = {};
const note = (name, value, unit, budget) => {
  figures[name] = { value, unit, budget };
  console.log(`${String(value).padStart(10)} ${unit.padEnd(4)} ${name}${budget === undefined ? '' : ` (budget ${budget} ${unit})`}`);
};

for (const [name, bytes, budget] of [['script before the first page, gzip', firstScript(), 60], ['styles, gzip', styles(), 12], ['plots, gzip', plots(), 25], ['terminal, gzip', terminal(), 85], ['editor, gzip', editor(), 130], ['all of `dist`, Brotli', allOfDist(), 350]]) {
  note(name, round(bytes / 1024), 'KB', budget);
}
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
const devtools = await page.context().newCDPSession(page);
await devtools.send('Performance.enable');
const metric = async (name) => (await devtools.send('Performance.getMetrics')).metrics.find((one) => one.name === name).value * 1000;
// What frames take on this machine when nothing moves.
const still = await page.evaluate(async () => {
  const times = [];
  let last = performance.now();
  for (let n = 0; n < 300; n++) {
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times;
});
note('frames while nothing moves, p95', round(quantile(still, 0.95)), 'ms');
const busyBefore = await metric('TaskDuration');
const { times: frames, long } = await page.evaluate(async () => {
  const box = document.querySelector('.viewport');
  box.scrollTop = 0;
  const long = [];
  new PerformanceObserver((list) => long.push(...list.getEntries().map((entry) => entry.duration))).observe({ entryTypes: ['longtask'] });
  const times = [];
  let last = performance.now();
  for (let n = 0; n < 300; n++) {
    box.scrollTop += 480;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return { times, long };
});
note(`frames while ${RUNS} rows scroll, p95`, round(quantile(frames, 0.95)), 'ms', 17);
note(`main thread while ${RUNS} rows scroll, a frame`, round(((await metric('TaskDuration')) - busyBefore) / frames.length), 'ms', 17);
note('longest task while rows scroll', round(Math.max(0, ...long), 0), 'ms', 50);

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

// 500 runs are stopped at once: each row changes at least twice.
const victims = Array.from({ length: Math.min(500, RUNS) }, (_, n) => `row-${RUNS - 1 - n}`);
await view.open('/runs?q=row-');
await page.locator('.viewport .row').first().waitFor();
const scriptBefore = await metric('ScriptDuration');
await server.call('/api/project/main/runs/stop', { runs_names: victims, abort: true });
await waitFor('the runs end', async () => (await server.run(victims.at(-1))).status === 'terminated');
await page.waitForFunction(() => [...document.querySelectorAll('.viewport .row')].slice(0, 20).every((row) => /terminated/.test(row.textContent)));
note('script for 500 rows that change', round((((await metric('ScriptDuration')) - scriptBefore) / 2 / victims.length) * 500), 'ms', 4);

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

const firstHit = performance.now();
const early = await fetch(`${server.url}/api/project/main/logs/search?${new URLSearchParams({ ...Object.fromEntries(query), q: 'loss' })}`, { headers: { authorization: `Bearer ${server.token}` } });
for (let seen = ''; !seen.includes('event: hit');) {
  for await (const part of early.body) { seen += Buffer.from(part).toString(); if (seen.includes('event: hit')) break; }
}
note(`search of ${LOG_MB} MB, first hit`, round(performance.now() - firstHit, 0), 'ms', 1000);

// A log of 100,000 lines a second, followed.
const flood = await server.apply('flood', { commands: [`python3 -u -c "
import sys, time
n = 0
while True:
    sys.stdout.write(''.join('line %d\\n' % i for i in range(n, n + 10000))); sys.stdout.flush(); n += 10000; time.sleep(0.1)
"`] });
await server.until(flood, 'running');
await view.open(`/runs/main/${flood}?tab=logs`);
await page.getByRole('log').locator('.row').nth(5).waitFor();
const followed = await page.evaluate(async () => {
  const number = () => Math.max(...[...document.querySelectorAll('[role="log"] .row .text')].map((row) => Number(/line (\d+)/.exec(row.textContent)?.[1] ?? 0)));
  const times = [];
  const [from, start] = [number(), performance.now()];
  let last = start;
  while (last - start < 8000) {
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  // Lines on the screen follow each other: none is left out or shown twice.
  const shown = [...document.querySelectorAll('[role="log"] .row .text')].map((row) => Number(/line (\d+)/.exec(row.textContent)?.[1])).filter((value) => !Number.isNaN(value));
  return { times, rate: ((number() - from) / (last - start)) * 1000, isWhole: shown.every((value, n) => n === 0 || value === shown[n - 1] + 1) };
});
if (!followed.isWhole) throw new Error('lines of a log that is followed are missing or doubled');
note('lines of a log that are followed', round(followed.rate, 0), '/s');
note('frames while a log is followed, p95', round(quantile(followed.times, 0.95)), 'ms', 17);
await server.call('/api/project/main/runs/stop', { runs_names: [flood], abort: true });
await server.until(flood, (run) => ['terminated', 'done', 'failed'].includes(run.status));

// 100 tabs with a feed each. One user may have a limited number of streams.
const feeds = [];
const ticks = () => { const fields = readFileSync(`/proc/${server.child.pid}/stat`, 'utf8').split(') ')[1].split(' '); return (Number(fields[11]) + Number(fields[12])) * 10; };
const resident = () => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${server.child.pid}/status`, 'utf8'))[1]) / 1024;
const measure = async () => { const [from, start] = [ticks(), performance.now()]; await new Promise((done) => setTimeout(done, 10_000)); return ((ticks() - from) / (performance.now() - start)) * 100; };
await view.open('/projects');
const [idleCpu, idleMemory] = [await measure(), resident()];
for (let n = 0; n < 20; n++) {
  const { creds } = await server.call('/api/users/create', { username: `reader-${n}`, global_role: 'admin', active: true });
  for (let tab = 0; tab < 5; tab++) {
    const abort = new AbortController();
    const answer = await fetch(`${server.url}/api/changes/stream`, { signal: abort.signal, headers: { authorization: `Bearer ${creds.token}` } });
    if (!answer.ok) throw new Error(`a feed was refused: ${answer.status} ${await answer.text()}`);
    feeds.push(abort);
    void (async () => { for await (const part of answer.body) void part; })().catch(() => {});
  }
}
note('processor time of the server for 100 feeds', round((await measure()) - idleCpu), '%', 5);
// Every feed is told of every change.
const change = async (prefix) => { const [from, count] = [ticks(), 40]; for (let n = 0; n < count; n++) await server.apply(`${prefix}-${n}`, waits('B200:8')); return (ticks() - from) / count; };
const told = await change('told');
note('memory of the server for 100 feeds', round(resident() - idleMemory), 'MB', 30);
for (const feed of feeds) feed.abort();
note('processor time of the server for a run that is submitted, with 100 feeds', round(told), 'ms');
note('the same without feeds', round(await change('untold')), 'ms');

// A tab that shows every page again and again does not grow.
const collected = async () => { await devtools.send('HeapProfiler.collectGarbage'); return page.evaluate(() => performance.memory.usedJSHeapSize / 2 ** 20); };
const visit = async () => { for (const name of ['Runs', 'Managed jobs', 'Services', 'Queue', 'Fleets', 'Instances', 'Events', 'Costs', 'Overview']) { await page.locator('nav').getByRole('link', { name }).first().click(); await settle(page); } };
await visit();
const before = await collected();
for (let round_ = 0; round_ < 10; round_++) await visit();
note('growth of the tab over 90 pages', round(Math.max(0, (await collected()) - before)), 'MB', 10);
const heap = await page.evaluate(() => performance.memory?.usedJSHeapSize ?? 0);
note('heap of the tab', round(heap / 2 ** 20), 'MB', 200);
const status = readFileSync(`/proc/${server.child.pid}/status`, 'utf8');
note('memory of the server', round(Number(/VmRSS:\s+(\d+)/.exec(status)[1]) / 1024), 'MB');

await session.close();
await browser.close();
await server.stop();
if (process.env.WINDLASS_BENCH_RESULTS) {
  const git = (...words) => execFileSync('git', words, { cwd: fileURLToPath(new URL('.', import.meta.url)), encoding: 'utf8' }).trim();
  const result = { name: 'ui', date: new Date().toISOString(), profile: process.env.WINDLASS_BENCH_PROFILE ?? 'unknown', load_average_before: loadBefore, commit: git('rev-parse', '--short', 'HEAD'), machine: { cpu: cpus()[0]?.model ?? 'unknown', cores: cpus().length }, load_average: loadavg().map((load) => round(load, 2)), runs: RUNS, log_mb: LOG_MB, figures };
  writeFileSync(join(process.env.WINDLASS_BENCH_RESULTS, 'ui.json'), `${JSON.stringify(result, null, 2)}\n`);
  writeFigures();
}
