// A real server with a home of its own, and what the tests put into it.
import { execFile, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { startProxy } from '../../dev/proxy.mjs';

/** The program under test: `WINDLASS`, or the one that was built last. */
function program() {
  const found = process.env.WINDLASS ?? fileURLToPath(new URL('../../../target/debug/windlass', import.meta.url));
  if (!existsSync(found)) throw new Error(`no program at ${found}: build it, and set WINDLASS to its path`);
  return found;
}

/** Starts a server on a free port. `dir` of an earlier one continues with its data. */
export async function startServer({ dir = mkdtempSync(join(tmpdir(), 'windlass-web-')), token = `test-${randomBytes(12).toString('hex')}`, port = 0, proxyPort = 0, args = [] } = {}) {
  const home = join(dir, 'home');
  mkdirSync(home, { recursive: true });
  const env = { ...process.env, HOME: home, NO_COLOR: '1' };
  for (const name of Object.keys(env)) if (name.startsWith('WINDLASS_')) delete env[name];
  const command = ['server', '--port', String(port), '--data-dir', join(dir, 'data'), '--admin-token', token, '--local-runtime', 'process', '--local-processes', 'own', ...args];
  const child = spawn(program(), command, { env, stdio: ['ignore', 'pipe', 'pipe'] });
  // A test that fails leaves no server behind.
  const end = () => { child.kill('SIGKILL'); endAgents(dir); };
  process.once('exit', end);
  child.once('exit', () => process.off('exit', end));
  let output = '';
  let url = null;
  await new Promise((done, failed) => {
    const read = (chunk) => {
      output += chunk;
      url ??= /ready at (http:\/\/[^\s]+)/.exec(output)?.[1] ?? null;
      if (url) done();
    };
    child.stdout.on('data', read);
    child.stderr.on('data', read);
    child.once('exit', (code) => failed(new Error(`the server ended with ${code}:\n${output}`)));
  });
  // With `WINDLASS_UI=dist` the files of the UI are those of `dist`, and not those of the program.
  const proxy = process.env.WINDLASS_UI === 'dist' ? await startProxy(url, proxyPort) : null;
  if (proxy) url = proxy.url;
  const server = { url, token, dir, child, output: () => output };
  /** A call with a token. */
  server.call = async (path, body = {}, as = token) => {
    const response = await fetch(url + path, { method: 'POST', headers: { authorization: `Bearer ${as}`, 'content-type': 'application/json' }, body: JSON.stringify(body) });
    const text = await response.text();
    if (!response.ok) throw new Error(`${path}: ${response.status} ${text}`);
    return text ? JSON.parse(text) : null;
  };
  /** The command line, as a user of this server. */
  server.cli = (...words) => new Promise((done, failed) => {
    execFile(program(), words, { env: { ...env, WINDLASS_URL: url, WINDLASS_TOKEN: token } }, (error, stdout, stderr) => (error ? failed(new Error(`windlass ${words.join(' ')}: ${stderr || stdout}`)) : done(stdout)));
  });
  /** Starts a dispatcher of this machine; the function ends it. */
  server.dispatch = async () => {
    const file = join(dir, 'dispatch.token');
    writeFileSync(file, await server.cli('dispatch', 'token'), { mode: 0o600 });
    const dispatcher = spawn(program(), ['dispatch', 'local', '--server', url, '--token-file', file, '--allow-process', '--dir', join(dir, 'containers')], { env, stdio: 'ignore' });
    const kill = () => dispatcher.kill('SIGKILL');
    process.once('exit', kill);
    return () => new Promise((done) => {
      process.off('exit', kill);
      if (dispatcher.exitCode !== null) done();
      dispatcher.once('exit', done);
      dispatcher.kill('SIGTERM');
    });
  };
  server.apply = async (name, more, project = 'main') => {
    const configuration = { type: 'task', resources: { cpu: '1..', memory: '0..', disk: null }, ...more, name };
    await server.call(`/api/project/${project}/runs/apply`, { plan: { run_spec: { run_name: name, configuration, profile: { name: 'default' } } }, force: false });
    return name;
  };
  server.run = (name, project = 'main') => server.call(`/api/project/${project}/runs/get`, { run_name: name });
  /** Waits until a run satisfies a condition. */
  server.until = async (name, wanted, project = 'main') => waitFor(`${name} is as expected`, async () => {
    const run = await server.run(name, project);
    return (typeof wanted === 'function' ? wanted(run) : run.status === wanted) ? run : null;
  });
  server.kill = () => new Promise((done) => { proxy?.close(); child.once('exit', done); child.kill('SIGKILL'); });
  server.stop = async ({ keep = false } = {}) => {
    if (child.exitCode === null && child.signalCode === null) await stopRuns(server);
    if (child.exitCode === null && child.signalCode === null) {
      await new Promise((done) => { child.once('exit', done); child.kill('SIGTERM'); });
    }
    proxy?.close();
    endAgents(dir);
    if (!keep) rmSync(dir, { recursive: true, force: true, maxRetries: 5 });
  };
  return server;
}

/** Jobs outlive their server, so the tests end them. */
async function stopRuns(server) {
  await server.call('/api/project/main/jobs/cancel', { all_users: true });
  const active = async () => (await server.call('/api/runs/rows', { limit: 500, statuses: ['pending', 'submitted', 'provisioning', 'running', 'terminating'] })).rows;
  await waitFor('all runs end', async () => {
    const rows = await active();
    for (const project of new Set(rows.map((row) => row.project))) {
      await server.call(`/api/project/${project}/runs/stop`, { runs_names: rows.filter((row) => row.project === project).map((row) => row.name), abort: true });
    }
    return rows.length === 0;
  }).catch((error) => console.log(`      ${error.message}`));
}

/** Ends the agents of a data directory, which outlive their server too. */
function endAgents(dir) {
  for (const id of readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    try {
      const words = readFileSync(`/proc/${id}/cmdline`, 'utf8').split('\0');
      if (words[0].includes('windlass') && words.some((word) => word.startsWith(`${dir}/`))) process.kill(Number(id), 'SIGKILL');
    } catch {
      // It ended by itself.
    }
  }
}

/** Waits for a state: polls until the condition is true. */
export async function waitFor(what, look, timeout = 60_000) {
  const end = Date.now() + timeout;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (Date.now() > end) throw new Error(`waited ${timeout / 1000} s for: ${what}`);
    await new Promise((done) => setTimeout(done, 100));
  }
}

/** A run that waits for what no instance has. */
export const waits = (gpu) => ({ commands: ['true'], resources: { gpu }, retry: { on_events: ['no-capacity'], duration: '1d' } });

/** The value of a secret, which no page may show. */
export const CANARY = 'canary-secret-value';

export const EVIL = '<img src=x onerror="globalThis.evil=1"><script>globalThis.evil=2</script>\u202eabc';

const HOSTILE_LOG = [
  `printf '%s\\n' '${EVIL.replaceAll("'", '')}'`,
  String.raw`printf '\033[2J\033[Hnot cleared\n\033]0;title\007\033]8;;javascript:alert(1)\033\\link\033]8;;\033\\\n'`,
  String.raw`printf '\033[31mred\033[0m \033[1;4;38;5;201mbold\033[0m\n'`,
  `for code in $(seq 1 31); do printf "c$code \\\\$(printf %o $code) end\\n"; done`,
  `head -c 10000000 /dev/zero | tr '\\0' x; printf '\\nafter the long line\\n'`,
];

/** Users, projects, secrets and runs in all the states that plain processes on one machine can have. */
export async function fill(server) {
  const names = {};
  await server.call('/api/users/create', { username: 'ada', global_role: 'user', email: 'ada@example.org', active: true });
  await server.call('/api/projects/create', { project_name: 'research', is_public: false });
  await server.call('/api/projects/main/add_members', { members: [{ username: 'ada', project_role: 'manager' }] });
  await server.call('/api/project/main/secrets/create_or_update', { name: 'TOKEN', value: CANARY });
  // The machine has few processors, so what has to run comes first, and what waits asks for what it does not have.
  names.done = await server.apply('hello', { commands: ['echo "hello from windlass"'] });
  names.failed = await server.apply('broken', { commands: ['echo "about to fail"', 'exit 3'] });
  names.hostile = await server.apply('hostile-log', { commands: HOSTILE_LOG });
  names.secret = await server.apply('with-secret', { commands: ['echo "the secret is $TOKEN"'], env: { TOKEN: '${{ secrets.TOKEN }}' } });
  for (const name of [names.done, names.failed, names.hostile, names.secret]) await server.until(name, (run) => ['done', 'failed'].includes(run.status));
  names.waiting = await server.apply('wants-h100', waits('H100:8'));
  names.second = await server.apply('wants-more', { ...waits('0'), resources: { cpu: 512, memory: '0..', disk: null } });
  names.live = await server.apply('counter', { commands: ['for i in $(seq 1 100000); do echo "step $i of many"; sleep 0.05; done'], env: { LEVEL: '3' }, max_duration: '2h' });
  await server.until(names.live, 'running');
  names.service = await server.apply('web', { type: 'service', port: 8000, auth: false, commands: [SERVICE], replicas: 1, probes: [{ type: 'http', url: '/', interval: '2s' }] });
  // The machine is full before the job comes.
  await server.until(names.service, 'running');
  const launched = await server.call('/api/project/main/jobs/launch', { text: PIPELINE });
  names.job = launched.jobs[0].job_id;
  await server.call('/api/views/set', { name: 'Failed today', page: 'runs', query: 'q=status%3Afailed', project: null });
  return names;
}

const SERVICE = `python3 -c "
import http.server
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header('content-type', 'text/html'); self.end_headers()
        self.wfile.write(b'<h1>a service</h1><script>const say=(text)=>{const attempt=(name,act)=>{try{return name+\\' \\'+(act()||\\'empty\\')}catch(e){return name+\\' \\'+e.name}};document.title=[text,\\'origin \\'+self.origin,attempt(\\'cookie\\',()=>document.cookie),attempt(\\'storage\\',()=>localStorage.length)].join(\\'; \\')};fetch(\\'/api/users/get_my_user\\',{method:\\'POST\\',credentials:\\'include\\',headers:{\\'X-Windlass-UI\\':\\'1\\',\\'Content-Type\\':\\'application/json\\'},body:\\'{}\\'}).then(r=>r.text()).then(t=>say(\\'read \\'+t),e=>say(\\'stopped\\'))</script>')
http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Page).serve_forever()
"`;

/** A model that answers with the number of messages and the last one, word by word. */
export const MODEL = `python3 -c "
import http.server, json, time
class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers['content-length'])))['messages']
        text = said[-1]['content']
        if text == 'fail':
            body = json.dumps({'error': {'message': 'the model is broken'}}).encode()
            self.send_response(500); self.send_header('content-type', 'application/json'); self.send_header('content-length', str(len(body))); self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200); self.send_header('content-type', 'text/event-stream'); self.end_headers()
        for word in [str(len(said)) + ':'] + [' ' + word for word in text.split()]:
            self.wfile.write(('data: ' + json.dumps({'choices': [{'delta': {'content': word}}]}) + chr(10) * 2).encode()); self.wfile.flush()
        while 'for ever' in text:
            self.wfile.write(b': wait' + bytes([10, 10])); self.wfile.flush(); time.sleep(0.1)
        self.wfile.write(b'data: [DONE]' + bytes([10, 10]))
http.server.ThreadingHTTPServer(('127.0.0.1', 8001), Model).serve_forever()
"`;

/** An identity provider with the users that a test sets. */
export async function startProvider() {
  const dir = process.env.WINDLASS_TEST_OIDC;
  if (!dir) throw new Error('WINDLASS_TEST_OIDC names no Python environment with a provider: `cargo xtask test --web` makes one');
  const script = fileURLToPath(new URL('../../../crates/server-tests/tests/it/oidc_provider.py', import.meta.url));
  const child = spawn(join(dir, 'bin/python'), [script], { stdio: ['ignore', 'pipe', 'ignore'] });
  const end = () => child.kill('SIGKILL');
  process.once('exit', end);
  const url = await new Promise((done, failed) => {
    let output = '';
    child.stdout.on('data', (chunk) => { output += chunk; if (output.includes('\n')) done(output.trim()); });
    child.once('exit', (code) => failed(new Error(`the identity provider ended with ${code}`)));
  });
  return {
    url,
    stop: () => { process.off('exit', end); end(); },
    setUser: async (subject, claims) => {
      const answer = await fetch(`${url}/users/${subject}`, { method: 'PUT', headers: { 'content-type': 'application/json' }, body: JSON.stringify(claims) });
      if (!answer.ok) throw new Error(`the user was not set: ${answer.status}`);
    },
  };
}

const PIPELINE = `name: pipeline
---
name: prepare
resources:
  cpus: 1+
run: |
  echo preparing
---
name: train
resources:
  accelerators: H100:8
run: |
  echo training
`;
