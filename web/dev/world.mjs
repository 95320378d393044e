// A made-up world that lives: fleets, a queue, runs that start, wait, fail and end.
import { Log } from './logs.mjs';

const HOUR = 3_600_000;
const MINUTE = 60_000;

export function makeWorld({ seed = 7, runs: wantedRuns = 10_000, frozen = false, empty = false } = {}) {
  let state = seed >>> 0;
  const random = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const pick = (list) => list[Math.floor(random() * list.length)];
  const between = (a, b) => a + random() * (b - a);
  const int = (a, b) => Math.floor(between(a, b + 1));
  const hex = (n) => Array.from({ length: n }, () => Math.floor(random() * 16).toString(16)).join('');
  const uuid = () => `${hex(8)}-${hex(4)}-4${hex(3)}-a${hex(3)}-${hex(12)}`;

  const START = frozen ? Date.parse('2026-11-17T14:08:52Z') : Date.now();
  const now = () => (frozen ? START : Date.now());
  const iso = (ms) => (ms === null || ms === undefined ? null : new Date(ms).toISOString());

  let seq = 40_000;
  const listeners = new Set();
  const events = [];

  const users = ['ada', 'grace', 'linus', 'margaret', 'edsger', 'barbara', 'ken'].map((username, i) => ({
    id: uuid(), username, created_at: iso(START - (400 - i * 30) * 24 * HOUR), global_role: i === 0 ? 'admin' : 'user',
    email: `${username}@example.org`, active: username !== 'ken', permissions: { can_create_projects: true },
  }));
  const projects = ['research', 'platform', 'sandbox'].map((name) => ({ id: uuid(), name }));
  const projectId = (name) => projects.find((p) => p.name === name)?.id ?? null;

  // ---------------------------------------------------------------- fleets and instances
  const fleets = [];
  const instances = [];
  const GIB = 1024;
  function fleet(project, name, { count, backend, region, gpu, gpus, gpuMemory, cpus, memory, blocks, price, market, max }) {
    const f = {
      id: uuid(), project, name, backend, market,
      created_at: START - int(20, 90) * 24 * HOUR, status: 'active',
      spec: {
        configuration: {
          type: 'fleet', name, ...(backend === 'ssh' ? { ssh_config: { hosts: count } } : { nodes: { min: 0, max: max ?? count } }),
          placement: gpus >= 8 ? 'cluster' : 'any', blocks: blocks,
          ...(backend === 'aws' ? { backends: ['aws'], spot_policy: market === 'spot' ? 'spot' : 'auto', idle_duration: '30m' } : {}),
          resources: { cpu: `${cpus}..`, memory: `${memory}GB..`, ...(gpu ? { gpu: `${gpu}:${gpuMemory}GB:${gpus}` } : {}) },
        },
      },
    };
    fleets.push(f);
    for (let i = 0; i < count; i++) {
      instances.push({
        id: uuid(), project, fleet: name, num: i, name: backend === 'ssh' ? `${name}-${String(i + 1).padStart(2, '0')}` : `${name}-${i}`,
        backend, region, gpu: gpu ?? null, gpuMemory: gpuMemory ?? 0, gpus: gpus ?? 0, cpus, memory: memory * GIB, blocks, price, market,
        status: 'idle', message: null, health: 'healthy', unreachableSince: null, draining: false,
        slots: Array(blocks).fill(null), created: START - int(2, 40) * 24 * HOUR, used: { cpu: 0.02, memory: 0.06, gpu: gpu ? 0 : null },
        history: [],
      });
    }
  }
  if (!empty) {
    fleet('research', 'h100', { count: 12, backend: 'ssh', region: 'hall-2', gpu: 'H100', gpus: 8, gpuMemory: 80, cpus: 192, memory: 2048, blocks: 8, price: 18.4, market: 'on-demand' });
    fleet('research', 'a100-spot', { count: 6, backend: 'aws', region: 'eu-west-1', gpu: 'A100', gpus: 8, gpuMemory: 40, cpus: 96, memory: 1152, blocks: 8, price: 9.7, market: 'spot', max: 8 });
    fleet('platform', 'cpu-pool', { count: 10, backend: 'ssh', region: 'hall-1', cpus: 64, memory: 256, blocks: 8, price: 1.9, market: 'on-demand' });
    fleet('platform', 'l4', { count: 5, backend: 'ssh', region: 'hall-1', gpu: 'L4', gpus: 4, gpuMemory: 24, cpus: 48, memory: 192, blocks: 4, price: 3.1, market: 'on-demand' });
  }
  fleet('sandbox', 'local', { count: 1, backend: 'local', region: 'local', cpus: 16, memory: 64, blocks: 4, price: 0, market: 'on-demand' });

  const byName = (name) => instances.find((i) => i.name === name);
  if (!empty) {
    Object.assign(byName('h100-07'), { unreachableSince: START - 11 * MINUTE, message: 'agent does not answer: connection timed out' });
    Object.assign(byName('h100-03'), { health: 'warning', message: 'GPU 5: 14 correctable ECC errors in 1 h' });
    Object.assign(byName('l4-04'), { draining: true, message: 'draining: asked by grace, 1 job left' });
    Object.assign(byName('cpu-pool-09'), { health: 'failure', message: 'disk /var/lib: 97 % full' });
    Object.assign(byName('a100-spot-5'), { status: 'provisioning', message: 'instance exists, its agent does not answer yet', created: START - 70_000 });
  }

  const instanceRow = (i) => ({
    id: i.id, project: i.project, name: i.name, fleet: i.fleet, instance_num: i.num, backend: i.backend, region: i.region,
    status: i.status, message: i.message, health: i.health, unreachable_since: iso(i.unreachableSince), draining: i.draining,
    resources: words({ cpus: i.cpus, memory: i.memory / GIB, gpu: i.gpu, gpus: i.gpus, gpuMemory: i.gpuMemory }), gpu: i.gpu, gpus: i.gpus, cpus: i.cpus, memory_mib: i.memory,
    blocks_total: i.blocks, blocks_busy: i.slots.filter(Boolean).length, market: i.market, price: i.price,
    jobs: jobsOn(i), used: i.used, created_at: iso(i.created), finished_at: null,
  });
  function jobsOn(i) {
    const seen = new Map();
    for (const slot of i.slots) {
      if (!slot) continue;
      const entry = seen.get(slot.run.row.id) ?? { run: slot.run.row.name, project: slot.run.row.project, run_id: slot.run.row.id, job: `${slot.run.row.name}-${slot.rank}-0`, blocks: 0 };
      entry.blocks++;
      seen.set(slot.run.row.id, entry);
    }
    return [...seen.values()];
  }

  function words({ cpus, memory, gpu, gpus, gpuMemory, nodes = 1 }) {
    const parts = [];
    if (gpus) parts.push(`${gpus} × ${gpu ?? 'GPU'}${gpuMemory ? ` ${gpuMemory} GB` : ''}`);
    parts.push(`${cpus} CPU`, `${memory >= 1024 ? `${memory / 1024} TB` : `${memory} GB`}`);
    return `${nodes > 1 ? `${nodes} × (` : ''}${parts.join(', ')}${nodes > 1 ? ')' : ''}`;
  }

  // ---------------------------------------------------------------- placement
  /** Blocks of an instance that a wish takes; 0 when it can never fit. */
  function blocksFor(wants, i) {
    if (wants.gpus) return Math.max(wants.gpus, Math.ceil(wants.cpus / (i.cpus / i.blocks)), 1);
    return Math.max(1, Math.ceil(wants.cpus / (i.cpus / i.blocks)), Math.ceil(wants.memory / (i.memory / GIB / i.blocks)));
  }

  function shortfalls(wants, i) {
    const list = [];
    const add = (kind, message, cure, passes, patch = null) => list.push({ kind, message, cure, passes, patch });
    if (wants.gpus && !i.gpus) add('gpu_count', `needs at least ${wants.gpus} GPU${wants.gpus > 1 ? 's' : ''}, has 0`, 'use a fleet or backend with GPUs, or set `gpu: 0`', false);
    else if (wants.gpus > i.gpus) add('gpu_count', `needs at least ${wants.gpus} GPUs, has ${i.gpus}`, `lower the GPU count to ${i.gpus}`, false, { 'resources.gpu.count': i.gpus });
    if (wants.gpu && i.gpu && wants.gpu !== i.gpu) add('gpu_name', `needs GPU ${wants.gpu}, has ${i.gpu}`, `add \`${i.gpu}\` to the GPU names`, false, { 'resources.gpu.name': i.gpu });
    if (wants.gpuMemory && i.gpu && wants.gpuMemory > i.gpuMemory) add('gpu_memory', `needs at least ${wants.gpuMemory}GB of memory per GPU, has ${i.gpuMemory}GB`, `lower GPU memory to ${i.gpuMemory}GB`, false, { 'resources.gpu.memory': `${i.gpuMemory}GB` });
    if (wants.cpus > i.cpus) add('cpus', `needs at least ${wants.cpus} CPUs, has ${i.cpus}`, `lower cpu to ${i.cpus}`, false, { 'resources.cpu': i.cpus });
    if (wants.memory > i.memory / GIB) add('memory', `needs at least ${wants.memory}GB of memory, has ${i.memory / GIB}GB`, `lower memory to ${i.memory / GIB}GB`, false, { 'resources.memory': `${i.memory / GIB}GB` });
    if (wants.market && wants.market !== 'auto' && i.market !== wants.market) add('spot', wants.market === 'spot' ? 'needs spot capacity, is on demand' : 'needs on-demand capacity, is spot', 'set `spot_policy: auto`', false, { spot_policy: 'auto' });
    if (wants.maxPrice && i.price > wants.maxPrice) add('price', `costs $${i.price} an hour, at most $${wants.maxPrice} are allowed`, `raise \`max_price\` to ${i.price}`, false, { max_price: i.price });
    if (wants.fleets && !wants.fleets.includes(i.fleet)) add('fleet_not_named', `\`fleets\` names ${wants.fleets.join(', ')}`, 'add the fleet to `fleets`', false, { fleets: i.fleet });
    if (i.unreachableSince) add('unreachable', 'its agent does not answer', 'check its network and agent', true);
    if (i.health === 'failure') add('unhealthy', 'fails its health checks', 'check its devices', true);
    if (i.draining) add('draining', 'takes no new jobs', 'wait for another instance', true);
    if (i.status === 'provisioning') add('not_ready', 'is being prepared', 'wait until it is ready', true);
    if (list.length === 0) {
      const need = blocksFor(wants, i);
      const free = i.slots.filter((slot) => !slot).length;
      if (need > i.blocks) add('cpus', `needs ${need} blocks, has ${i.blocks}`, 'ask for less', false);
      else if (need > free) add('busy', `needs ${need} of its ${i.blocks} blocks, ${free} are free`, 'wait until jobs on it end', true);
    }
    return list;
  }

  function look(wants, project) {
    const fits = [];
    const refused = new Map();
    for (const i of instances) {
      if (i.project !== project && !wants.anyProject) continue;
      const missing = shortfalls(wants, i);
      if (missing.length === 0) fits.push(i);
      else {
        const key = `${i.fleet}|${missing.map((s) => s.message).join('|')}`;
        const entry = refused.get(key) ?? { place: i.name, place_id: i.id, place_kind: 'instance', count: 0, shortfalls: missing, fleet: i.fleet };
        entry.count++;
        if (entry.count > 1) {
          const f = fleets.find((x) => x.name === i.fleet && x.project === i.project);
          Object.assign(entry, { place: `fleet ${i.fleet}`, place_id: f.id, place_kind: 'fleet' });
        }
        refused.set(key, entry);
      }
    }
    const score = (r) => r.shortfalls.length * 10 + (r.shortfalls.every((s) => s.passes) ? 0 : 5) - Math.min(r.count, 4);
    const all = [...refused.values()].sort((a, b) => score(a) - score(b)).map(({ fleet: _, ...r }) => r);
    // Offers outside the lists of a configuration have one shortfall of the same kind for each list.
    if (project === 'research' && wants.gpus) {
      all.splice(1, 0, { place: 'offers of aws', place_id: null, place_kind: 'offer', count: 14, shortfalls: [
        { kind: 'not_listed', message: 'is in region us-east-1; `regions` names eu-west-1', cure: 'add `us-east-1` to `regions`', passes: false, patch: { regions: ['eu-west-1', 'us-east-1'] } },
        { kind: 'not_listed', message: 'is of type p5.48xlarge; `instance_types` names p4d.24xlarge', cure: 'add `p5.48xlarge` to `instance_types`', passes: false, patch: { instance_types: ['p4d.24xlarge', 'p5.48xlarge'] } },
      ] });
    }
    return { fits, refusals: all.slice(0, 12), left_out: Math.max(0, all.length - 12) };
  }

  function curesFor(wants, project, refusals) {
    const cures = [];
    for (const r of refusals) {
      const patches = r.shortfalls.filter((s) => s.patch);
      if (!patches.length || r.shortfalls.some((s) => !s.patch && !s.passes)) continue;
      const patch = Object.assign({}, ...patches.map((s) => s.patch));
      const result = look(patched(wants, patch), project);
      const message = patches.map((s) => s.cure).join(', and ');
      if (!cures.some((c) => c.message === message)) cures.push({ message, patch, fits: result.fits.length || r.count, starts_now: result.fits.length > 0 });
    }
    if (refusals.some((r) => r.shortfalls.every((s) => s.passes))) {
      cures.push({ message: 'wait: some of these places become free by themselves', patch: null, fits: 0, starts_now: false });
    }
    return cures.sort((a, b) => Number(b.starts_now) - Number(a.starts_now)).slice(0, 4);
  }

  function patched(wants, patch) {
    const w = { ...wants };
    for (const [path, value] of Object.entries(patch ?? {})) {
      const number = Number.parseFloat(String(value));
      if (path === 'resources.gpu.count') w.gpus = number;
      else if (path === 'resources.gpu.name') w.gpu = value;
      else if (path === 'resources.gpu.memory') w.gpuMemory = number;
      else if (path === 'resources.cpu') w.cpus = number;
      else if (path === 'resources.memory') w.memory = number;
      else if (path === 'max_price') w.maxPrice = value === null ? null : number;
      else if (path === 'spot_policy') w.market = value;
      else if (path === 'fleets') w.fleets = value === null ? null : [...(w.fleets ?? []), value];
    }
    return w;
  }

  // ---------------------------------------------------------------- runs
  const runs = new Map();
  const queue = [];
  /** The runs that wait in one queue with a run: projects share no fleets here, so each has its own. */
  const queueOf = (run) => queue.filter((other) => other.row.project === run.row.project);
  const SHAPES = [
    { base: 'train-llama', project: 'research', type: 'task', wants: { gpu: 'H100', gpus: 8, cpus: 96, memory: 512, gpuMemory: 80 }, secs: [1800, 9000], nodes: 1 },
    { base: 'finetune', project: 'research', type: 'task', wants: { gpu: 'H100', gpus: 4, cpus: 48, memory: 256 }, secs: [600, 4000], nodes: 1 },
    { base: 'sweep', project: 'research', type: 'task', wants: { gpu: 'A100', gpus: 1, cpus: 8, memory: 64, market: 'spot' }, secs: [200, 1500], nodes: 1 },
    { base: 'eval-mmlu', project: 'research', type: 'task', wants: { gpu: 'H100', gpus: 2, cpus: 16, memory: 128 }, secs: [90, 600], nodes: 1 },
    { base: 'notebook', project: 'research', type: 'dev-environment', wants: { gpu: 'H100', gpus: 1, cpus: 8, memory: 64 }, secs: [3000, 12000], nodes: 1 },
    { base: 'tokenize', project: 'platform', type: 'task', wants: { gpu: null, gpus: 0, cpus: 16, memory: 48 }, secs: [60, 500], nodes: 1 },
    { base: 'nightly-index', project: 'platform', type: 'task', wants: { gpu: null, gpus: 0, cpus: 32, memory: 96 }, secs: [120, 900], nodes: 1 },
    { base: 'build-image', project: 'platform', type: 'task', wants: { gpu: null, gpus: 0, cpus: 8, memory: 16 }, secs: [40, 300], nodes: 1 },
    { base: 'hello', project: 'sandbox', type: 'task', wants: { gpu: null, gpus: 0, cpus: 1, memory: 1 }, secs: [5, 60], nodes: 1 },
  ];
  const FAILS = [
    ['container_exited_with_error', 'exit status 1: CUDA out of memory. Tried to allocate 2.50 GiB on GPU 3'],
    ['container_exited_with_error', 'exit status 3: dataset checksum does not match manifest.json'],
    ['max_duration_exceeded', 'ran longer than `max_duration: 4h`'],
    ['failed_to_start_due_to_no_capacity', 'no instance fits within `retry.duration: 1h`: needs 8 × H100, fleet h100 has at most 4 free'],
    ['instance_unreachable', 'h100-07 did not answer for 10 minutes'],
    ['interrupted_by_no_capacity', 'spot instance a100-spot-2 was taken back by aws'],
    ['creating_container_error', 'image registry.example.org/train:2.4 was not found'],
  ];

  function configText(shape, name, wants) {
    const lines = [`type: ${shape.type}`, `name: ${name}`, ''];
    if (shape.type === 'service') lines.push('image: vllm/vllm-openai:v0.11.0', 'port: 8000', 'commands:', '  - vllm serve $MODEL --tensor-parallel-size $DSTACK_GPUS_NUM', 'env:', '  - MODEL=mistral-small-24b', 'replicas: 2..6', 'scaling:', '  metric: rps', '  target: 12', 'probes:', '  - type: http', '    url: /health');
    else if (shape.type === 'dev-environment') lines.push('python: "3.12"', 'ide: vscode', 'inactivity_duration: 2h');
    else if (wants.gpus) lines.push('image: pytorch/pytorch:2.9.0-cuda12.8', 'commands:', '  - pip install -r requirements.txt', `  - torchrun --nproc-per-node=${wants.gpus} train.py --resume`, 'max_duration: 12h', 'retry:', '  on_events: [no-capacity, interruption]', '  duration: 6h');
    else lines.push('python: "3.12"', 'commands:', '  - uv sync', `  - python -m jobs.${shape.base.replaceAll('-', '_')}`);
    lines.push('', 'resources:', `  cpu: ${wants.cpus}..`, `  memory: ${wants.memory}GB..`);
    if (wants.gpus) lines.push('  gpu:', ...(wants.gpu ? [`    name: ${wants.gpu}`] : []), ...(wants.gpuMemory ? [`    memory: ${wants.gpuMemory}GB..`] : []), `    count: ${wants.gpus}`);
    if (wants.market) lines.push(`spot_policy: ${wants.market}`);
    return `${lines.join('\n')}\n`;
  }

  const HEAD = (image) => `\x1b[2m== windlass\x1b[0m container of image \x1b[36m${image}\x1b[0m\n\x1b[2m== windlass\x1b[0m repo research/train at 8c1f2e7, 3 files changed\n$ pip install -r requirements.txt\nCollecting torch==2.9.0 (from -r requirements.txt (line 1))\n  Downloading 12%\r  Downloading 57%\r  Downloading 100%\nSuccessfully installed \x1b[32mtorch-2.9.0 transformers-4.61 datasets-4.4\x1b[0m\n$ torchrun --nproc-per-node=8 train.py --resume\n\x1b[1mresuming from /ckpt/step-000120000\x1b[0m\n`;
  const TAIL = `\x1b[31mTraceback (most recent call last):\x1b[0m\n  File "/app/train.py", line 218, in <module>\n    trainer.fit(model)\n  File "/app/train.py", line 164, in fit\n    loss.backward()\n\x1b[1;31mtorch.OutOfMemoryError\x1b[0m: CUDA out of memory. Tried to allocate 2.50 GiB on GPU 3\n`;

  let serial = 1000;
  function makeRun(shape, { name, user, submitted, wants = shape.wants, replicas = 1 }) {
    const id = uuid();
    const run = {
      shape, wants, replicas, seed: int(1, 10_000), id,
      submissions: [],
      row: {
        id, project: shape.project, name, type: shape.type, user, status: 'submitted', message: null, reason: null, termination_reason: null,
        queue_position: null, fleet: null, instance: null, resources: words(wants), gpu: wants.gpu && wants.gpus ? wants.gpu : null, gpus: wants.gpus * replicas,
        ready: 0, wanted: replicas, attempts: 1, cost: 0, price: 0, submission_id: null, managed_job: null,
        submitted_at: iso(submitted), started_at: null, finished_at: null,
      },
      text: configText(shape, name, wants), marks: [], deployment: null, deployments: [], model: null,
      submitted, limit: shape.type === 'task' ? 12 * HOUR : null,
    };
    runs.set(id, run);
    return run;
  }
  function submission(run, { rank = 0, replica = 0, from, num = 0 }) {
    const s = { id: uuid(), num, rank, replica, phases: [{ phase: 'queue', from, to: null }], instance: null, status: 'submitted', reason: null, exit: null, log: null, submitted: from };
    run.submissions.push(s);
    if (replica === 0 && rank === 0) {
      run.row.submission_id = s.id;
      run.row.attempts = num + 1;
    }
    return s;
  }
  function phase(s, name, at, reason = null) {
    const last = s.phases.at(-1);
    if (last && last.to === null) {
      last.to = at;
      if (reason) last.reason = reason;
    }
    if (name) s.phases.push({ phase: name, from: at, to: null });
  }
  function newLog(run, s, startedAt, endedAt, fails) {
    s.log = new Log({
      seed: run.seed + s.num, startedAt, endedAt, linesPerSecond: run.shape.type === 'service' ? 2.5 : 1.7,
      head: run.wants.gpus ? HEAD('pytorch/pytorch:2.9.0-cuda12.8') : HEAD('python:3.12-slim').split('$ torchrun')[0], tail: fails ? TAIL : '\x1b[32mdone\x1b[0m\n',
    });
  }

  /** A run that is over, written down at once. */
  function pastRun(shape, submitted) {
    const failed = random() < 0.13;
    const stopped = !failed && random() < 0.07;
    const wants = shape.wants;
    const run = makeRun(shape, { name: `${shape.base}-${serial++}`, user: pick(users).username, submitted });
    const waited = between(0.5, 90) ** 1.2 * 1000;
    const machine = between(0.3, 4) * 1000;
    const image = between(1, 45) * 1000;
    const start = between(0.5, 6) * 1000;
    const ran = between(...shape.secs) * 1000 * (failed ? random() : 1);
    const s = submission(run, { from: submitted });
    let at = submitted + waited;
    const instance = pick(instances.filter((i) => i.project === shape.project && (!wants.gpu || i.gpu === wants.gpu))) ?? instances.at(-1);
    phase(s, 'machine', at);
    phase(s, 'image', (at += machine));
    phase(s, 'start', (at += image));
    phase(s, 'run', (at += start));
    const started = at;
    at = Math.min(at + ran, START - 1000);
    phase(s, 'stop', at);
    phase(s, null, at + between(0.4, 3) * 1000);
    const [word, why] = failed ? pick(FAILS) : stopped ? ['stopped_by_user', `stopped by ${run.row.user}`] : ['all_jobs_done', null];
    s.instance = instance;
    s.reason = word;
    s.exit = failed ? (why.match(/exit status (\d+)/)?.[1] ?? null) : 0;
    s.status = failed ? 'failed' : stopped ? 'terminated' : 'done';
    s.startedAt = started;
    s.endedAt = at;
    s.fails = failed;
    Object.assign(run.row, {
      status: s.status, reason: why, termination_reason: word, fleet: instance.fleet, instance: instance.name, wanted: 1,
      started_at: iso(started), finished_at: iso(at), cost: ((at - started) / HOUR) * instance.price * (blocksFor(wants, instance) / instance.blocks),
    });
    if (submitted > START - 3 * 24 * HOUR) {
      const say = (kind, from, to, reason, message, when, extra = {}) => event(run, { kind, from, to, reason, message, at: when, ...extra });
      say('run.submitted', null, 'submitted', null, `${run.row.user} submitted ${run.row.name}`, submitted, { user: run.row.user, actor: 'api' });
      say('run.status_changed', 'submitted', 'provisioning', 'placed', `${run.row.name} got ${instance.name}`, submitted + waited, { actor: 'jobs_submitted' });
      say('run.status_changed', 'provisioning', 'running', 'started', `${run.row.name} runs on ${instance.name}`, started, { actor: 'jobs_running' });
      say('run.status_changed', 'running', s.status, word, why ? `${run.row.name} ended: ${why}` : `${run.row.name} is done`, at, { final: true });
    }
    return run;
  }

  function placeRun(run, at) {
    const result = look(run.wants, run.row.project);
    if (result.fits.length === 0) return false;
    const need = (i) => blocksFor(run.wants, i);
    const best = result.fits.sort((a, b) => a.slots.filter((x) => !x).length - need(a) - (b.slots.filter((x) => !x).length - need(b)))[0];
    const s = run.submissions.filter((x) => !x.instance && x.status === 'submitted')[0];
    if (!s) return false;
    seat(run, s, best, at);
    return true;
  }
  function seat(run, s, instance, at) {
    let left = blocksFor(run.wants, instance);
    instance.slots = instance.slots.map((slot) => (slot || left === 0 ? slot : (left--, { run, submission: s, rank: s.replica })));
    s.instance = instance;
    if (instance.status === 'idle') instance.status = 'busy';
    phase(s, 'machine', at);
    s.status = 'provisioning';
    const share = blocksFor(run.wants, instance) / instance.blocks;
    run.row.price += instance.price * share;
    Object.assign(run.row, { fleet: instance.fleet, instance: run.submissions.filter((x) => x.instance).length > 1 ? `${run.submissions.find((x) => x.instance).instance.name} +${run.submissions.filter((x) => x.instance).length - 1}` : instance.name, queue_position: null });
  }
  function unseat(run, s) {
    if (!s.instance) return;
    const i = s.instance;
    i.slots = i.slots.map((slot) => (slot?.submission === s ? null : slot));
    if (i.slots.every((slot) => !slot) && i.status === 'busy') i.status = 'idle';
    i.history.unshift({ run: run.row.name, run_id: run.row.id, job: `${run.row.name}-0-0`, user: run.row.user, from: iso(s.startedAt ?? s.submitted), to: iso(now()), status: s.status, reason: s.reason });
    i.history.length = Math.min(i.history.length, 40);
    tellInstance(i);
  }

  // ---------------------------------------------------------------- telling
  let lastAsOf = 0;
  const asOf = () => (lastAsOf = Math.max(lastAsOf + 1, now() * 1000));
  function tell(kind, message) {
    for (const listener of listeners) listener(kind, message);
  }
  function event(run, { kind, entity = 'run', from = null, to = null, reason = null, message, actor = 'runs', user = null, final = false, at = now(), cause = null, extra = [] }) {
    seq++;
    const e = {
      id: uuid(), seq, message, recorded_at: iso(at), actor_user: user, actor_user_id: users.find((u) => u.username === user)?.id ?? null, is_actor_user_deleted: user ? false : null,
      targets: [...(run ? [{ type: 'run', project_id: projectId(run.row.project), project_name: run.row.project, id: run.row.id, name: run.row.name }] : []), ...extra],
      kind, entity, from, to, reason, is_final: final, actor, cause,
    };
    events.push(e);
    if (events.length > 60_000) events.splice(0, 10_000);
    return e;
  }
  function tellRun(run, e = null, quiet = false) {
    if (quiet) return;
    tell('change', { seq, as_of: asOf(), kind: 'run', id: run.id, project: run.row.project, name: run.row.name, from: e?.from ?? null, to: e?.to ?? null, reason: e?.reason ?? null, message: e?.message ?? null, row: { ...run.row } });
  }
  function tellInstance(i, e = null) {
    tell('change', { seq, as_of: asOf(), kind: 'instance', id: i.id, project: i.project, name: i.name, from: e?.from ?? null, to: e?.to ?? null, reason: e?.reason ?? null, message: e?.message ?? null, row: instanceRow(i) });
  }
  function setStatus(run, to, { reason = null, message, final = false, user = null, quiet = false, at = now(), actor = 'runs' }) {
    const from = run.row.status;
    run.row.status = to;
    const e = event(run, { kind: 'run.status_changed', from, to, reason, message, final, user, at, actor });
    tellRun(run, e, quiet);
    return e;
  }
  const instanceTarget = (i) => ({ type: 'instance', project_id: projectId(i.project), project_name: i.project, id: i.id, name: i.name });

  // ---------------------------------------------------------------- life of a run
  function submit(shape, { name, user, wants, replicas, at = now(), quiet = false } = {}) {
    const run = makeRun(shape, { name: name ?? `${shape.base}-${serial++}`, user: user ?? pick(users.slice(0, 6)).username, submitted: at, ...(wants ? { wants } : {}), ...(replicas ? { replicas } : {}) });
    for (let r = 0; r < run.replicas; r++) submission(run, { replica: r, from: at });
    event(run, { kind: 'run.submitted', to: 'submitted', message: `${run.row.user} submitted ${run.row.name}`, user: run.row.user, at, actor: 'api' });
    queue.push(run);
    tellRun(run, events.at(-1), quiet);
    return run;
  }
  function seatQueue(at = now(), quiet = false) {
    for (let n = 0; n < queue.length; n++) {
      const run = queue[n];
      let seated = 0;
      while (placeRun(run, at)) seated++;
      if (run.submissions.every((s) => s.instance || s.status !== 'submitted')) {
        queue.splice(n--, 1);
        setStatus(run, 'provisioning', { reason: 'placed', message: `${run.row.name} got ${run.row.instance}`, quiet, at, actor: 'jobs_submitted' });
        for (const s of run.submissions) if (s.instance) tellInstance(s.instance);
      }
    }
    queue.forEach((run, n) => {
      const before = `${run.row.queue_position}${run.row.reason}`;
      const { refusals } = look(run.wants, run.row.project);
      const nearest = refusals[0];
      run.row.queue_position = queueOf(run).indexOf(run);
      run.row.reason = nearest ? `${nearest.place}: ${nearest.shortfalls[0].message}` : 'waits for its turn';
      run.row.message = null;
      if (before !== `${run.row.queue_position}${run.row.reason}`) tellRun(run, null, quiet);
    });
  }
  const LENGTH = { machine: [800, 3500], image: [2500, 14_000], start: [700, 2600] };
  function step(run, at, quiet = false, fast = 1) {
    const row = run.row;
    for (const s of run.submissions) {
      if (!s.instance || ['done', 'failed', 'terminated', 'aborted'].includes(s.status)) continue;
      const p = s.phases.at(-1);
      const age = (at - p.from) * fast;
      p.length ??= p.phase === 'run' ? between(...run.shape.secs) * 1000 : between(...(LENGTH[p.phase] ?? [800, 2000]));
      if (p.phase === 'image' && age < p.length) {
        const done = Math.floor((age / p.length) * 100);
        const text = `pulling ${done} %`;
        if (row.message !== text && s.replica === 0) {
          row.message = text;
          tellRun(run, null, quiet);
        }
      }
      if (age < p.length) continue;
      const when = Math.min(at, p.from + p.length / fast);
      if (p.phase === 'machine') {
        phase(s, 'image', when);
        s.status = 'pulling';
      } else if (p.phase === 'image') {
        phase(s, 'start', when);
        if (s.replica === 0) row.message = null;
      } else if (p.phase === 'start') {
        phase(s, 'run', when);
        s.status = 'running';
        s.startedAt = when;
        newLog(run, s, when, null, false);
        row.ready = run.submissions.filter((x) => x.status === 'running').length;
        if (row.status !== 'running') {
          row.started_at ??= iso(when);
          setStatus(run, 'running', { reason: 'started', message: `${row.name} runs on ${row.instance}`, quiet, at: when, actor: 'jobs_running' });
        } else tellRun(run, null, quiet);
        if (run.shape.type === 'service') run.marks.push({ at: iso(when + 3000), what: 'ready', message: `replica ${s.replica} is ready`, replica: s.replica, rank: 0 });
      } else if (p.phase === 'run' && run.shape.type !== 'service' && !run.forever) {
        const fails = random() < 0.14;
        const [word, why] = fails ? FAILS[int(0, 1)] : ['all_jobs_done', null];
        end(run, fails ? 'failed' : 'done', word, why, { quiet, at: when });
      }
    }
  }
  function end(run, status, word, why, { quiet = false, at = now(), user = null } = {}) {
    for (const s of run.submissions) {
      if (['done', 'failed', 'terminated', 'aborted'].includes(s.status)) continue;
      if (s.status !== 'submitted') phase(s, 'stop', at);
      phase(s, null, at + 600);
      s.status = status;
      s.reason = word;
      s.endedAt = at;
      s.exit = status === 'failed' ? 1 : 0;
      s.fails = status === 'failed';
      if (s.log) newLog(run, s, s.startedAt, at, status === 'failed');
      unseat(run, s);
    }
    const n = queue.indexOf(run);
    if (n >= 0) queue.splice(n, 1);
    Object.assign(run.row, { reason: why, termination_reason: word, finished_at: iso(at), queue_position: null, message: null, ready: 0, price: 0 });
    setStatus(run, status, { reason: word, message: why ? `${run.row.name} ended: ${why}` : `${run.row.name} is done`, final: true, quiet, at, user, actor: 'runs' });
  }
  function stop(run, user, abort) {
    if (['done', 'failed', 'terminated'].includes(run.row.status)) return;
    setStatus(run, 'terminating', { reason: 'stop_asked', message: `${user} ${abort ? 'aborts' : 'stops'} ${run.row.name}`, user });
    const finish = () => end(run, 'terminated', 'stopped_by_user', `stopped by ${user}`, { user });
    if (frozen) finish();
    else setTimeout(finish, abort ? 400 : 2200);
  }

  // ---------------------------------------------------------------- fill the world
  if (!empty) {
    const SPAN = 14 * 24 * HOUR;
    for (let n = 0; n < wantedRuns; n++) pastRun(pick(SHAPES), START - HOUR / 4 - (1 - n / wantedRuns) ** 1.6 * SPAN);
    // Some were a while ago; what runs now began within the last hours and is played forward.
    const service = (name, model, replicas, wants, project = 'platform') => {
      const shape = { base: name, project, type: 'service', wants, secs: [1e9, 1e9] };
      const run = submit(shape, { name, user: pick(['grace', 'margaret']), replicas, at: START - int(20, 90) * HOUR, quiet: true });
      run.model = model;
      return run;
    };
    const chat = service('api-chat', 'mistral-small-24b', 3, { gpu: 'L4', gpus: 4, cpus: 24, memory: 96 });
    const embed = service('embeddings', 'bge-m3', 2, { gpu: 'L4', gpus: 1, cpus: 8, memory: 32 });
    const docs = service('docs-site', null, 2, { gpu: null, gpus: 0, cpus: 4, memory: 8 });
    seatQueue(START - 19 * HOUR, true);
    for (const run of [chat, embed, docs]) for (let t = 0; t < 6; t++) step(run, START - 18.9 * HOUR + t * 20_000, true);
    chat.deployment = { num: 7, state: 'rolling', ready: 1, wanted: 3, old: 2, message: 'replica 2 is not ready: GET /health answered 503', rolled_back: null };
    chat.row.ready = 2;
    for (const run of [chat, embed, docs]) {
      const total = run === chat ? 7 : 3;
      for (let num = 1; num <= total; num++) {
        run.deployments.unshift({ num, at: iso(START - (total - num) * 5.3 * HOUR - 4 * MINUTE), user: pick(['grace', 'margaret']), state: num === total ? (run === chat ? 'rolling' : 'complete') : num === 5 && run === chat ? 'failed' : 'superseded', reason: num === 5 && run === chat ? 'replica 2 did not become ready within 5 minutes: rolled back to deployment 4' : null, text: run.text.replace('v0.11.0', `v0.${5 + num - (total - 6)}.0`).replace('target: 12', `target: ${8 + num}`), current: num === total });
      }
      if (!run.deployment) run.deployment = { num: 3, state: 'complete', ready: run.replicas, wanted: run.replicas, old: 0, message: null, rolled_back: null };
      run.text = run.deployments[0].text;
    }

    const long = submit({ ...SHAPES[0], secs: [9000, 16000] }, { name: 'train-llama-70b', user: 'ada', at: START - 3.4 * HOUR, quiet: true });
    const others = ['train-llama-13b', 'train-vision', 'train-mamba', 'train-audio', 'train-moe'].map((name, n) => submit({ ...SHAPES[0], secs: [15_000, 30_000] }, { name, user: pick(['grace', 'edsger', 'barbara']), at: START - (2.9 - n * 0.4) * HOUR, quiet: true }));
    const fine = ['finetune-legal', 'finetune-code', 'finetune-med', 'finetune-chat', 'finetune-de'].map((name, n) => submit({ ...SHAPES[1], secs: [8000, 20_000] }, { name, user: pick(['ada', 'linus', 'margaret']), at: START - (1.6 - n * 0.2) * HOUR, quiet: true }));
    const sweeps = Array.from({ length: 30 }, (_, n) => submit({ ...SHAPES[2], secs: [3000, 9000] }, { name: `sweep-${n + 1}`, user: 'barbara', at: START - 52 * MINUTE + n * 9000, quiet: true }));
    const notebooks = ['notebook-ada', 'notebook-linus'].map((name) => submit(SHAPES[4], { name, user: name.split('-')[1], at: START - 2 * HOUR, quiet: true }));
    const cpu = Array.from({ length: 26 }, (_, n) => submit({ ...SHAPES[5 + (n % 3)], secs: [200, 4000] }, { at: START - (26 - n) * 100_000, quiet: true }));
    const evals = ['eval-mmlu-70b', 'eval-code'].map((name) => submit({ ...SHAPES[3], secs: [3000, 5000] }, { name, user: 'ada', at: START - 31 * MINUTE, quiet: true }));
    const started = [long, ...others, ...fine, ...sweeps, ...notebooks, ...cpu, ...evals];
    for (const run of [...started].sort((a, b) => a.submitted - b.submitted)) {
      const at = run.submitted + int(1, 40) * 1000;
      const n = queue.indexOf(run);
      if (n < 0) continue;
      let any = false;
      while (placeRun(run, at)) any = true;
      if (any && run.submissions.every((s) => s.instance)) {
        queue.splice(n, 1);
        setStatus(run, 'provisioning', { reason: 'placed', message: `${run.row.name} got ${run.row.instance}`, quiet: true, at, actor: 'jobs_submitted' });
        for (let t = 1; t <= 8; t++) step(run, Math.min(START - 1000, at + t * 9000), true);
      }
    }
    // A run that was lost once and goes on elsewhere.
    const lost = long.submissions[0];
    if (lost?.instance) {
      const first = { id: uuid(), num: 0, rank: 0, replica: 0, instance: byName('h100-07'), status: 'failed', reason: 'instance_unreachable', exit: null, fails: false, submitted: long.submitted, startedAt: long.submitted + 40_000, endedAt: START - 95 * MINUTE,
        phases: [{ phase: 'queue', from: long.submitted, to: long.submitted + 6000 }, { phase: 'machine', from: long.submitted + 6000, to: long.submitted + 8400 }, { phase: 'image', from: long.submitted + 8400, to: long.submitted + 34_000 }, { phase: 'start', from: long.submitted + 34_000, to: long.submitted + 40_000 }, { phase: 'run', from: long.submitted + 40_000, to: START - 95 * MINUTE, reason: 'instance_unreachable' }] };
      lost.num = 1;
      const again = START - 94.6 * MINUTE;
      lost.submitted = again;
      lost.startedAt = again + 31_000;
      lost.phases = [{ phase: 'queue', from: again, to: again + 4000 }, { phase: 'machine', from: again + 4000, to: again + 6000 }, { phase: 'image', from: again + 6000, to: again + 27_000 }, { phase: 'start', from: again + 27_000, to: again + 31_000 }, { phase: 'run', from: again + 31_000, to: null, length: 4 * HOUR }];
      lost.status = 'running';
      newLog(long, lost, lost.startedAt, null, false);
      long.submissions.unshift(first);
      Object.assign(long.row, { attempts: 2, submission_id: lost.id, started_at: iso(first.startedAt), status: 'running', ready: 1, message: null });
      long.marks.push({ at: iso(START - 95 * MINUTE), what: 'recovery', message: 'h100-07 did not answer for 10 minutes; attempt 2 begins', replica: 0, rank: 0 });
      // The events tell the same as the attempts: the first was on h100-07.
      for (const told of events) if (told.targets.some((target) => target.id === long.id)) told.message = told.message.replace(/(got|runs on) h100-\d\d/, '$1 h100-07');
      const c = event(null, { kind: 'instance.unreachable', entity: 'instance', from: 'busy', to: 'busy', reason: 'unreachable', message: 'h100-07 does not answer', actor: 'instances', at: START - 105 * MINUTE, extra: [instanceTarget(byName('h100-07')), { type: 'run', project_id: projectId('research'), project_name: 'research', id: long.id, name: long.row.name }] });
      const d = event(long, { kind: 'job.ended', entity: 'job', from: 'running', to: 'failed', reason: 'instance_unreachable', message: 'job 0 ended: h100-07 did not answer for 10 minutes', actor: 'jobs_running', at: START - 95 * MINUTE, cause: c.seq });
      event(long, { kind: 'job.submitted', entity: 'job', to: 'submitted', reason: 'retry', message: 'job 0 is submitted again: `retry.on_events` has interruption', actor: 'runs', at: again, cause: d.seq });
      event(long, { kind: 'job.placed', entity: 'job', from: 'submitted', to: 'provisioning', reason: 'placed', message: `job 0 got ${lost.instance.name}`, actor: 'jobs_submitted', at: again + 4000 });
      event(long, { kind: 'job.started', entity: 'job', from: 'pulling', to: 'running', reason: 'started', message: `job 0 runs on ${lost.instance.name}, resumed from step 120,000`, actor: 'jobs_running', at: again + 31_000 });
    }
    // The gigabyte.
    const big = makeRun(SHAPES[5], { name: 'tokenize-web', user: 'edsger', submitted: START - 5 * HOUR });
    const bs = submission(big, { from: big.submitted });
    Object.assign(bs, { instance: byName('cpu-pool-02'), status: 'running', startedAt: START - 4.99 * HOUR });
    bs.phases = [{ phase: 'queue', from: big.submitted, to: big.submitted + 900 }, { phase: 'machine', from: big.submitted + 900, to: big.submitted + 2000 }, { phase: 'image', from: big.submitted + 2000, to: big.submitted + 31_000 }, { phase: 'start', from: big.submitted + 31_000, to: big.submitted + 36_000 }, { phase: 'run', from: big.submitted + 36_000, to: null, length: 1e12 }];
    bs.log = new Log({ seed: 3, startedAt: START - 4.99 * HOUR, endedAt: null, linesPerSecond: 575, head: HEAD('python:3.12-slim') });
    Object.assign(big.row, { status: 'running', fleet: 'cpu-pool', instance: 'cpu-pool-02', ready: 1, started_at: iso(bs.startedAt), cost: 4.41, price: 0.48 });
    big.forever = true;

    // A log that wants to do harm: markup, every control character, direction marks, and one line of 10 MB.
    const evil = makeRun(SHAPES[8], { name: 'hostile-log', user: 'ken', submitted: START - 26 * HOUR });
    const es = submission(evil, { from: evil.submitted });
    const controls = Array.from({ length: 256 }, (_, n) => `${String.fromCharCode(n)}${n}`).join('').replaceAll('\n', '');
    es.phases = [{ phase: 'queue', from: evil.submitted, to: evil.submitted + 500 }, { phase: 'run', from: evil.submitted + 500, to: evil.submitted + 9000 }];
    Object.assign(es, { instance: byName('local-0'), status: 'done', startedAt: evil.submitted + 500, endedAt: evil.submitted + 9000, exit: 0, reason: 'all_jobs_done' });
    es.log = new Log({ seed: 2, startedAt: evil.submitted + 500, endedAt: evil.submitted + 9000, linesPerSecond: 1, fixedLines: 0, head: `<img src=x onerror=alert(1)><script>alert(1)</script>\n<svg onload=alert(1)>\n${controls}\n\u202eabc\u2066def\u200b\n\x1b]8;;javascript:alert(1)\x1b\\click\x1b]8;;\x1b\\\n\x1b[2J\x1b[H\x1b]0;title\x07cleared?\n\x1b]${'\x1b]'.repeat(4000)}\n${'x'.repeat(10_000_000)}\nafter the long line\n` });
    Object.assign(evil.row, { status: 'done', fleet: 'local', instance: 'local-0', started_at: iso(es.startedAt), finished_at: iso(es.endedAt) });

    // Those that wait.
    for (const name of ['train-tts', 'train-ocr']) submit(SHAPES[0], { name, user: 'grace', at: START - 47 * MINUTE, wants: { gpu: 'H100', gpus: 8, cpus: 96, memory: 512 }, quiet: true });
    submit(SHAPES[0], { name: 'train-llama-405b', user: 'ada', at: START - 41 * MINUTE, wants: { gpu: 'H100', gpus: 8, cpus: 96, memory: 512, gpuMemory: 80 }, quiet: true });
    submit(SHAPES[0], { name: 'train-h200', user: 'linus', at: START - 33 * MINUTE, wants: { gpu: 'H100', gpus: 8, cpus: 96, memory: 1024, gpuMemory: 141 }, quiet: true });
    submit(SHAPES[1], { name: 'finetune-fr', user: 'margaret', at: START - 12 * MINUTE, wants: { gpu: 'H100', gpus: 8, cpus: 48, memory: 256, maxPrice: 12 }, quiet: true });
    submit(SHAPES[2], { name: 'sweep-31', user: 'barbara', at: START - 8 * MINUTE, wants: { gpu: 'A100', gpus: 8, cpus: 64, memory: 64, market: 'spot' }, quiet: true });
    submit(SHAPES[2], { name: 'sweep-32', user: 'barbara', at: START - 5 * MINUTE, wants: { gpu: 'A100', gpus: 8, cpus: 64, memory: 64, market: 'spot' }, quiet: true });
    submit(SHAPES[6], { name: 'reindex-all', user: 'grace', at: START - 4 * MINUTE, wants: { gpu: null, gpus: 0, cpus: 64, memory: 200 }, quiet: true });
    for (const [name, minutes] of [['caption-clips', 26], ['caption-shorts', 7]]) submit(SHAPES[6], { name, user: 'linus', at: START - minutes * MINUTE, wants: { gpu: 'L4', gpus: 8, cpus: 48, memory: 96 }, quiet: true });
    submit(SHAPES[1], { name: 'distill', user: 'ada', at: START - 3 * MINUTE, wants: { gpu: 'H100', gpus: 16, cpus: 96, memory: 256 }, quiet: true });
    seatQueue(START - 2000, true);
    for (let n = 0; n < 6; n++) end(submit(SHAPES[n % 4], { at: START - int(4, 55) * MINUTE, quiet: true }), 'failed', ...FAILS[n], { quiet: true, at: START - int(1, 50) * MINUTE });
    const nightly = makeRun(SHAPES[6], { name: 'nightly-rebuild', user: 'grace', submitted: START - 9 * HOUR });
    Object.assign(nightly.row, { status: 'pending', reason: 'waits for its schedule: next at 06:00 UTC', wanted: 1 });
    for (const run of runs.values()) if (!run.row.finished_at && run.row.started_at) run.row.cost = (run.row.price * (START - Date.parse(run.row.started_at))) / HOUR;
    for (const i of instances) use(i, true);
    events.sort((a, b) => a.recorded_at.localeCompare(b.recorded_at));
    for (const e of events.slice(-400)) void e;
  }

  function use(i, quiet = false) {
    const busy = i.slots.filter(Boolean).length / i.blocks;
    const wobble = (v, to) => (v === null ? null : Math.max(0, Math.min(1, v + (to - v) * 0.4 + (random() - 0.5) * 0.06)));
    if (i.unreachableSince) return;
    i.used = { cpu: wobble(quiet ? busy * 0.6 : i.used.cpu, busy * 0.6 + 0.02), memory: wobble(quiet ? busy * 0.7 : i.used.memory, busy * 0.72 + 0.05), gpu: i.gpus ? wobble(quiet ? busy * 0.8 : i.used.gpu, busy * 0.83) : null };
  }

  // ---------------------------------------------------------------- managed jobs
  const managed = [];
  const JOBS = ['pretrain-7b', 'rlhf-round-3', 'ablation-grid', 'data-pipeline', 'video-caption', 'bench-suite', 'protein-fold', 'ocr-archive'];
  function makeManaged(n, name, opts) {
    const shape = opts.shape ?? 'single';
    const created = START - (opts.hours ?? 20) * HOUR;
    const job = { id: uuid(), job_id: 100 + n, name, project: 'research', user: opts.user ?? pick(users.slice(0, 6)).username, shape, priority: 0, created, status: opts.status, tasks: [], deadline: opts.deadline ? created + opts.deadline * HOUR : null, work: opts.work ?? null };
    const names = opts.tasks ?? [name];
    names.forEach((task, t) => {
      const status = opts.statuses?.[t] ?? opts.status;
      const attempts = [];
      let at = created + 30_000 + t * (opts.hours ?? 20) * HOUR * 0.2;
      const count = opts.attempts ?? int(1, 4);
      if (status !== 'PENDING') {
        for (let a = 1; a <= count; a++) {
          const last = a === count;
          const ended = ['SUCCEEDED', 'FAILED', 'CANCELLED'].includes(status);
          const until = last ? (ended ? Math.min(START - 20 * MINUTE, at + 3 * HOUR) : null) : at + ((START - created) / (count + 1)) * between(0.6, 1.1);
          const market = opts.deadline ? (a === 3 ? 'on-demand' : 'spot') : pick(['spot', 'on-demand']);
          attempts.push({ attempt: a, run: `${name}-${100 + n}-${t}-a${a}`, run_id: null, market, placement: market === 'spot' ? `a100-spot-${int(0, 5)} (eu-west-1)` : `h100-${String(int(1, 12)).padStart(2, '0')}`, from: iso(at), to: iso(until), reason: last ? (status === 'FAILED' ? 'exit status 1: validation loss is NaN' : status === 'SUCCEEDED' ? 'done' : null) : pick(['spot instance was taken back by aws', 'h100-07 did not answer for 10 minutes', 'changeover: two changeovers ahead of the line, spot is there']), cost: between(4, 60) });
          at = (until ?? START) + between(120, 600) * 1000;
        }
      }
      job.tasks.push({ task_id: t, name: task, status, attempts, after: shape === 'pipeline' ? (t ? [t - 1] : []) : shape === 'dag' ? (opts.after?.[t] ?? []) : [], reason: opts.reasons?.[t] ?? opts.reason ?? null, resources: '8 × A100 40 GB, 96 CPU, 512 GB' });
    });
    job.reason = job.tasks.find((t) => t.reason)?.reason ?? null;
    managed.push(job);
  }
  if (!empty) {
    makeManaged(41, 'pretrain-7b', { status: 'RUNNING', hours: 38, deadline: 60, work: 44, attempts: 5, user: 'ada' });
    makeManaged(40, 'rlhf-round-3', { status: 'RECOVERING', hours: 12, deadline: 24, work: 16, attempts: 3, user: 'grace', reason: 'spot instance a100-spot-2 was taken back; looks for capacity, avoids eu-west-1a' });
    makeManaged(39, 'data-pipeline', { status: 'RUNNING', shape: 'dag', hours: 6, user: 'edsger', tasks: ['fetch', 'clean', 'dedup', 'tokenize', 'score', 'pack'], statuses: ['SUCCEEDED', 'SUCCEEDED', 'RUNNING', 'RUNNING', 'PENDING', 'PENDING'], after: [[], [0], [1], [1], [2, 3], [4]], reasons: [null, null, null, null, 'waits for dedup and tokenize', 'waits for score'], attempts: 2 });
    makeManaged(38, 'ablation-grid', { status: 'PENDING', hours: 2, user: 'barbara', reason: 'waits for a launch slot: 8 of 8 are taken' });
    makeManaged(37, 'video-caption', { status: 'FAILED', hours: 30, user: 'linus', reason: 'exit status 1: validation loss is NaN' });
    for (let n = 36; n > 0; n--) makeManaged(n, JOBS[n % JOBS.length], { status: random() < 0.15 ? 'FAILED' : random() < 0.1 ? 'CANCELLED' : 'SUCCEEDED', hours: 40 + (36 - n) * 9, ...(n % 5 === 0 ? { shape: 'pipeline', tasks: ['prepare', 'train', 'evaluate'] } : {}), ...(n % 3 === 0 ? { deadline: 30, work: 20, attempts: 3 } : {}) });
  }
  function jobRows(job) {
    return job.tasks.map((t) => {
      const last = t.attempts.at(-1);
      const ended = ['SUCCEEDED', 'FAILED', 'CANCELLED'].includes(t.status);
      return {
        id: `${job.job_id}/${t.task_id}`, uuid: job.id, job_id: job.job_id, task_id: t.task_id, tasks: job.tasks.length, project: job.project, name: job.name, task: t.name, user: job.user,
        status: t.status, schedule_state: t.status === 'PENDING' ? 'WAITING' : ended ? 'DONE' : t.status === 'RECOVERING' ? 'LAUNCHING' : 'ALIVE', reason: t.reason, attempt: t.attempts.length, recoveries: Math.max(0, t.attempts.length - 1),
        market: last?.market ?? null, placement: last?.placement ?? null, resources: t.resources, deadline: iso(job.deadline), slack_seconds: job.deadline && !ended ? (job.job_id === 140 ? -1900 : 8300 + job.job_id * 10) : null,
        cost: t.attempts.reduce((sum, a) => sum + a.cost, 0), submitted_at: iso(job.created), started_at: t.attempts[0]?.from ?? null, finished_at: ended ? (last?.to ?? null) : null,
      };
    });
  }

  // ---------------------------------------------------------------- containers
  const containers = [];
  if (!empty) {
    for (let n = 0; n < 180; n++) {
      const r = n / 180;
      const stateName = n < 14 ? 'Queued' : n < 20 ? 'Locked' : n < 44 ? 'Running' : random() < 0.08 ? 'Cancelled' : 'Complete';
      const created = START - r * 20 * HOUR - int(10, 900) * 1000;
      const dispatcher = stateName === 'Queued' ? null : pick(['slurm-main', 'local-hall-1', 'slurm-gpu']);
      containers.push({
        id: `wndls-dz642-${hex(15)}`, name: pick(['align-reads', 'call-variants', 'merge-bam', 'qc-report', 'render-tiles', 'simulate']) + `-${n}`, state: stateName, priority: int(1, 900),
        dispatcher, said: stateName === 'Queued' ? pick(['partition main has no node with 128 GB free', 'waits for 3 containers of higher priority', null]) : stateName === 'Locked' ? 'sbatch accepted, job 88231 is PENDING (Resources)' : null,
        attempt: stateName === 'Queued' ? 0 : int(1, 2), owner: pick(users.slice(0, 6)).username, resources: `${pick([4, 8, 16])} CPU, ${pick([16, 32, 64])} GB`, exit_code: stateName === 'Complete' ? (random() < 0.1 ? 1 : 0) : null, cost: stateName === 'Complete' ? between(0, 3) : 0,
        created_at: iso(created), started_at: ['Running', 'Complete'].includes(stateName) ? iso(created + 60_000) : null, finished_at: stateName === 'Complete' ? iso(created + int(100, 3000) * 1000) : null,
      });
    }
    for (const c of containers) c.uuid = c.id;
  }
  /** Dispatchers, with the containers that they hold. */
  function dispatcherList(isAdmin) {
    const held = (name, state) => containers.filter((c) => c.dispatcher === name && c.state === state).length;
    const one = (name, kind, online, seen, process, nodes) => ({ name, kind, online, seen_at: seen === null ? null : iso(now() - seen), held_until: isAdmin && online ? iso(now() + 40_000) : null, process: isAdmin ? process : null, nodes, locked: held(name, 'Locked'), running: held(name, 'Running') });
    const nodes = (partition, count, cpus, memory, gpus = 0, type = '') => ({ partition, cpus, memory_mib: memory * 1024, gpus, gpu_type: type, count });
    return {
      as_of: asOf(), queued: containers.filter((c) => c.state === 'Queued').length,
      dispatchers: empty ? [] : [
        one('slurm-gpu', 'slurm', true, 12_000, 'login-2, process 88120', [nodes('gpu', 8, 64, 512, 4, 'a100'), nodes('gpu-large', 2, 128, 1024, 8, 'h100')]),
        one('slurm-main', 'slurm', true, 21_000, 'login-1, process 4121', [nodes('main', 120, 48, 192), nodes('main', 16, 96, 768), nodes('debug', 4, 16, 64)]),
        one('slurm-old', 'slurm', false, 26 * HOUR, 'login-1, process 990', [nodes('main', 40, 24, 96)]),
        one(null, null, true, null, 'hall-1, process 2210', []),
      ],
    };
  }

  // ---------------------------------------------------------------- life
  let ticks = 0;
  function tick() {
    ticks++;
    const at = now();
    for (const run of runs.values()) if (run.row.status === 'provisioning' || run.row.status === 'running' || run.row.status === 'terminating') step(run, at, false, run.row.status === 'provisioning' ? 1 : 1);
    if (ticks % 3 === 0 && random() < 0.5 && queue.length < 14) submit(pick(SHAPES.slice(2)));
    if (ticks % 2 === 0) seatQueue();
    if (ticks % 4 === 0) for (const i of instances) { use(i); if (random() < 0.4) tellInstance(i); }
    if (ticks % 8 === 0) for (const run of runs.values()) if (run.row.status === 'running') run.row.cost += (run.row.price * 2) / 3600;
  }
  const timer = frozen || empty ? null : setInterval(tick, 250);

  return { now, iso, uuid, random, users, projects, projectId, fleets, instances, instanceRow, runs, queue, managed, jobRows, containers, dispatcherList, events, listeners, queueOf, look, patched, curesFor, submit, stop, end, SHAPES, words, event, tellRun, tellInstance, newLog, blocksFor, asOf, get seq() { return seq; }, START, close: () => clearInterval(timer) };
}
