// A server for building and testing the UI without windlass: serves `dist` and answers the routes of API.md from a
// made-up world. Never part of a release.
//
//   node dev/server.mjs [--port 8087] [--frozen] [--runs 10000] [--empty] [--logged-in]
import { createHash, randomBytes } from 'node:crypto';
import { existsSync, readFileSync, statSync } from 'node:fs';
import { createServer } from 'node:http';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { Log } from './logs.mjs';
import { makeWorld } from './world.mjs';

const ROOT = fileURLToPath(new URL('..', import.meta.url));
const DIST = process.env.WINDLASS_WEB_DIST ?? join(ROOT, 'dist');
const TOKEN = 'dev';
const COOKIE = '__Host-windlass-session';
const HOUR = 3_600_000;

export const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; worker-src 'self'; " +
  "manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; " +
  'trusted-types svelte-trusted-html windlass';
export const SECURITY = {
  'Content-Security-Policy': POLICY, 'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer',
  'Cross-Origin-Opener-Policy': 'same-origin', 'Cross-Origin-Resource-Policy': 'same-origin',
};
export const TYPES = { '.html': 'text/html; charset=utf-8', '.js': 'text/javascript; charset=utf-8', '.css': 'text/css; charset=utf-8', '.svg': 'image/svg+xml', '.json': 'application/json', '.txt': 'text/plain; charset=utf-8' };

export function startServer({ port = 8087, host = '127.0.0.1', frozen = false, runs = 10_000, empty = false, loggedIn = false, uiVersion: otherVersion = null } = {}) {
  const world = makeWorld({ frozen, runs, empty });
  const { now, iso } = world;
  const sessions = new Map();
  const views = [{ id: 'v1', name: 'My failures', page: 'runs', query: 'q=status%3Afailed+user%3Aada', project: null, user: 'ada' }, { id: 'v2', name: 'GPU queue', page: 'runs', query: 'q=status%3Asubmitted', project: 'research', user: 'grace' }];
  const keys = [{ id: 'k1', added_at: iso(now() - 40 * 24 * HOUR), name: 'laptop', type: 'ssh-ed25519', fingerprint: 'SHA256:0x3mKd0b2rJ7pQhYtV1s9kLwq8ZcE5uN4aGfRiXoBvY' }];
  const secrets = { research: ['HF_TOKEN', 'WANDB_API_KEY'], platform: ['REGISTRY_PASSWORD'], sandbox: [] };
  const drops = { feed: false };
  // What was told lately, for readers that come back.
  const told = [];
  world.listeners.add((event, data) => {
    told.push([event, data]);
    if (told.length > 6000) told.splice(0, 1000);
  });
  const open = new Set();
  /** Streams that are open, by path. */
  const streams = new Map();

  const uiVersion = () => {
    if (otherVersion) return otherVersion;
    try {
      return /src="\/ui\/assets\/(index-[^"]+\.js)"/.exec(readFileSync(join(DIST, 'index.html'), 'utf8'))?.[1] ?? 'none';
    } catch {
      return 'none';
    }
  };

  class Refusal extends Error {
    constructor(status, msg, code = null) {
      super(msg);
      Object.assign(this, { status, code });
    }
  }
  const missing = (what) => new Refusal(400, `${what} does not exist`, 'resource_not_exists');

  // ------------------------------------------------------------------ lists
  const statusOf = (row) => row.status ?? row.state;
  function list(all, body, sorts) {
    const text = body.text?.toLowerCase();
    const base = all.filter((r) =>
      (!body.projects?.length || body.projects.includes(r.project)) && (!body.users?.length || body.users.includes(r.user ?? r.owner)) &&
      (!body.types?.length || body.types.includes(r.type ?? r.backend ?? r.schedule_state ?? r.dispatcher)) && (!body.fleets?.length || body.fleets.includes(r.fleet)) &&
      (!body.since || (r.submitted_at ?? r.created_at) >= body.since) && (!body.until || (r.submitted_at ?? r.created_at) < body.until) &&
      (!text || [r.name, r.user, r.owner, r.reason, r.message, r.said, r.id].some((t) => t?.toLowerCase().includes(text))));
    const counts = {};
    for (const r of base) counts[statusOf(r)] = (counts[statusOf(r)] ?? 0) + 1;
    const chosen = body.statuses?.length ? base.filter((r) => body.statuses.includes(statusOf(r))) : base;
    const sort = body.sort ?? '-submitted_at';
    const column = sort.replace(/^-/, '');
    const sign = sort.startsWith('-') ? -1 : 1;
    const key = sorts[column] ?? ((r) => r.submitted_at ?? r.created_at);
    const keyed = chosen.map((r) => [key(r), r]);
    keyed.sort(([a, ra], [b, rb]) => (a < b ? -sign : a > b ? sign : ra.id < rb.id ? -1 : 1));
    const from = body.cursor ? Number(Buffer.from(body.cursor, 'base64url').toString()) : 0;
    const limit = Math.min(body.limit ?? 100, 500);
    const cursor = (n) => Buffer.from(String(n)).toString('base64url');
    return {
      rows: keyed.slice(from, from + limit).map(([, r]) => slim(r)), next: from + limit < keyed.length && limit > 0 ? cursor(from + limit) : null, prev: from > 0 ? cursor(Math.max(0, from - limit)) : null,
      counts, total: Math.min(keyed.length, 10_000), more: keyed.length > 10_000, as_of: world.asOf(),
    };
  }
  const slim = (row) => Object.fromEntries(Object.entries(row).filter(([, value]) => value !== null));
  const runSorts = { submitted_at: (r) => r.submitted_at, name: (r) => r.name, status: (r) => r.status, user: (r) => r.user, cost: (r) => r.cost, duration: (r) => (r.started_at ? (r.finished_at ? Date.parse(r.finished_at) : now()) - Date.parse(r.started_at) : 0) };
  const anySorts = { name: (r) => r.name, status: statusOf, user: (r) => r.user ?? r.owner, owner: (r) => r.owner, cost: (r) => r.cost, submitted_at: (r) => r.submitted_at, created_at: (r) => r.created_at, fleet: (r) => r.fleet, price: (r) => r.price, priority: (r) => r.priority, deadline: (r) => r.deadline ?? '9' , blocks: (r) => r.blocks_busy / r.blocks_total };
  const rowsOfRuns = () => [...world.runs.values()].map((r) => r.row);

  const findRun = (p, { run_name, id }) => {
    if (id) return world.runs.get(id) ?? (() => { throw missing('The run'); })();
    let found = null;
    for (const r of world.runs.values()) if (r.row.project === p && r.row.name === run_name && (!found || r.submitted > found.submitted)) found = r;
    if (!found) throw missing(`Run ${run_name}`);
    return found;
  };

  // ------------------------------------------------------------------ summary
  /** Runs in the last hour, in steps of two minutes. */
  function history() {
    const steps = 30, step = 120_000;
    const all = rowsOfRuns();
    const ends = Array.from({ length: steps }, (_, n) => now() - (steps - 1 - n) * step);
    const at = (text) => (text ? Date.parse(text) : Infinity);
    const active = (r, end) => at(r.submitted_at) <= end && at(r.finished_at) > end;
    return {
      step_seconds: step / 1000,
      running: ends.map((end) => all.filter((r) => active(r, end) && at(r.started_at) <= end).length),
      waiting: ends.map((end) => all.filter((r) => active(r, end) && at(r.started_at) > end).length),
      failed: ends.map((end) => all.filter((r) => r.status === 'failed' && at(r.finished_at) <= end && at(r.finished_at) > end - step).length),
    };
  }
  let summaryCache = null;
  function summary(full) {
    if (summaryCache && now() - summaryCache.at < 400 && !full) return summaryCache.value;
    const count = (list, f) => list.reduce((c, x) => ((c[f(x)] = (c[f(x)] ?? 0) + 1), c), {});
    const recent = rowsOfRuns().filter((r) => !r.finished_at || Date.parse(r.finished_at) > now() - 24 * HOUR);
    const usable = world.instances.filter((i) => ['idle', 'busy'].includes(i.status));
    const blocks = { total: 0, taken: 0, used: 0 };
    const gpus = { total: 0, taken: 0, used: 0 };
    for (const i of usable) {
      const taken = i.slots.filter(Boolean).length;
      blocks.total += i.blocks; blocks.taken += taken; blocks.used += taken * (i.used.gpu ?? i.used.cpu ?? 0);
      if (i.gpus) { gpus.total += i.gpus; gpus.taken += taken; }
    }
    const failures = Object.entries(count(recent.filter((r) => r.status === 'failed'), (r) => r.termination_reason)).map(([reason, n]) => ({ reason, count: n })).sort((a, b) => b.count - a.count).slice(0, 6);
    const midnight = Math.floor(now() / 86_400_000) * 86_400_000;
    let today = 0, week = 0, perHour = 0;
    for (const r of rowsOfRuns()) {
      const at = Date.parse(r.finished_at ?? iso(now()));
      if (at > midnight) today += r.cost;
      if (at > now() - 7 * 24 * HOUR) week += r.cost;
      perHour += r.finished_at ? 0 : r.price;
    }
    const value = {
      as_of: world.asOf(), runs: count(recent, (r) => r.status), managed_jobs: count(world.managed, (j) => j.status), instances: count(world.instances, (i) => i.status), containers: count(world.containers, (c) => c.state),
      fleets: { active: world.fleets.length }, volumes: empty ? {} : { active: 3 }, gateways: empty ? {} : { running: 1 }, blocks, gpus,
      queue: { length: world.queue.length, oldest: world.queue[0]?.row.submitted_at ?? null }, failures, cost: { today, week, per_hour: perHour },
    };
    summaryCache = { at: now(), value };
    if (!full) return value;
    const attention = [];
    const add = (what, kind, id, project, name, reason, since) => attention.push({ what, kind, id, project, name, reason, since });
    for (const i of world.instances) if (i.unreachableSince) add('unreachable', 'instance', i.id, i.project, i.name, `does not answer for 11 minutes; 8 GPUs are out of use`, iso(i.unreachableSince));
    for (const r of world.queue) if (now() - r.submitted > 10 * 60_000) add('waiting', 'run', r.id, r.row.project, r.row.name, r.row.reason, r.row.submitted_at);
    for (const i of world.instances) if (i.health === 'failure') add('unhealthy', 'instance', i.id, i.project, i.name, i.message, iso(now() - 3 * HOUR));
    for (const r of recent.filter((x) => x.status === 'failed').sort((a, b) => b.finished_at.localeCompare(a.finished_at)).slice(0, 4)) add('failed', 'run', r.id, r.project, r.name, r.reason, r.finished_at);
    return {
      ...value, attention: attention.slice(0, 10),
      pipelines: [], history: history(),
    };
  }

  // ------------------------------------------------------------------ explanations
  /** Where a run is in its queue, as far as pages show it. */
  function turn(run) {
    const own = world.queueOf(run);
    const position = own.indexOf(run);
    return { position, length: own.length, class: 'normal', priority: 0, is_within_share: false, quotas: [], usage: 0, weight: 1, in_front: [], reserved: [], starts_at: run.wants.gpu === 'H100' ? iso(now() + (14 + 22 * position) * 60_000) : null, sentences: [`It is number ${position + 1} of ${own.length} in the queue of ${run.row.project}, in class \`normal\`.`] };
  }
  function whyRun(run) {
    const { row } = run;
    const command = `windlass why ${row.name}`;
    const base = { reasons: [], jobs: [], cures: [], deployment: run.deployment, scaling: [], probes: [], next_look_at: null, expected: null, hint: null, command, turn: null, preempted: null };
    if (row.status === 'submitted') {
      const { refusals, left_out } = world.look(run.wants, row.project);
      const before = world.queueOf(run);
      const position = before.indexOf(run);
      const passes = refusals.some((r) => r.shortfalls.every((s) => s.passes));
      const cures = world.curesFor(run.wants, row.project, refusals);
      return {
        ...base,
        sentence: passes ? `It waits for ${row.resources.split(',')[0]}: every instance that fits is in use, and ${position === 0 ? 'it is next' : `${position} ${position === 1 ? 'run is' : 'runs are'} in front`}.` : `It will wait for ever as it is: no instance of ${row.project} can hold ${row.resources}.`,
        reasons: [`${refusals.reduce((n, r) => n + r.count, 0)} instances were looked at; ${refusals.filter((r) => r.shortfalls.every((s) => s.passes)).reduce((n, r) => n + r.count, 0)} fit when they are free.`],
        jobs: [{ replica: 0, rank: 0, submission_id: row.submission_id, status: 'submitted', position, in_front: before.slice(0, position).map((r, n) => ({ position: n, project: r.row.project, run: r.row.project === 'platform' && n % 2 ? null : r.row.name, wants: r.row.resources, rule: 'age', waits_since: r.row.submitted_at })), refusals, left_out }],
        cures, next_look_at: iso(now() + 14_000), expected: passes ? { run: 'finetune-legal', ends_at: iso(now() + 14 * 60_000) } : null,
        hint: passes ? null : 'One of the changes below makes it fit.', turn: turn(run),
      };
    }
    if (row.status === 'failed') return { ...base, sentence: `It failed: ${row.reason}.`, reasons: [`Job 0 ended with the reason ${row.termination_reason}.`], hint: row.termination_reason === 'container_exited_with_error' ? 'The last lines of its log say more.' : null };
    if (row.type === 'service') return {
      ...base, sentence: run.deployment?.state === 'rolling' ? `Deployment ${run.deployment.num} is on its way: ${run.deployment.ready} of ${run.deployment.wanted} new replicas are ready.` : `It serves with ${row.ready} of ${row.wanted} replicas.`, reasons: run.deployment?.message ? [run.deployment.message] : [],
      scaling: [{ group: '0', desired: run.replicas, message: 'measured 9.4 requests a second for each replica, target 12: no change' }],
      probes: Array.from({ length: run.replicas }, (_, n) => ({ replica: n, ready: !(run.deployment?.state === 'rolling' && n === run.replicas - 1), success_streak: run.deployment?.state === 'rolling' && n === run.replicas - 1 ? 0 : 214 + n, message: run.deployment?.state === 'rolling' && n === run.replicas - 1 ? 'GET /health answered 503 for 40 s' : null })),
    };
    if (row.status === 'running') return { ...base, sentence: row.attempts > 1 ? `It runs on ${row.instance}, in attempt ${row.attempts}: the first ended because h100-07 did not answer for 10 minutes.` : `It runs on ${row.instance}.`, reasons: [] };
    if (row.status === 'provisioning') return { ...base, sentence: `It got ${row.instance} and prepares: ${row.message ?? 'the agent starts the container'}.` };
    if (row.status === 'pending') return { ...base, sentence: 'It waits for its schedule `0 6 * * 1-5`: the next start is at 06:00 UTC.', next_look_at: iso(now() + 15.8 * HOUR) };
    if (row.status === 'terminated') return { ...base, sentence: `It was ${row.reason ?? 'stopped'}.` };
    return { ...base, sentence: row.status === 'done' ? 'It is done: every job ended with status 0.' : `It is ${row.status}.` };
  }

  function offersFor(wants, project) {
    const list = [];
    const seen = new Map();
    for (const i of world.instances) {
      if (i.project !== project) continue;
      const missing = world.look({ ...wants, anyProject: false }, project);
      void missing;
      break;
    }
    const { fits } = world.look(wants, project);
    for (const i of fits) {
      const key = i.fleet;
      const offer = seen.get(key) ?? { backend: i.backend, instance: { name: i.fleet, resources: { cpus: i.cpus, memory_mib: i.memory, gpus: Array.from({ length: i.gpus }, () => ({ name: i.gpu, memory_mib: i.gpuMemory * 1024, vendor: 'nvidia' })), spot: i.market === 'spot', disk: { size_mib: 3_600_000 }, description: '' } }, region: i.region, price: Number(((i.price * world.blocksFor(wants, i)) / i.blocks).toFixed(2)), availability: i.status === 'idle' ? 'idle' : 'available', blocks: world.blocksFor(wants, i), total_blocks: i.blocks };
      seen.set(key, offer);
    }
    list.push(...seen.values());
    return { offers: list.sort((a, b) => a.price - b.price), total: fits.length };
  }
  function wantsOf(configuration) {
    const r = configuration?.resources ?? {};
    const number = (x, d) => { const n = Number.parseFloat(String(x ?? '').match(/[\d.]+/)?.[0] ?? ''); return Number.isFinite(n) ? n : d; };
    const gpu = typeof r.gpu === 'object' && r.gpu ? r.gpu : null;
    return { gpu: gpu?.name || null, gpus: gpu ? number(gpu.count, 1) : 0, gpuMemory: gpu?.memory ? number(gpu.memory, 0) : 0, cpus: number(r.cpu, 2), memory: number(r.memory, 8), market: configuration?.spot_policy ?? 'auto', maxPrice: configuration?.max_price ?? null, fleets: configuration?.fleets ?? null };
  }
  function variant(wants, project, v) {
    const w = world.patched(wants, v.patch);
    const { fits, refusals, left_out } = world.look(w, project);
    const { offers, total } = offersFor(w, project);
    return { label: v.label, patch: v.patch, starts_now: fits.length > 0, passes: refusals.some((r) => r.shortfalls.every((s) => s.passes)), offers, total_offers: total, cheapest: offers[0]?.price ?? null, refusals, left_out };
  }

  // ------------------------------------------------------------------ logs
  const gone = new Map();
  function logOf(p, { run_name, job_submission_id, diagnose }) {
    for (const run of world.runs.values()) {
      if (run.row.project !== p || run.row.name !== run_name) continue;
      const s = run.submissions.find((x) => x.id === job_submission_id);
      if (!s) continue;
      if (diagnose === 'true' || diagnose === true) return new Log({ seed: 5, startedAt: s.submitted, endedAt: s.submitted + 9000, linesPerSecond: 1, fixedLines: 0, head: `runner 0.4.0 on ${s.instance?.name ?? 'no instance'}\nINFO  job ${s.id} accepted, epoch 3\nINFO  image pulled in 21.4 s\nINFO  container started, pid 4711\nINFO  commands handed to the shell\n` });
      if (!s.log && s.startedAt) {
        let log = gone.get(s.id);
        if (!log) {
          const image = run.wants.gpus ? 'pytorch/pytorch:2.9.0-cuda12.8' : 'python:3.12-slim';
          log = new Log({ seed: run.seed, startedAt: s.startedAt, endedAt: s.endedAt ?? null, linesPerSecond: 1.7, head: `\x1b[2m== windlass\x1b[0m container of image \x1b[36m${image}\x1b[0m\n$ torchrun train.py\n`, tail: s.fails ? `\x1b[31mTraceback (most recent call last):\x1b[0m\n  File "/app/train.py", line 164, in fit\n    loss.backward()\n\x1b[1;31mtorch.OutOfMemoryError\x1b[0m: CUDA out of memory. Tried to allocate 2.50 GiB on GPU 3\n` : '\x1b[32mdone\x1b[0m\n' });
          gone.set(s.id, log);
        }
        return log;
      }
      return s.log ?? new Log({ seed: 1, startedAt: now(), endedAt: null, linesPerSecond: 0, fixedLines: 0 });
    }
    throw missing('The log');
  }
  const subOf = (p, q) => [...world.runs.values()].find((r) => r.row.project === p && r.row.name === q.run_name)?.submissions.find((s) => s.id === q.job_submission_id);

  // ------------------------------------------------------------------ metrics
  function wave(name, id, device, n, t, limit) {
    let h = 0;
    for (const c of `${id}${name}${device}`) h = (h * 31 + c.charCodeAt(0)) >>> 0;
    const a = (h % 1000) / 1000;
    const share = Math.max(0, Math.min(1, 0.55 + 0.3 * a + 0.12 * Math.sin(t / (90 + a * 60) + a * 9) + 0.06 * Math.sin(t / 13 + device) - (n % 83 < 3 ? 0.35 : 0)));
    return share * limit;
  }
  function queryMetrics(body) {
    const from = Date.parse(body.from) / 1000, to = Date.parse(body.to) / 1000;
    const points = Math.min(body.points, 300);
    const step = Math.max(10, Math.ceil((to - from) / points / 10) * 10);
    const times = [];
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) times.push(t);
    const series = [];
    const limits = { cpu: 96, memory: 512 * 2 ** 30, gpu: 1, gpu_memory: 80 * 2 ** 30, net_in: 2e8, net_out: 1e8, requests: 40, errors: 0.6, p50: 180, p99: 900, in_flight: 24, waiting: 3, replicas: 3, writes: 900, passes: 1400 };
    for (const id of body.ids) for (const name of body.names) {
      const devices = name === 'gpu' || name === 'gpu_memory' ? 8 : 1;
      for (let d = 0; d < devices; d++) {
        const limit = limits[name] ?? 1;
        const mean = times.map((t, n) => wave(name, id, d, n, t, limit));
        series.push({ id, name, device: devices > 1 ? d : null, limit: ['cpu', 'memory', 'gpu', 'gpu_memory'].includes(name) ? limit : null, min: mean.map((v) => v * 0.9), mean, max: mean.map((v) => Math.min(v * 1.1, limit)) });
      }
    }
    return { times, step_seconds: step, series };
  }
  const blockSample = () => ({
    at: iso(now()),
    instances: world.instances.map((i) => ({ id: i.id, blocks: i.slots.map((slot, n) => ({ state: slot ? 'taken' : 'free', job: slot ? { project: slot.run.row.project, run: slot.run.row.name, rank: slot.rank } : null, used: slot ? Math.max(0, Math.min(1, (i.used.gpu ?? i.used.cpu ?? 0.5) / Math.max(0.2, i.slots.filter(Boolean).length / i.blocks) + 0.22 * Math.sin(n * 2.3 + now() / 9000 + i.num))) : null })) })),
  });

  // ------------------------------------------------------------------ configurations
  const FIELDS = ['type', 'name', 'image', 'commands', 'resources', 'env', 'port', 'ports', 'python', 'ide', 'init', 'replicas', 'scaling', 'probes', 'max_duration', 'retry', 'spot_policy', 'max_price', 'schedule', 'nodes', 'volumes', 'fleets', 'inactivity_duration', 'working_dir', 'repos', 'files', 'gateway', 'https', 'run', 'setup', 'deadline', 'tags', 'priority', 'stop_criteria', 'creation_policy', 'idle_duration', 'groups', 'rolling_deployment'];
  function readText(text) {
    const problems = [];
    const c = {};
    const path = [];
    text.split('\n').forEach((raw, n) => {
      const line = raw.replace(/\s+#.*$|^#.*$/, '');
      if (!line.trim() || line.trim().startsWith('- ')) return;
      const m = /^(\s*)([\w.-]+):\s*(.*)$/.exec(line);
      const at = { line: n + 1, end_line: n + 1 };
      if (!m) {
        if (!/^\s/.test(line)) problems.push({ code: 'C001', severity: 'error', message: 'expected `name: value`', ...at, column: 1, end_column: line.length + 1, hint: 'a field is a name, a colon and a value' });
        return;
      }
      const depth = m[1].length / 2;
      path.length = Math.floor(depth);
      path.push(m[2]);
      if (depth === 0 && !FIELDS.includes(m[2])) {
        const near = FIELDS.find((f) => f.slice(0, 3) === m[2].slice(0, 3));
        problems.push({ code: 'C010', severity: 'error', message: `unknown field \`${m[2]}\``, ...at, column: 1, end_column: m[2].length + 1, hint: near ? `did you mean \`${near}\`?` : 'the reference lists every field' });
      }
      let target = c;
      for (const part of path.slice(0, -1)) target = target[part] = typeof target[part] === 'object' && target[part] ? target[part] : {};
      target[m[2]] = m[3].replace(/^"|"$/g, '') || {};
    });
    const types = ['task', 'service', 'dev-environment', 'fleet', 'volume', 'gateway'];
    if (!c.type && !c.run) problems.unshift({ code: 'C011', severity: 'error', message: 'missing field `type`', line: 1, column: 1, end_line: 1, end_column: 2, hint: `one of ${types.join(', ')}` });
    else if (c.type && !types.includes(c.type)) {
      const n = text.split('\n').findIndex((l) => l.startsWith('type:'));
      problems.push({ code: 'C012', severity: 'error', message: `unknown type \`${c.type}\``, line: n + 1, column: 7, end_line: n + 1, end_column: 7 + String(c.type).length, hint: `one of ${types.join(', ')}` });
    }
    if (c.type === 'service' && !c.port) problems.push({ code: 'C013', severity: 'error', message: 'a service needs `port`', line: 1, column: 1, end_line: 1, end_column: 14, hint: 'the port on which the program listens' });
    if (c.image && !String(c.image).includes(':')) {
      const n = text.split('\n').findIndex((l) => l.startsWith('image:'));
      problems.push({ code: 'W001', severity: 'warning', message: 'the image has no tag: `latest` is taken', line: n + 1, column: 8, end_line: n + 1, end_column: 8 + String(c.image).length, hint: 'name a tag, so that two runs run the same' });
    }
    return { configuration: c, problems };
  }
  function plan(p, text) {
    const { configuration, problems } = readText(text);
    if (problems.some((x) => x.severity === 'error')) return { problems, plan: null };
    const wants = wantsOf(configuration);
    const { fits, refusals, left_out } = world.look(wants, p);
    const { offers, total } = offersFor(wants, p);
    const name = configuration.name || 'quiet-otter';
    const current = [...world.runs.values()].filter((r) => r.row.project === p && r.row.name === name && !r.row.finished_at).at(-1);
    return { problems, plan: { type: configuration.type ?? 'managed-job', name, action: current ? 'update' : 'create', run_spec: { configuration, configuration_text: text }, current_resource: current ? { id: current.id } : null, offers, total_offers: total, max_price: offers.at(-1)?.price ?? null, starts_now: fits.length > 0, refusals, left_out, runs_in: [configuration.image ? `a container of image ${configuration.image}` : configuration.python ? `a container of image python:${configuration.python}` : 'a plain process, without an image'], current_text: current?.text ?? null, effective_text: text } };
  }

  // ------------------------------------------------------------------ the table of routes
  const userOf = (req) => req.session.user;
  const sessionAnswer = (s) => ({ user: { id: s.user.id, username: s.user.username, email: s.user.email, global_role: s.user.global_role }, projects: world.projects.map((p) => ({ id: p.id, name: p.name, role: s.user.global_role === 'admin' ? 'admin' : 'user' })), opened_at: iso(s.opened), expires_at: iso(s.opened + 7 * 24 * HOUR), insecure: false, server_version: '0.4.0-dev', now: iso(now()) });
  const openSession = (res) => {
    const id = randomBytes(24).toString('hex');
    const s = { id: world.uuid(), user: world.users[0], opened: now() };
    sessions.set(id, s);
    res.setHeader('Set-Cookie', `${COOKIE}=${id}; Secure; HttpOnly; SameSite=Strict; Path=/`);
    return s;
  };
  const bigProject = (name) => ({ project_id: world.projectId(name), project_name: name, owner: world.users[0], created_at: iso(now() - 300 * 24 * HOUR), backends: [{ name: 'ssh' }, { name: 'aws' }], members: world.users.map((user, n) => ({ user, project_role: n === 0 ? 'admin' : n < 3 ? 'manager' : 'user', permissions: {} })), is_public: name === 'sandbox', templates_repo: null });

  const named = empty ? [] : [
    { name: 'ci', scope: 'submit', prefix: 'wl_4be1', created_at: iso(now() - 40 * 24 * HOUR), expires_at: iso(now() + 50 * 24 * HOUR), last_used_at: iso(now() - 7 * 60_000) },
    { name: 'dashboards', scope: 'read', prefix: 'wl_90c2', created_at: iso(now() - 12 * 24 * HOUR), expires_at: null, last_used_at: iso(now() - 30_000) },
    { name: 'demo', scope: 'services', prefix: 'wl_d17f', created_at: iso(now() - 9 * 24 * HOUR), expires_at: iso(now() - 2 * 24 * HOUR), last_used_at: null },
  ];
  const quotas = empty ? [] : [
    { resource: 'gpu', max: 64, share: 32, used: 41 }, { resource: 'gpu:h100', username: 'ada', max: 16, used: 16 }, { resource: 'memory', max: 8000, used: 2912.5 }, { resource: 'price', username: 'grace', max: 20, used: 3.2 },
  ];
  const budgets = empty ? [] : [
    { unit: 'cost', period: 'month', warn: 15_000, cap: 20_000, spent: 16_204.5, state: 'warning', ends_at: iso(now() + 12 * 24 * HOUR) }, { unit: 'gpu-hours', period: 'week', username: 'ada', cap: 400, spent: 127.25, state: 'within', ends_at: iso(now() + 3 * 24 * HOUR) },
    { unit: 'cost', period: 'day', username: 'edsger', cap: 50, spent: 50.4, state: 'exhausted', ends_at: iso(now() + 9 * HOUR) },
  ];
  const exports = empty ? [] : [
    { id: 'e-1', name: 'gpus', is_global: false, imports: [{ project_name: 'platform' }, { project_name: 'sandbox' }], exported_fleets: [{ id: 'f-1', name: 'h100' }, { id: 'f-2', name: 'a100-spot' }], exported_gateways: [] },
    { id: 'e-2', name: 'cpus', is_global: true, imports: [], exported_fleets: [{ id: 'f-3', name: 'cpu-pool' }], exported_gateways: [] },
  ];
  const imports = empty ? [] : [{ id: 'i-1', export: { id: 'e-9', name: 'entry', project_name: 'platform', exported_fleets: [], exported_gateways: [{ id: 'g-1', name: 'entry' }] } }];
  const backends = empty ? [] : [{ name: 'aws', projects: ['research'] }, { name: 'lxd', projects: ['research', 'platform'] }, { name: 'slurm', projects: [] }];
  const same = (a, b) => (a.username ?? null) === (b.username ?? null) && a.resource === b.resource && a.unit === b.unit && a.period === b.period;
  const replace = (all, one) => { const at = all.findIndex((other) => same(other, one)); if (at < 0) all.push(one); else all[at] = { ...all[at], ...one }; };
  const drop = (all, one) => { const at = all.findIndex((other) => same(other, one)); if (at >= 0) all.splice(at, 1); };
  /** Usage by projects, users, classes and times that depends on nothing but them. */
  function usage({ projects = [], by = [], since }) {
    if (empty) return { since, until: iso(now()), rows: [], total: { jobs: 0, gpu_hours: 0, cpu_hours: 0, cost: 0 } };
    const every = by.find((one) => ['day', 'week', 'month'].includes(one));
    const step = { day: 24 * HOUR, week: 7 * 24 * HOUR, month: 30 * 24 * HOUR }[every];
    const rows = new Map();
    const total = { jobs: 0, gpu_hours: 0, cpu_hours: 0, cost: 0 };
    for (let at = Math.floor(Date.parse(since) / (24 * HOUR)) * 24 * HOUR; at < now(); at += 24 * HOUR) {
      ['research', 'platform', 'sandbox'].filter((name) => !projects.length || projects.includes(name)).forEach((project, p) => world.users.slice(0, 4).forEach((user, u) => ['normal', 'idle'].forEach((class_, c) => {
        const size = Math.max(0, (3 - p) * 14 + 9 * Math.sin(at / 86_400_000 + u * 2 + p) - u * 3) / (1 + c * 3);
        const amounts = { jobs: Math.round(size / 3), gpu_hours: size, cpu_hours: size * 11, cost: size * 2.1 };
        const row = { ...(every ? { from: iso(Math.floor(at / step) * step) } : {}), ...(by.includes('project') ? { project } : {}), ...(by.includes('user') ? { user: user.username } : {}), ...(by.includes('class') ? { class: class_ } : {}) };
        const key = JSON.stringify(row);
        const found = rows.get(key) ?? { ...row, jobs: 0, gpu_hours: 0, cpu_hours: 0, cost: 0 };
        for (const name of Object.keys(amounts)) { found[name] += amounts[name]; total[name] += amounts[name]; }
        rows.set(key, found);
      })));
    }
    return { since, until: iso(now()), rows: [...rows.values()], total };
  }

  const POST = {
    '/api/users/tokens/list': () => named,
    '/api/users/tokens/create': (b) => { if (named.some((token) => token.name === b.name)) throw new Refusal(400, `A token named ${b.name} exists`, 'resource_exists'); const token = { name: b.name, scope: b.scope, prefix: 'wl_new1', created_at: iso(now()), expires_at: b.expires_in ? iso(now() + b.expires_in * 1000) : null, last_used_at: null }; named.push(token); return { ...token, token: 'wl_new1b6dff2e4' }; },
    '/api/users/tokens/revoke': (b) => { for (const name of b.names) named.splice(named.findIndex((token) => token.name === name), 1); return null; },
    '/api/usage/list': usage,
    '/api/backends/list': () => backends,
    '/api/backends/check': (b) => [{ what: 'credentials are accepted' }, { what: 'a network for instances', ...(b.backend === 'aws' ? { problem: 'region eu-central-1 has no default VPC; create one or name another region' } : {}) }],
    '/api/backends/grant': (b) => { backends.find((one) => one.name === b.backend).projects.push(b.project_name); return bigProject(b.project_name); },
    '/api/backends/revoke': (b) => { const one = backends.find((found) => found.name === b.backend); one.projects = one.projects.filter((name) => name !== b.project_name); return bigProject(b.project_name); },
    '/api/projects/create': (b) => { if (world.projectId(b.project_name)) throw new Refusal(400, `Project ${b.project_name} exists`, 'resource_exists'); world.projects.push({ id: world.uuid(), name: b.project_name }); return { ...bigProject(b.project_name), project_name: b.project_name }; },
    '/api/session/get': (b, r) => sessionAnswer(r.session),
    '/api/session/close': (b, r, res) => { sessions.delete(r.sessionId); res.setHeader('Set-Cookie', `${COOKIE}=; Secure; HttpOnly; SameSite=Strict; Path=/; Max-Age=0`); res.setHeader('Clear-Site-Data', '"cache","storage"'); return null; },
    '/api/session/list': () => ({ sessions: [{ id: 's1', address: '127.0.0.1', browser: 'Chromium 156 on Linux', opened_at: iso(now() - HOUR), last_seen_at: iso(now()), expires_at: iso(now() + 100 * HOUR), current: true }, { id: 's2', address: '10.3.0.17', browser: 'Firefox 151 on macOS', opened_at: iso(now() - 50 * HOUR), last_seen_at: iso(now() - 3 * HOUR), expires_at: iso(now() + 60 * HOUR), current: false }] }),
    '/api/session/revoke': () => null,
    '/api/runs/rows': (b) => list(rowsOfRuns(), b, runSorts),
    '/api/jobs/rows': (b) => list(world.managed.flatMap(world.jobRows), b, anySorts),
    '/api/instances/rows': (b) => list(world.instances.map(world.instanceRow), { sort: 'name', ...b }, anySorts),
    '/api/containers/rows': (b) => list(world.containers, b, anySorts),
    '/api/summary': () => summary(true),
    '/api/schemas/get': (b) => JSON.parse(readFileSync(join(ROOT, '..', 'schema', b.name === 'profiles' ? 'profiles.schema.json' : 'windlass.schema.json'), 'utf8')),
    '/api/errors/get': (b) => { const file = join(ROOT, '..', 'docs', 'errors', `${b.code}.md`); if (!/^[A-Z]\d+$/.test(b.code) || !existsSync(file)) throw new Refusal(404, `There is no error ${b.code}`); const text = readFileSync(file, 'utf8'); return { code: b.code, title: text.split('\n')[0].replace(/^#.*: /, ''), text }; },
    '/api/search': (b) => {
      const t = b.text.toLowerCase();
      const hits = [];
      const add = (kind, id, project, name, status, hint) => hits.length < b.limit * 3 && hits.push({ kind, id, project, name, status, hint });
      for (const f of world.fleets) if (f.name.includes(t)) add('fleet', f.id, f.project, f.name, f.status, f.backend);
      for (const i of world.instances) if (i.name.includes(t)) add('instance', i.id, i.project, i.name, i.status, i.fleet);
      for (const j of world.managed) if (j.name.includes(t) || String(j.job_id).startsWith(t)) add('managed-job', String(j.job_id), j.project, j.name, j.status, `job ${j.job_id}, ${j.user}`);
      for (const r of [...world.runs.values()].reverse()) if (r.row.name.includes(t) || r.id.startsWith(t)) add('run', r.id, r.row.project, r.row.name, r.row.status, `${r.row.type}, ${r.row.user}`);
      for (const p of world.projects) if (p.name.includes(t)) add('project', p.id, null, p.name, null, null);
      return { hits: hits.sort((a, c) => Number(c.name.startsWith(t)) - Number(a.name.startsWith(t))).slice(0, b.limit) };
    },
    '/api/dispatchers/list': (b, r) => world.dispatcherList(userOf(r).global_role === 'admin'),
    '/api/queue/list': (b, r) => ({
      as_of: world.asOf(),
      entries: world.queue.map((run, n) => {
        const { refusals } = world.look(run.wants, run.row.project);
        const nearest = refusals[0];
        const passes = refusals.some((x) => x.shortfalls.every((s) => s.passes));
        const foreign = n === 2 && world.queue.length > 4;
        const holders = passes ? world.instances.filter((i) => i.project === run.row.project && i.gpu === run.wants.gpu && i.slots.some(Boolean)).slice(0, 2).map((i) => ({ project: i.project, run: i.slots.find(Boolean).run.row.name, place: i.name, ends_at: iso(now() + (14 + i.num * 9) * 60_000) })) : [];
        const queues = [...new Set(world.queue.map((one) => one.row.project))];
        return { queue: queues.indexOf(run.row.project), position: world.queueOf(run).indexOf(run), class: 'normal', rule: world.queueOf(run)[0] === run ? null : 'age', turn: foreign ? null : turn(run), project: foreign ? null : run.row.project, run: foreign ? null : run.row.name, run_id: foreign ? null : run.id, user: foreign ? null : run.row.user, type: foreign ? null : run.row.type, mine: !foreign && run.row.user === userOf(r).username, wants: run.row.resources, waits_since: run.row.submitted_at, nearest: nearest ? { place: nearest.place, message: nearest.shortfalls[0].message, cure: nearest.shortfalls[0].cure, patch: nearest.shortfalls[0].patch } : null, passes, blocked_by: holders };
      }),
      slots: { launching: 5, launching_max: 8, alive: 21, alive_max: 64 },
      next_free: [...world.runs.values()].filter((x) => x.row.status === 'running' && x.row.type === 'task').slice(-5).map((x, n) => ({ project: x.row.project, run: x.row.name, place: x.row.instance, ends_at: iso(now() + (14 + n * 11) * 60_000) })),
    }),
    '/api/events/list': (b) => {
      const ids = new Set([...(b.target_runs ?? []), ...(b.within_runs ?? []), ...(b.target_instances ?? []), ...(b.target_fleets ?? []), ...(b.target_managed_jobs ?? [])]);
      let found = world.events;
      if (ids.size) found = found.filter((e) => e.targets.some((t) => ids.has(t.id)));
      if (b.within_projects?.length) found = found.filter((e) => e.targets.some((t) => b.within_projects.includes(t.project_id)));
      if (b.entities?.length) found = found.filter((e) => b.entities.includes(e.entity));
      if (b.reasons?.length) found = found.filter((e) => b.reasons.includes(e.reason));
      if (b.since) found = found.filter((e) => e.recorded_at >= b.since);
      if (b.until) found = found.filter((e) => e.recorded_at < b.until);
      if (b.text) found = found.filter((e) => e.message.toLowerCase().includes(b.text.toLowerCase()));
      if (b.prev_recorded_at) found = found.filter((e) => (b.ascending ? e.recorded_at > b.prev_recorded_at : e.recorded_at < b.prev_recorded_at));
      return (b.ascending ? found.slice(0, b.limit ?? 100) : found.slice(-(b.limit ?? 100)).reverse());
    },
    '/api/metrics/query': (b) => queryMetrics(b),
    '/api/views/list': () => ({ views }),
    '/api/views/set': (b, r) => { const v = { id: world.uuid(), ...b, user: userOf(r).username }; views.push(v); return v; },
    '/api/views/delete': (b) => { const n = views.findIndex((v) => v.id === b.id); if (n >= 0) views.splice(n, 1); return null; },
    '/api/fleets/list': () => world.fleets.map((f) => ({ id: f.id, name: f.name, project_name: f.project, spec: f.spec, created_at: iso(f.created_at), status: f.status, status_message: null, instances: [] })),
    '/api/volumes/list': () => (empty ? [] : ['datasets', 'checkpoints', 'hf-cache'].map((name, n) => ({ id: `vol-${n}`, name, user: ['ada', 'grace', 'linus'][n], project_name: 'research', configuration: { type: 'volume', name, backend: n === 2 ? 'local' : 'aws', region: n === 2 ? 'local' : 'eu-west-1', size: ['8TB', '2TB', '500GB'][n] }, external: false, created_at: iso(now() - (90 - n * 20) * 24 * HOUR), last_processed_at: iso(now()), status: n === 1 ? 'provisioning' : 'active', status_message: n === 1 ? 'is being grown from 1TB to 2TB' : null, deleted: false, deleted_at: null, volume_id: `vol-0ab${n}`, cost: [812.2, 201.7, 0][n], attachments: n === 1 ? [] : world.instances.slice(0, 3).map((i) => ({ instance: { name: i.name, fleet_name: i.fleet, instance_num: i.num } })) }))),
    '/api/users/list': () => world.users,
    '/api/users/create': (b) => ({ ...world.users[1], username: b.username, global_role: b.global_role, creds: { token: 'wl_7f3c0d1e5b' } }),
    '/api/users/update': (b) => { const u = world.users.find((x) => x.username === b.username); Object.assign(u, { active: b.active, global_role: b.global_role }); return u; },
    '/api/users/refresh_token': (b) => ({ ...world.users[0], username: b.username, creds: { token: 'wl_new_5e1f77a0' } }),
    '/api/users/public_keys/list': () => keys,
    '/api/users/public_keys/add': (b) => { if (!b.key.startsWith('ssh-')) throw new Refusal(400, 'The key is not an SSH public key: expected `ssh-ed25519 AAAA… comment`'); const k = { id: world.uuid(), added_at: iso(now()), name: b.name ?? 'key', type: b.key.split(' ')[0], fingerprint: 'SHA256:' + createHash('sha256').update(b.key).digest('base64').slice(0, 43) }; keys.push(k); return k; },
    '/api/users/public_keys/delete': (b) => { for (const id of b.ids) keys.splice(keys.findIndex((k) => k.id === id), 1); return null; },
    '/api/server/pipelines': () => ['runs', 'jobs_submitted', 'jobs_running', 'jobs_terminating', 'instances', 'fleets', 'volumes', 'gateways', 'managed_jobs', 'service_stats'].map((name, n) => ({ name, queued: n === 2 ? 3 : 0, in_work: n % 3, oldest_seconds: n === 2 ? 1.4 : 0.1, applied_last_minute: 900 - n * 77, claimed: 1_200_000 - n * 10_000, applied: 1_199_000 - n * 10_000, stale: n * 3, reset: 0, lost: n === 2 ? 1 : 0, errors: n === 5 ? 2 : 0 })),
    '/api/server/settings': () => ({ settings: [['database', 'postgres (2 replicas)', '--database'], ['default image', 'debian:13', '--default-image'], ['tls port', '3443', '--tls-port'], ['log bytes kept for a job', '1 GiB', 'default'], ['metrics kept', '30 days', 'default']].map(([name, value, from]) => ({ name, value, from })) }),
  };

  const PROJECT = {
    'runs/get': (p, b) => {
      const run = findRun(p, b);
      const jobs = new Map();
      for (const s of run.submissions) {
        const key = `${s.replica}-${s.rank}`;
        const job = jobs.get(key) ?? { job_spec: { job_name: `${run.row.name}-${s.rank}-${s.replica}`, replica_num: s.replica, job_num: s.rank, requirements: { resources: run.row.resources } }, job_submissions: [], job_connection_info: null };
        job.job_submissions.push({ id: s.id, submission_num: s.num, deployment_num: run.deployment?.num ?? 0, submitted_at: iso(s.submitted), last_processed_at: iso(now()), finished_at: iso(s.endedAt ?? null), inactivity_secs: null, status: s.status, status_message: s.status, termination_reason: s.reason, termination_reason_message: null, exit_status: s.exit === null ? null : Number(s.exit), error: null, job_provisioning_data: s.instance ? { hostname: s.instance.name, backend: s.instance.backend, region: s.instance.region, price: s.instance.price } : null, job_runtime_data: null, image_pull_progress: null, probes: run.shape.type === 'service' ? [{ success_streak: 200 }] : [] });
        jobs.set(key, job);
      }
      return { id: run.id, project_name: run.row.project, user: run.row.user, fleet: run.row.fleet ? { id: world.fleets.find((f) => f.name === run.row.fleet)?.id ?? '', name: run.row.fleet } : null, submitted_at: run.row.submitted_at, last_processed_at: iso(now()), status: run.row.status, status_message: run.row.message ?? run.row.status, termination_reason: run.row.termination_reason, run_spec: { run_name: run.row.name, configuration_text: run.text, configuration_path: `${run.shape.base}.yml`, configuration: { type: run.row.type, name: run.row.name, resources: run.wants } }, jobs: [...jobs.values()], latest_job_submission: null, cost: run.row.cost, service: run.shape.type === 'service' ? { url: `https://${run.row.name}.svc.example.org`, model: run.model ? { name: run.model, type: 'chat' } : null } : null, deployment_num: run.deployment?.num ?? 0, error: null, deleted: false, next_triggered_at: null, reason: run.row.reason, row: slim(run.row), as_of: world.asOf(), deployment: run.deployment, scaling: run.shape.type === 'service' ? [{ group: '0', desired: run.replicas, message: 'measured 9.4 requests a second for each replica, target 12' }] : [] };
    },
    'runs/why': (p, b) => whyRun(findRun(p, b)),
    'runs/what_if': (p, b) => {
      const wants = b.run_name ? findRun(p, b).wants : wantsOf(b.run_spec?.configuration);
      return { variants: b.variants.map((v) => variant(wants, p, v)) };
    },
    'runs/timeline': (p, b) => {
      if (b.job_id !== undefined) {
        const job = world.managed.find((j) => j.job_id === b.job_id);
        if (!job) throw missing(`Job ${b.job_id}`);
        const spans = [];
        for (const t of job.tasks) for (const a of t.attempts) {
          const from = Date.parse(a.from);
          const base = { replica: 0, rank: t.task_id, submission: 0, submission_id: `${t.task_id}-${a.attempt}`, attempt: a.attempt, instance: a.placement, market: a.market };
          spans.push({ ...base, phase: 'machine', from: iso(from), to: iso(from + 150_000), reason: null }, { ...base, phase: 'image', from: iso(from + 150_000), to: iso(from + 240_000), reason: null }, { ...base, phase: 'run', from: iso(from + 240_000), to: a.to, reason: a.reason });
        }
        return { spans, marks: [], previous: [] };
      }
      const run = world.runs.get(b.id) ?? findRun(p, b);
      const previous = [];
      for (const r of world.runs.values()) {
        if (r.shape.base === run.shape.base && r.row.finished_at && r.id !== run.id && r.submitted < run.submitted) previous.push(r);
      }
      return {
        spans: run.submissions.flatMap((s) => s.phases.map((ph) => ({ replica: s.replica, rank: s.rank, submission: s.num, submission_id: s.id, attempt: 0, phase: ph.phase, from: iso(ph.from), to: iso(ph.to), instance: ph.phase === 'queue' ? null : (s.instance?.name ?? null), market: s.instance?.market ?? null, reason: ph.reason ?? (s.fails && ph.phase === 'run' ? s.reason : null) }))),
        marks: run.marks,
        previous: previous.sort((a, c) => c.submitted - a.submitted).slice(0, 10).map((r) => ({ id: r.id, submitted_at: r.row.submitted_at, status: r.row.status, phases: Object.fromEntries(r.submissions[0].phases.map((ph) => [ph.phase, ((ph.to ?? now()) - ph.from) / 1000])) })),
      };
    },
    'runs/deployments': (p, b) => { const run = findRun(p, b); return { deployments: run.deployments, state: run.deployment }; },
    'runs/redeploy': (p, b) => { const run = findRun(p, b); const old = run.deployments.find((d) => d.num === b.num); const num = run.deployments[0].num + 1; for (const d of run.deployments) { d.current = false; if (d.state === 'rolling' || d.state === 'complete') d.state = 'superseded'; } run.deployments.unshift({ ...old, num, at: iso(now()), user: 'ada', state: 'rolling', reason: `goes back to deployment ${b.num}`, current: true }); run.deployment = { num, state: 'rolling', ready: 0, wanted: run.replicas, old: run.replicas, message: 'replica 0 starts', rolled_back: null }; world.tellRun(run); return null; },
    'runs/stop': (p, b, r) => { for (const name of b.runs_names) world.stop(findRun(p, { run_name: name }), userOf(r).username, b.abort); return null; },
    'runs/delete': (p, b, r) => { for (const name of b.runs_names) { const run = findRun(p, { run_name: name }); if (!run.row.finished_at) throw new Refusal(400, `Run ${name} is not over: stop it first`); world.event(run, { kind: 'run.deleted', entity: 'run', reason: 'deleted', message: 'Run deleted', user: userOf(r).username, actor: 'api', at: now() }); world.runs.delete(run.id); for (const l of world.listeners) l('gone', { seq: world.seq, as_of: world.asOf(), kind: 'run', id: run.id }); } return null; },
    'runs/apply': (p, b, r) => {
      const c = b.plan.run_spec.configuration;
      const wants = wantsOf(c);
      const name = c.name || `run-${Math.floor(Math.random() * 1000)}`;
      const run = world.submit({ base: name, project: p, type: c.type ?? 'task', wants, secs: [20, 60] }, { name, user: userOf(r).username, wants });
      run.text = b.plan.run_spec.configuration_text ?? run.text;
      return PROJECT['runs/get'](p, { id: run.id });
    },
    'jobs/get': (p, b) => {
      const j = world.managed.find((x) => x.job_id === b.job_id && x.project === p);
      if (!j) throw missing(`Job ${b.job_id}`);
      return { id: j.id, job_id: j.job_id, name: j.name, project_name: j.project, user: j.user, shape: j.shape, priority: j.priority, rank: 0, num_jobs: 1, status: j.status, schedule_state: 'ALIVE', reason: j.reason, cancel_asked: false, created_at: iso(j.created), submitted_at: iso(j.created + 20_000), end_at: null, total_duration: (now() - j.created) / 1000, job_duration: 3600, recovery_count: j.tasks[0].attempts.length - 1, text: `name: ${j.name}\n\nresources:\n  accelerators: A100:8\n  use_spot: true\n\nsetup: pip install -r requirements.txt\nrun: python train.py --resume\n${j.deadline ? `\ndeadline: {within: ${Math.round((j.deadline - j.created) / HOUR)}h, work: ${j.work}h, changeover: 12m}\n` : ''}`,
        tasks: j.tasks.map((t) => ({ task_id: t.task_id, name: t.name, resources: t.resources, status: t.status, schedule_state: 'ALIVE', pending_kind: null, reason: t.reason, last_failure: t.attempts.length > 1 ? t.attempts.at(-2).reason : null, submitted_at: t.attempts[0]?.from ?? null, start_at: t.attempts[0]?.from ?? null, end_at: null, last_recovered_at: null, next_retry_at: t.status === 'RECOVERING' ? iso(now() + 40_000) : null, total_duration: null, job_duration: 3000, recovery_count: Math.max(0, t.attempts.length - 1), restarts_on_errors: 0, placement: t.attempts.at(-1)?.placement ?? null, attempt: t.attempts.length, runs: t.attempts.map((a) => a.run), attempts: t.attempts, after: t.after })) };
    },
    'jobs/why': (p, b) => { const j = PROJECT['jobs/get'](p, b); return { sentence: j.status === 'RECOVERING' ? 'It looks for capacity again: its spot instance a100-spot-2 was taken back 4 minutes ago.' : j.status === 'PENDING' ? 'It waits for a launch slot: 8 of 8 are taken.' : `It is ${j.status.toLowerCase()}.`, reasons: j.status === 'RECOVERING' ? ['It avoids eu-west-1a until 15:00, because it was lost there.', 'It is 31 minutes behind its line: at 15:20 it goes to on-demand instances.'] : j.reason ? [j.reason] : [], jobs: [], cures: [], deployment: null, scaling: [], probes: [], next_look_at: iso(now() + 40_000), expected: null, hint: null, command: `windlass why ${b.job_id}` }; },
    'jobs/cancel': (p, b) => { for (const id of b.job_ids) { const j = world.managed.find((x) => x.job_id === id); if (!j) throw missing(`Job ${id}`); j.status = 'CANCELLED'; for (const t of j.tasks) t.status = 'CANCELLED'; for (const row of world.jobRows(j)) for (const l of world.listeners) l('change', { seq: world.seq, as_of: world.asOf(), kind: 'managed-job', id: row.id, project: p, name: j.name, from: null, to: 'CANCELLED', reason: 'cancelled', message: null, row }); } return { job_ids: b.job_ids }; },
    'jobs/launch': () => ({ jobs: [{ id: world.uuid(), job_id: 141, name: 'pretrain-7b' }], warnings: [] }),
    'jobs/savings': (p, b) => {
      const j = world.managed.find((x) => x.job_id === b.job_id);
      if (!j) throw missing(`Job ${b.job_id}`);
      const spent = j.tasks.flatMap((t) => t.attempts).reduce((s, a) => s + a.cost, 0);
      const end = Math.min(now(), j.deadline ?? now());
      const progress = [];
      let done = 0;
      for (let t = j.created, n = 0; t <= end; t += (end - j.created) / 80, n++) { progress.push([iso(t), done]); if (n % 17 > 2) done += ((end - j.created) / 80 / 1000) * 0.94; }
      return { spent, on_demand: spent * 2.63, saved: spent * 1.63, changeovers: j.tasks[0].attempts.length - 1, deadline: j.deadline ? { from: iso(j.created), to: iso(j.deadline), work_seconds: j.work * 3600 } : null, progress, decisions: j.tasks[0].attempts.map((a) => ({ at: a.from, market: a.market, message: a.market === 'spot' ? 'rule 2: spot capacity is there' : 'rule 1: below the line, on-demand nodes' })) };
    },
    'instances/why': (p, b) => { const i = world.instances.find((x) => x.id === b.id); if (!i) throw missing('The instance'); const busy = i.slots.filter(Boolean).length; return { sentence: i.unreachableSince ? `${i.name} does not answer since 13:57: its agent was last heard 11 minutes ago.` : i.draining ? 'It takes no new jobs: grace asked for it to be drained at 13:20.' : busy ? `It is kept: ${busy} of its ${i.blocks} blocks are in use.` : 'It is idle and kept: the fleet has SSH hosts, which stay.', reasons: i.unreachableSince ? ['Jobs on it ended with `instance_unreachable` after 10 minutes and go on elsewhere.'] : i.health !== 'healthy' ? [i.message] : [], jobs: [], cures: i.unreachableSince ? [{ message: 'check its network and agent', patch: null, fits: 0, starts_now: false }] : [], deployment: null, scaling: [], probes: [], next_look_at: i.unreachableSince ? iso(now() + 9000) : null, expected: null, hint: i.unreachableSince ? `ssh ${i.name} systemctl status windlass-agent` : null, command: `windlass instance why ${i.name}` }; },
    'instances/history': (p, b) => { const i = world.instances.find((x) => x.id === b.id); const past = [...world.runs.values()].filter((r) => r.row.instance === i?.name && r.row.finished_at).slice(-20).reverse().map((r) => ({ run: r.row.name, run_id: r.id, job: `${r.row.name}-0-0`, user: r.row.user, from: r.row.started_at, to: r.row.finished_at, status: r.row.status, reason: r.row.reason })); const here = (i?.slots ?? []).filter(Boolean).map((s) => s.run).filter((r, n, l) => l.indexOf(r) === n).map((r) => ({ run: r.row.name, run_id: r.id, job: `${r.row.name}-0-0`, user: r.row.user, from: r.row.started_at ?? r.row.submitted_at, to: null, status: r.row.status, reason: null })); return { jobs: [...here, ...past] }; },
    'instances/get_instance_health_checks': (p, b) => ({ health_checks: Array.from({ length: 90 }, (_, n) => { const bad = b.fleet_name === 'h100' && b.instance_num === 2 && n < 7; return { collected_at: iso(now() - n * 60_000), status: bad ? 'warning' : 'healthy', events: bad ? [{ timestamp: iso(now() - n * 60_000), status: 'warning', message: `GPU 5: ${14 - n} correctable ECC errors in 1 h` }] : [] }; }) }),
    'fleets/get': (p, b) => { const f = POST['/api/fleets/list']().find((x) => x.project_name === p && x.name === b.name); if (!f) throw missing(`Fleet ${b.name}`); return f; },
    'fleets/delete': () => null,
    'fleets/delete_instances': () => null,
    'volumes/delete': () => null,
    'gateways/list': (p) => (p === 'platform' && !empty ? [{ id: 'gw-1', name: 'entry', project_name: 'platform', configuration: { type: 'gateway', name: 'entry', domain: 'svc.example.org', certificate: { type: 'lets-encrypt' } }, created_at: iso(now() - 80 * 24 * HOUR), status: 'running', status_message: null, default: true, hostname: 'gw.example.org', ip_address: '192.0.2.10', instance_id: null, wildcard_domain: '*.svc.example.org', backend: 'remote', region: 'here', replicas: [0, 1].map((n) => ({ replica_num: n, hostname: `gw-${n}.example.org`, backend: 'remote', region: 'here', status: 'running', status_message: null, created_at: iso(now() - 80 * 24 * HOUR) })) }] : []),
    'logs/marks': (p, b) => { const log = logOf(p, b); const size = log.size(now()); const n = Math.min(400, Math.max(2, log.lines(now()))); const marks = Array.from({ length: n }, (_, k) => { const offset = Math.floor((size * k) / n); return [offset, iso(log.timeAt(offset, now()))]; }); return { size, first: 0, marks, events: [{ at: iso(log.startedAt), offset: 0, message: 'job started' }] }; },
    'costs/list': (p, b) => {
      const since = b.since ? Date.parse(b.since) : now() - 14 * 24 * HOUR;
      const until = b.until ? Date.parse(b.until) : now();
      const items = new Map();
      const stepMs = b.every === 'hour' ? HOUR : 24 * HOUR;
      const first = Math.floor(since / stepMs) * stepMs;
      const steps = Math.max(1, Math.ceil((until - first) / stepMs));
      let spot = 0, demand = 0;
      for (const r of rowsOfRuns()) {
        if (r.project !== p || !r.started_at) continue;
        const at = Date.parse(r.finished_at ?? iso(now()));
        if (at < since || at > until) continue;
        const name = b.by === 'user' ? r.user : b.by === 'fleet' ? r.fleet : r.name;
        const item = items.get(name) ?? { id: r.id, name, ...(b.by === 'run' ? { user: r.user } : {}), count: 0, hours: 0, cost: 0, costs: Array(steps).fill(0) };
        item.count++; item.hours += (at - Date.parse(r.started_at)) / HOUR; item.cost += r.cost; item.costs[Math.floor((at - first) / stepMs)] += r.cost;
        if (r.fleet === 'a100-spot') spot += r.cost; else demand += r.cost;
        items.set(name, item);
      }
      const all = [...items.values()].sort((a, c) => c.cost - a.cost);
      const rest = Array(steps).fill(0);
      for (const item of all.slice(6)) item.costs.forEach((c, n) => (rest[n] += c));
      return { since: iso(since), until: iso(until), items: all.slice(0, b.limit ?? 100).map(({ costs: _, ...i }) => i), total: all.reduce((t, i) => ({ count: t.count + i.count, hours: t.hours + i.hours, cost: t.cost + i.cost }), { count: 0, hours: 0, cost: 0 }), series: { times: Array.from({ length: steps }, (_, n) => iso(first + n * stepMs)), items: [...all.slice(0, 6).map((i) => ({ name: i.name, costs: i.costs })), ...(all.length > 6 ? [{ name: 'others', costs: rest }] : [])] }, markets: { spot, on_demand: demand, spot_at_on_demand: spot * 2.8 } };
    },
    'configurations/check': (p, b) => ({ problems: readText(b.text).problems }),
    'configurations/plan': (p, b) => plan(p, b.text),
    'templates/list': () => [
      { type: 'template', name: 'hello', title: 'Hello', description: 'The smallest task: one command, any instance.', text: 'type: task\nname: hello\ncommands:\n  - echo "hello from windlass"\nresources:\n  cpu: 1..\n  memory: 0..\n' },
      { type: 'template', name: 'train', title: 'Training with GPUs', description: 'Eight GPUs of one instance, tried again after interruptions.', text: 'type: task\nname: train\nimage: pytorch/pytorch:2.9.0-cuda12.8\ncommands:\n  - torchrun --nproc-per-node=8 train.py --resume\nretry:\n  on_events: [no-capacity, interruption]\n  duration: 6h\nresources:\n  cpu: 96..\n  memory: 512GB..\n  gpu:\n    name: H100\n    count: 8\n' },
      { type: 'template', name: 'service', title: 'A service', description: 'A web server with one to four replicas, by the requests they get.', text: 'type: service\nname: files\nimage: python:3.13-slim\nport: 8000\ncommands:\n  - python -m http.server 8000\nreplicas: 1..4\nscaling:\n  metric: rps\n  target: 10\nresources:\n  cpu: 1..\n  memory: 1GB..\n' },
      { type: 'template', name: 'dev', title: 'Development environment', description: 'An instance to work on from an editor.', text: 'type: dev-environment\nname: desk\npython: "3.12"\nide: vscode\ninactivity_duration: 2h\nresources:\n  cpu: 8..\n  memory: 32GB..\n' },
    ],
    'quotas/list': () => ({ quotas }),
    'quotas/set': (p, b) => { replace(quotas, { used: 0, ...b }); return { quotas }; },
    'quotas/delete': (p, b) => { drop(quotas, b); return { quotas }; },
    'budgets/list': () => ({ budgets }),
    'budgets/set': (p, b) => { replace(budgets, { spent: 0, state: 'within', ends_at: iso(now() + 24 * HOUR), ...b }); return { budgets }; },
    'budgets/delete': (p, b) => { drop(budgets, b); return { budgets }; },
    'exports/list': () => ({ exports }),
    'exports/create': (p, b) => { const one = { id: world.uuid(), name: b.name, is_global: b.is_global, imports: b.importer_projects.map((project_name) => ({ project_name })), exported_fleets: b.exported_fleets.map((name) => ({ id: name, name })), exported_gateways: b.exported_gateways.map((name) => ({ id: name, name })) }; exports.push(one); return one; },
    'exports/update': (p, b) => { const one = exports.find((found) => found.name === b.name); one.exported_fleets = one.exported_fleets.filter((fleet) => !b.remove_exported_fleets.includes(fleet.name)).concat(b.add_exported_fleets.map((name) => ({ id: name, name }))); one.imports = one.imports.filter((project) => !b.remove_importer_projects.includes(project.project_name)).concat(b.add_importer_projects.map((project_name) => ({ project_name }))); one.is_global = (one.is_global || b.set_global) && !b.unset_global; return one; },
    'exports/delete': (p, b) => { exports.splice(exports.findIndex((one) => one.name === b.name), 1); return null; },
    'imports/list': () => ({ imports }),
    'imports/delete': (p, b) => { imports.splice(imports.findIndex((one) => one.export.name === b.export_name), 1); return null; },
    'secrets/list': (p) => (secrets[p] ?? []).map((name, n) => ({ id: `sec-${n}`, name, value: null })),
    'secrets/get': (p, b) => ({ id: 'x', name: b.name, value: 'correct-horse-battery' }),
    'secrets/create_or_update': (p, b) => { if (!secrets[p].includes(b.name)) secrets[p].push(b.name); return { id: 'x', name: b.name, value: null }; },
    'secrets/delete': (p, b) => { secrets[p] = secrets[p].filter((n) => !b.secrets_names.includes(n)); return null; },
    'repos/list': () => [{ repo_id: 'research-train', repo_info: { repo_type: 'remote', repo_name: 'research/train' } }],
  };

  // ------------------------------------------------------------------ streams
  function sse(req, res) {
    res.writeHead(200, { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-store', ...SECURITY });
    const beat = setInterval(() => res.write(': alive\n\n'), 5000);
    const stop = [() => clearInterval(beat)];
    open.add(res);
    const name = new URL(req.url, 'http://x').pathname.replace(/.*\/logs\//, 'logs/');
    streams.set(name, (streams.get(name) ?? 0) + 1);
    req.on('close', () => { open.delete(res); streams.set(name, streams.get(name) - 1); for (const f of stop) f(); });
    return { send: (event, data, id) => res.write(`${id !== undefined ? `id: ${id}\n` : ''}event: ${event}\ndata: ${JSON.stringify(data)}\n\n`), onClose: (f) => stop.push(f) };
  }
  function changes(req, res) {
    if (drops.feed) throw new Refusal(503, 'The server is starting');
    const { send, onClose } = sse(req, res);
    send('hello', { seq: world.seq, server_version: '0.4.0-dev', ui_version: uiVersion(), now: iso(now()) });
    const since = Number(req.headers['last-event-id'] ?? new URL(req.url, 'http://x').searchParams.get('since') ?? NaN);
    const listener = (event, data) => send(event, data.row ? { ...data, row: slim(data.row) } : data, data.seq);
    if (Number.isFinite(since)) {
      if (told.length && told[0][1].seq > since + 1 && told.length > 5000) send('resync', {});
      else for (const [event, data] of told) if (data.seq >= since) listener(event, data);
    }
    world.listeners.add(listener);
    let last = '';
    const counts = setInterval(() => { const s = summary(false); const text = JSON.stringify(s.runs) + s.queue.length; if (text !== last) { last = text; send('counts', s); } }, 1000);
    onClose(() => { world.listeners.delete(listener); clearInterval(counts); });
  }
  function streamLog(req, res, p, q) {
    const log = logOf(p, q);
    const s = subOf(p, q);
    const { send, onClose } = sse(req, res);
    let offset = Number(req.headers['last-event-id'] ?? q.offset ?? 0);
    const follow = q.follow === 'true';
    let stopped = false;
    onClose(() => (stopped = true));
    const pump = () => {
      if (stopped) return;
      const size = log.size(now());
      while (offset < size) {
        const bytes = log.read(offset, 32 * 1024, now());
        if (!bytes.length) break;
        const at = offset;
        offset += bytes.length;
        if (!res.write(`id: ${offset}\nevent: log\ndata: ${JSON.stringify({ type: 'log', offset: at, timestamp: iso(log.timeAt(at, now())), message: bytes.toString('base64') })}\n\n`)) return res.once('drain', pump);
      }
      const ended = log.endedAt !== null && now() >= log.endedAt;
      if (ended || !follow) { send('end', { type: 'end', offset, status: ended ? (s?.status ?? 'done') : 'running', exit_status: s?.exit ?? 0, termination_reason: s?.reason ?? null }, offset); return res.end(); }
      setTimeout(pump, 200);
    };
    pump();
  }
  function searchLog(req, res, p, q) {
    const log = logOf(p, q);
    let pattern;
    try {
      pattern = new RegExp(q.regex === 'true' ? q.q : q.q.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'), q.ignore_case === 'true' ? 'gi' : 'g');
    } catch {
      throw new Refusal(400, 'The expression cannot be read: an opening bracket is not closed');
    }
    const { send, onClose } = sse(req, res);
    let stopped = false;
    onClose(() => (stopped = true));
    const limit = Number(q.limit ?? 1000), context = Math.min(5, Number(q.context ?? 0));
    const size = log.size(now());
    let at = Number(q.from ?? 0), hits = 0, rest = Buffer.alloc(0), history = [], waiting = [];
    const CH = 1 << 20;
    const work = () => {
      if (stopped) return;
      const t0 = Date.now();
      while (Date.now() - t0 < 30 && at < size && hits < limit) {
        const base = at - rest.length;
        const chunk = Buffer.concat([rest, log.read(at, CH, now())]);
        at = Math.min(size, at + CH);
        const lastNl = at >= size ? chunk.length : chunk.lastIndexOf(10) + 1;
        const text = chunk.subarray(0, lastNl).toString('latin1');
        rest = chunk.subarray(lastNl);
        if (context === 0) {
          pattern.lastIndex = 0;
          for (let m; hits < limit && (m = pattern.exec(text)); ) { if (!m[0].length) { pattern.lastIndex++; continue; } const ls = text.lastIndexOf('\n', m.index) + 1; const le = text.indexOf('\n', m.index); send('hit', hit(base, ls, le < 0 ? text.length : le, m, text)); hits++; }
        } else {
          let pos = 0;
          for (const line of text.split('\n')) {
            pattern.lastIndex = 0;
            for (const w of waiting) if (w.after.length < context) w.after.push(line.slice(0, 512));
            waiting = waiting.filter((w) => { if (w.after.length < context) return true; send('hit', w); return false; });
            const m = pattern.exec(line);
            if (m && m[0].length && hits < limit) { hits++; waiting.push({ offset: base + pos + m.index, length: m[0].length, line: base + pos, timestamp: iso(log.timeAt(base + pos, now())), text: line.slice(0, 512), before: [...history], after: [] }); }
            history.push(line.slice(0, 512));
            if (history.length > context) history.shift();
            pos += line.length + 1;
          }
        }
        send('progress', { scanned: at, size });
      }
      if (at >= size || hits >= limit) { for (const w of waiting) send('hit', w); send('end', { hits, more: at < size }); res.end(); } else setImmediate(work);
    };
    const hit = (base, ls, le, m, text) => ({ offset: base + m.index, length: m[0].length, line: base + ls, timestamp: iso(log.timeAt(base + ls, now())), text: text.slice(ls, Math.min(le, ls + 512)), before: [], after: [] });
    work();
  }

  // ------------------------------------------------------------------ http
  function send(res, status, data, headers = {}) {
    const body = data === undefined ? '' : JSON.stringify(data);
    res.writeHead(status, { 'Content-Type': 'application/json', 'Cache-Control': 'no-store', ...SECURITY, ...headers });
    res.end(body);
  }
  function asset(req, res, path) {
    const name = path.startsWith('/ui/assets/') || path === '/ui/licenses.txt' ? path.slice(4) : 'index.html';
    const file = join(DIST, normalize(name));
    if (!file.startsWith(DIST) || !existsSync(file)) { res.writeHead(404, SECURITY); return res.end('not found'); }
    const bytes = readFileSync(file);
    const headers = { 'Content-Type': TYPES[extname(file)] ?? 'application/octet-stream', 'Cache-Control': name === 'index.html' ? 'no-cache' : 'public, max-age=31536000, immutable', Vary: 'Accept-Encoding', ...SECURITY };
    if (/\bgzip\b/.test(req.headers['accept-encoding'] ?? '') && existsSync(`${file}.gz`)) { res.writeHead(200, { ...headers, 'Content-Encoding': 'gzip' }); return res.end(readFileSync(`${file}.gz`)); }
    res.writeHead(200, headers);
    res.end(bytes);
  }
  const server = createServer(async (req, res) => {
    const url = new URL(req.url, 'http://x');
    const path = url.pathname;
    try {
      if (path === '/' ) { res.writeHead(302, { Location: '/ui/' }); return res.end(); }
      if (path === '/ui' || path.startsWith('/ui/')) return asset(req, res, path);
      if (path === '/dev/drop-feed') { drops.feed = true; for (const r of open) r.destroy(); return send(res, 200, null); }
      if (path === '/dev/restore-feed') { drops.feed = false; return send(res, 200, null); }
      const q = Object.fromEntries(url.searchParams);
      let body = {};
      if (req.method === 'POST') {
        const parts = [];
        for await (const part of req) parts.push(part);
        body = parts.length ? JSON.parse(Buffer.concat(parts).toString() || '{}') : {};
      }
      const download = path.endsWith('/logs/raw') && q.download === '1';
      if (req.headers['x-windlass-ui'] !== '1' && !download) throw new Refusal(403, 'The header X-Windlass-UI is missing');
      if (req.method === 'POST' && req.headers['content-type'] !== 'application/json') throw new Refusal(415, 'The body must be application/json');
      if (path === '/api/session/open') {
        if (body.token !== TOKEN && body.code !== TOKEN) throw new Refusal(401, 'The token is not known. Tokens are shown once, by `windlass user create` or `refresh-token`.', 'invalid_credentials');
        return send(res, 200, sessionAnswer(openSession(res)));
      }
      if (path === '/api/session/methods') return send(res, 200, { oidc: { name: 'Example' } });
      // The provider of the made-up world sends the browser back at once.
      if (path === '/api/session/oidc/start') return send(res, 200, { url: `${req.headers.origin}/ui/login?code=dev&state=dev` });
      if (path === '/api/session/oidc/finish') {
        if (body.code !== 'dev' || body.state !== 'dev') throw new Refusal(401, 'This login was not begun in this browser, or more than 10 minutes ago; try again', 'invalid_credentials');
        return send(res, 200, sessionAnswer(openSession(res)));
      }
      const id = /__Host-windlass-session=(\w+)/.exec(req.headers.cookie ?? '')?.[1];
      req.sessionId = id;
      req.session = sessions.get(id) ?? (loggedIn ? { user: world.users[0], opened: now() } : null);
      if (!req.session) throw new Refusal(401, 'No session', 'invalid_credentials');
      if (path === '/api/changes/stream') return changes(req, res);
      if (path === '/api/metrics/stream') { const { send: tell, onClose } = sse(req, res); tell('sample', blockSample()); const t = setInterval(() => tell('sample', blockSample()), 5000); return onClose(() => clearInterval(t)); }
      if (POST[path]) return send(res, 200, POST[path](body, req, res));
      const admin = /^\/api\/projects\/([^/]+)\/(get|set_members|add_members)$/.exec(path);
      if (admin) { const p = decodeURIComponent(admin[1]); if (!world.projectId(p)) throw missing(`Project ${p}`); return send(res, 200, bigProject(p)); }
      const m = /^\/api\/project\/([^/]+)\/(.+)$/.exec(path);
      if (m) {
        const p = decodeURIComponent(m[1]);
        if (!world.projectId(p)) throw new Refusal(403, `You are no member of project ${p}. Ask one of its managers: grace, linus.`);
        if (m[2] === 'logs/stream') return streamLog(req, res, p, q);
        if (m[2] === 'logs/search') return searchLog(req, res, p, q);
        if (m[2] === 'logs/raw') {
          const log = logOf(p, q);
          const size = log.size(now());
          const offset = Number(q.offset ?? 0), limit = Math.min(Number(q.limit ?? size), download ? Infinity : 8 << 20);
          res.writeHead(200, { 'Content-Type': 'application/octet-stream', 'X-Log-Size': String(size), 'X-Log-First': '0', 'Cache-Control': 'no-store', ...SECURITY, ...(download ? { 'Content-Disposition': `attachment; filename="${q.run_name}.log"` } : {}) });
          if (!download) return res.end(log.read(offset, limit, now()));
          let at = 0;
          const more = () => { while (at < size) { const part = log.read(at, 1 << 20, now()); at += part.length; if (!res.write(part)) return res.once('drain', more); } res.end(); };
          return more();
        }
        if (PROJECT[m[2]]) return send(res, 200, PROJECT[m[2]](p, body, req));
      }
      throw new Refusal(404, `Nothing is at ${path}`);
    } catch (error) {
      if (!(error instanceof Refusal)) console.error(path, error);
      const status = error instanceof Refusal ? error.status : 500;
      if (res.headersSent) return res.end();
      send(res, status, { detail: status === 400 ? [{ code: error.code ?? 'error', msg: error.message }] : { code: error.code ?? null, msg: error.message } }, status === 503 ? { 'Retry-After': '1' } : {});
    }
  });

  // ------------------------------------------------------------------ terminal: a made-up shell over a WebSocket
  server.on('upgrade', (req, socket) => {
    const own = req.headers.origin === `http://${req.headers.host}`;
    if (!own || !/\/runs\/terminal/.test(req.url) || req.headers['sec-websocket-protocol'] !== 'windlass.terminal.v1') return socket.destroy();
    const accept = createHash('sha1').update(`${req.headers['sec-websocket-key']}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest('base64');
    socket.write(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\nSec-WebSocket-Protocol: windlass.terminal.v1\r\n\r\n`);
    const frame = (bytes, op = 2) => { const b = Buffer.from(bytes); socket.write(Buffer.concat([b.length < 126 ? Buffer.from([0x80 | op, b.length]) : Buffer.from([0x80 | op, 126, b.length >> 8, b.length & 255]), b])); };
    const prompt = () => frame('\x1b[1;32mroot@train\x1b[0m:\x1b[1;34m/app\x1b[0m# ');
    frame('\x1b[2m== windlass: shell of job 0 on h100-02, opened by ada\x1b[0m\r\n');
    prompt();
    let line = '', buffer = Buffer.alloc(0);
    const answers = { 'nvidia-smi -L': 'GPU 0: NVIDIA H100 80GB HBM3\r\nGPU 1: NVIDIA H100 80GB HBM3', ls: '\x1b[34mckpt\x1b[0m  \x1b[34mdata\x1b[0m  requirements.txt  train.py', pwd: '/app', whoami: 'root' };
    socket.on('error', () => {});
    socket.on('data', (data) => {
      buffer = Buffer.concat([buffer, data]);
      while (buffer.length >= 6) {
        let length = buffer[1] & 127, at = 2;
        if (length === 126) { length = buffer.readUInt16BE(2); at = 4; }
        if (buffer.length < at + 4 + length) return;
        const mask = buffer.subarray(at, at + 4);
        const payload = Buffer.from(buffer.subarray(at + 4, at + 4 + length).map((b, i) => b ^ mask[i & 3]));
        const op = buffer[0] & 15;
        buffer = buffer.subarray(at + 4 + length);
        if (op === 8) return socket.end();
        if (op !== 2) continue;
        for (const c of payload.toString()) {
          if (c === '\r') { frame('\r\n'); if (line === 'exit') { frame(JSON.stringify({ type: 'exit', status: 0 }), 1); return socket.end(); } if (line) frame(`${answers[line] ?? `${line.split(' ')[0]}: command not found`}\r\n`); line = ''; prompt(); }
          else if (c === '\x7f') { if (line) { line = line.slice(0, -1); frame('\b \b'); } }
          else { line += c; frame(c); }
        }
      }
    });
  });
  return new Promise((done) => server.listen(port, host, () => done({ server, world, streams, url: `http://${host}:${server.address().port}/ui/`, close: () => { world.close(); for (const r of open) r.destroy(); server.closeAllConnections(); server.close(); } })));
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const flag = (name) => process.argv.includes(`--${name}`);
  const value = (name, fallback) => (process.argv.includes(`--${name}`) ? Number(process.argv[process.argv.indexOf(`--${name}`) + 1]) : fallback);
  void statSync(DIST);
  const { url } = await startServer({ port: value('port', 8087), frozen: flag('frozen'), runs: value('runs', 10_000), empty: flag('empty'), loggedIn: flag('logged-in') });
  console.log(`${url} (token: ${TOKEN})`);
}
