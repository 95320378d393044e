// A browser against the development server, with everything that must not happen collected.
import { existsSync } from 'node:fs';
import { chromium } from 'playwright-core';
import { startServer } from '../../dev/server.mjs';

const EXECUTABLE = process.env.CHROMIUM ?? '/usr/bin/chromium';

/** A browser; `hasScrollbars` for pictures, where a hidden scrollbar would move the columns of lists; `host`: a name of this machine. */
export async function openBrowser({ hasScrollbars = false, host = null } = {}) {
  if (!existsSync(EXECUTABLE)) throw new Error(`no browser at ${EXECUTABLE}: apt install chromium, or set CHROMIUM`);
  return chromium.launch({ executablePath: EXECUTABLE, ignoreDefaultArgs: hasScrollbars ? ['--hide-scrollbars'] : [], args: ['--no-sandbox', '--disable-gpu', '--force-color-profile=srgb', ...(host ? [`--host-resolver-rules=MAP ${host} 127.0.0.1`] : [])] });
}

export async function openServer(options) {
  return startServer({ port: 0, loggedIn: true, ...options });
}

/** A page that collects console errors, failed assets and violations of the policy. */
export async function openPage(browser, { url, width = 1440, height = 900, dark = false, timezone = 'UTC' }) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: dark ? 'dark' : 'light', timezoneId: timezone, reducedMotion: 'reduce' });
  await context.addInitScript(() => {
    globalThis.violations = [];
    document.addEventListener('securitypolicyviolation', (event) => globalThis.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample} (${event.sourceFile}:${event.lineNumber})`));
  });
  const page = await context.newPage();
  countCalls(page);
  const problems = [];
  page.on('console', (message) => { if (message.type() === 'error' || message.type() === 'warning') problems.push(`console: ${message.text()}`); });
  page.on('pageerror', (error) => problems.push(`error: ${error.message}`));
  page.on('response', (response) => { if (response.status() >= 400 && !response.url().includes('/api/session/')) problems.push(`${response.status()} ${response.url()}`); });
  return {
    page,
    open: async (path) => { await page.goto(url.replace(/\/$/, '') + path); await page.waitForSelector('#main, .login'); await settle(page); },
    problems: async () => [...problems, ...(await page.evaluate(() => globalThis.violations))],
    clear: () => { problems.length = 0; },
    close: () => context.close(),
  };
}

const calls = new WeakMap();

/** Counts the calls of a page that have no answer yet, for `settle`. Streams last and are not counted. */
export function countCalls(page) {
  const open = new Set();
  calls.set(page, open);
  page.on('request', (request) => {
    const path = new URL(request.url()).pathname;
    if (path.startsWith('/api/') && !/stream|search|terminal/.test(path)) open.add(request);
  });
  for (const event of ['requestfinished', 'requestfailed']) page.on(event, (request) => open.delete(request));
}

/** Waits until what was drawn is on the screen. */
export const frames = (page) => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

/** Waits until nothing loads, nothing is a placeholder, and nothing moves. */
export async function settle(page) {
  await page.waitForFunction(() => document.querySelector('#main')?.childElementCount !== 0 && !document.querySelector('.skeleton'), null, { timeout: 10_000 }).catch(() => {});
  const open = calls.get(page);
  const end = Date.now() + 10_000;
  // A call that ends may begin another one: quiet is when none is open before and after two frames.
  for (let quiet = 0; quiet < 2 && Date.now() < end;) {
    await frames(page);
    quiet = open === undefined || open.size === 0 ? quiet + 1 : 0;
  }
  await page.evaluate(() => Promise.all(document.getAnimations().filter((one) => one.effect?.getComputedTiming().iterations !== Infinity).map((one) => one.finished.catch(() => {}))).then(() => {}));
}

/** Addresses that the pages are opened at, in the frozen world. */
export function addresses(world) {
  const run = (name) => [...world.runs.values()].find((entry) => entry.row.name === name);
  const instance = (name) => world.instances.find((entry) => entry.name === name);
  const failed = [...world.runs.values()].filter((entry) => entry.row.status === 'failed' && entry.row.termination_reason === 'container_exited_with_error' && entry.submissions[0].startedAt).at(-1);
  const big = run('tokenize-web');
  return {
    overview: '/', runs: '/runs', 'runs-failed': '/runs?q=status%3Afailed+user%3Aada', 'run-waits': '/runs/research/train-h200', 'run-lost': '/runs/research/train-llama-70b', 'run-failed': `/runs/${failed.row.project}/${failed.row.name}`,
    logs: '/runs/research/train-llama-70b?tab=logs', 'logs-big': `/runs/platform/tokenize-web?tab=logs&s=${big.submissions[0].id}&o=500000000`, metrics: '/runs/research/train-llama-70b?tab=metrics', configuration: '/runs/research/train-llama-70b?tab=configuration',
    deployments: '/runs/platform/api-chat?tab=deployments', terminal: '/runs/research/train-llama-70b?tab=terminal', raw: '/runs/research/train-llama-70b?tab=raw',
    jobs: '/jobs', job: '/jobs/research/141', 'job-dag': '/jobs/research/139', queue: '/queue', fleets: '/fleets', fleet: '/fleets/research/h100', instances: '/instances', instance: `/instances/research/${instance('h100-03').id}`,
    services: '/services', service: '/services/platform/api-chat', containers: '/containers', dispatchers: '/containers?tab=dispatchers', offers: '/offers?gpu=H100&count=8', launch: '/launch?template=train', events: '/events', costs: '/costs', volumes: '/volumes', gateways: '/gateways',
    usage: '/usage?every=day', projects: '/projects', project: '/projects/research', limits: '/projects/research?tab=limits', sharing: '/projects/research?tab=sharing', admin: '/admin', backends: '/admin?tab=backends', me: '/me', compare: '/compare?a=research/finetune-legal&b=research/finetune-code', missing: '/runs/research/never-was',
  };
}
