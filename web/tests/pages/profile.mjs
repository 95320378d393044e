// Where the time of a frame goes while a list scrolls: CPU time by kind of work. node tests/pages/profile.mjs [path]
// With CPU=1 also by function, which takes a build with `vite build --minify false` to be readable.
import { openBrowser, openPage, openServer, settle } from './browser.mjs';

const server = await openServer({ frozen: true });
const browser = await openBrowser();
const view = await openPage(browser, { url: server.url });
await view.open(process.argv[2] ?? '/runs');
await view.page.locator('.viewport .row').first().waitFor();
await view.page.keyboard.press('G');
await view.page.waitForFunction(() => { const rows = [...document.querySelectorAll('.viewport .row')]; return rows.length > 5 && rows.every((row) => !row.querySelector('.skeleton')) && document.querySelector('.viewport').scrollTop > 100_000; }, null, { timeout: 20_000 });
await settle(view.page);
const FRAMES = 240;

await view.page.evaluate(() => { document.querySelector('.viewport').scrollTop = 0; });
await browser.startTracing(view.page, { categories: ['devtools.timeline', ...(process.env.CPU ? ['disabled-by-default-v8.cpu_profiler'] : [])] });
const times = await view.page.evaluate(async (count) => {
  const box = document.querySelector('.viewport');
  const times = [];
  let last = performance.now();
  for (let n = 0; n < count; n++) {
    box.scrollTop += 480;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times.sort((a, b) => a - b);
}, FRAMES);
const { traceEvents: events } = JSON.parse((await browser.stopTracing()).toString());
const thread = events.find((event) => event.name === 'FunctionCall' && event.ph === 'X');
const own = events.filter((event) => event.ph === 'X' && event.pid === thread.pid && event.tid === thread.tid);
const totals = new Map();
for (const event of own) totals.set(event.name, (totals.get(event.name) ?? 0) + (event.tdur ?? event.dur) / 1000);
console.log(`frames: p50 ${times[FRAMES / 2].toFixed(1)} ms, p95 ${times[Math.floor(FRAMES * 0.95)].toFixed(1)} ms`);
console.log('main thread, ms of CPU a frame:');
for (const [name, total] of [...totals].sort((a, b) => b[1] - a[1])) if (total / FRAMES > 0.05) console.log(`${(total / FRAMES).toFixed(2).padStart(8)}  ${name}`);
const styled = own.filter((event) => event.name === 'UpdateLayoutTree');
console.log(`${(styled.reduce((sum, event) => sum + (event.args.elementCount ?? event.args.beginData?.elementCount ?? 0), 0) / FRAMES).toFixed(0)} elements styled a frame, in ${(styled.length / FRAMES).toFixed(1)} passes`);
if (process.env.CPU) {
  const nodes = new Map();
  const self = new Map();
  for (const event of events.filter((event) => event.name === 'ProfileChunk' && event.pid === thread.pid)) {
    const { cpuProfile, timeDeltas } = event.args.data;
    for (const node of cpuProfile?.nodes ?? []) nodes.set(node.id, node.callFrame);
    (cpuProfile?.samples ?? []).forEach((id, n) => { const frame = nodes.get(id); const key = `${frame?.functionName} ${frame?.url?.split('/').pop()}:${frame?.lineNumber}:${frame?.columnNumber}`; self.set(key, (self.get(key) ?? 0) + timeDeltas[n] / 1000); });
  }
  console.log('script, ms a frame:');
  for (const [name, total] of [...self].sort((a, b) => b[1] - a[1]).slice(0, 30)) console.log(`${(total / FRAMES).toFixed(3).padStart(8)}  ${name}`);
}

await browser.close();
server.close();
