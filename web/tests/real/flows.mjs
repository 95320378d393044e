// Whole flows of users on a server of their own, from the first visit on.
import assert from 'node:assert/strict';
import { openSession, openView } from './browser.mjs';
import { startServer, waitFor, waits } from './server.mjs';

/** What a small job asks for. */
const SMALL = { cpu: '1..', memory: '0..', disk: null };

const RETRY_SOON = ['--retry-delay', '1s'];

/** A service whose probe fails if `SICK` is set. */
const PROBED = (port) => `python3 -c "
import http.server, os
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(500 if os.environ.get('SICK') else 200); self.end_headers(); self.wfile.write(b'here')
http.server.ThreadingHTTPServer(('127.0.0.1', ${port}), Page).serve_forever()
"`;

export function addFlows(test, browser) {
  let server = null;
  let session = null;
  /** The server that the flows share, one after the other. */
  const ready = async () => {
    server ??= await startServer({ args: RETRY_SOON });
    session ??= await openSession(browser, server);
    return session.view();
  };
  const problems = async (view, allowed = []) => assert.deepEqual((await view.problems()).filter((text) => !allowed.some((pattern) => pattern.test(text))), []);
  const end = async (...names) => {
    await server.call('/api/project/main/runs/stop', { runs_names: names, abort: true });
    for (const name of names) await server.until(name, (run) => ['terminated', 'done', 'failed'].includes(run.status));
  };

  test('first visit: windlass ui, hello runs and its log is live, a run for 8 H100 names every place', async () => {
    server = await startServer({ args: RETRY_SOON });
    const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
    const view = await openView(context, server);
    await view.page.goto((await server.cli('ui', '--no-browser')).trim());
    await view.page.getByText('Three steps to the first run').waitFor();
    await view.page.getByRole('link', { name: 'Run hello here' }).click();
    await view.page.getByText('Starts now').waitFor();
    await view.page.getByRole('button', { name: 'Apply' }).click();
    await view.page.getByRole('heading', { name: 'hello', exact: true }).waitFor();
    await view.page.getByRole('tab', { name: 'Logs' }).click();
    await view.page.getByRole('log').getByText('hello from windlass').waitFor();
    await server.until('hello', 'done');

    await server.apply('wants-h100', waits('H100:8'));
    const why = await waitFor('the places are known', async () => {
      const answer = await server.call('/api/project/main/runs/why', { run_name: 'wants-h100' });
      return answer.jobs.some((job) => job.refusals.length) ? answer : null;
    });
    await view.open('/runs/main/wants-h100');
    const table = view.page.locator('.places tbody');
    await table.locator('tr').first().waitFor();
    const rows = await table.locator('tr').evaluateAll((found) => found.map((row) => [...row.cells].map((cell) => cell.textContent.trim())));
    for (const [, missing, cure] of rows) assert.ok(missing && cure, JSON.stringify(rows));
    // Each instance of the server is a place, and so is what the scheduler tried besides.
    const places = why.jobs.flatMap((job) => job.refusals.map((refusal) => refusal.place));
    const { rows: instances } = await server.call('/api/instances/rows');
    const text = await table.innerText();
    for (const place of places) assert.ok(text.includes(place), `${place} is missing in ${text}`);
    for (const { name, fleet } of instances) assert.ok(places.some((place) => place.includes(name) || place === `fleet ${fleet}`), `${name} is missing in ${places}`);
    await problems(view);
    await context.close();
    await end('wants-h100');
  });

  test('the queue lists runs in the order of the server', async () => {
    const view = await ready();
    // The machine is taken, so what needs all of it waits.
    const all = { cpu: await whole(), memory: '0..', disk: null };
    await server.apply('holder', { commands: ['sleep 600'], resources: all });
    await server.until('holder', 'running');
    const wait = async (name) => { await server.apply(name, { commands: ['true'], resources: all }); await waitFor(`${name} waits`, async () => (await server.call('/api/queue/list')).entries.some((entry) => entry.run === name)); };
    for (const name of ['first', 'next', 'last']) await wait(name);
    const order = async () => (await server.call('/api/queue/list')).entries.map((entry) => [String(entry.position + 1), entry.run]);
    const listed = () => view.page.locator('.entries li').evaluateAll((rows) => rows.map((row) => [row.querySelector('.pos').textContent, row.querySelector('.strong').textContent]));
    await view.open('/queue');
    await waitFor('all are listed', async () => (await listed()).length === 3);
    assert.deepEqual(await listed(), await order());
    assert.deepEqual((await listed()).map(([number]) => number), ['1', '2', '3']);
    assert.match(await server.cli('queue'), /first[^]*next[^]*last/);
    await view.page.getByText('after the one before: waits for longer').nth(1).waitFor();
    // The first leaves, and the others move up.
    await end('first');
    await waitFor('the others move up', async () => JSON.stringify(await listed()) === JSON.stringify([['1', 'next'], ['2', 'last']]));
    await view.open('/');
    await view.page.locator('.queue').getByRole('link', { name: 'next' }).waitFor();
    await problems(view);
    await view.close();
    await end('next', 'last', 'holder');
  });

  test('a cure is applied, and the run ends', async () => {
    const view = await ready();
    await view.open('/launch');
    await view.page.waitForFunction(() => document.querySelector('.host')?.shadowRoot?.querySelector('.cm-content'));
    await view.page.locator('.host').click();
    await view.page.keyboard.press('Control+a');
    await view.page.keyboard.insertText('type: task\nname: too-large\ncommands:\n  - echo cured\nresources:\n  cpu: 512\n  memory: 0..\n  disk: null\nretry:\n  on_events: [no-capacity]\n  duration: 1d\n');
    await view.page.getByText('Would wait').waitFor();
    await view.page.getByRole('button', { name: 'Apply' }).click();
    await view.page.getByRole('heading', { name: 'too-large' }).waitFor();
    await view.page.getByRole('link', { name: 'Edit and apply' }).last().click();
    await view.page.getByRole('heading', { name: 'Edit too-large' }).waitFor();
    await view.page.getByText('Difference to what runs').waitFor();
    // An active run keeps what it asks for: it is stopped first, after a question.
    await view.page.getByRole('button', { name: 'Stop too-large and apply' }).click();
    await view.page.getByRole('dialog').getByRole('button', { name: 'Stop and apply' }).click();
    await server.until('too-large', 'done');
    await view.page.getByRole('heading', { name: 'too-large' }).waitFor();
    await view.page.locator('.head .t-done', { hasText: 'done' }).waitFor();
    await problems(view);
    await view.close();
  });

  test('two attempts are compared from their first difference', async () => {
    const view = await ready();
    const mark = `${server.dir}/tried`;
    await server.apply('twice', { commands: ['for i in $(seq 1 300); do echo "line $i of both"; done', `if [ -e ${mark} ]; then echo "the second attempt"; exit 0; fi`, `touch ${mark}`, 'echo "the first attempt"', 'exit 1'], retry: { on_events: ['error'], duration: '1h' } });
    await server.until('twice', 'done');
    await view.open('/runs/main/twice?tab=logs');
    await view.page.getByRole('group', { name: 'Attempt' }).getByRole('button', { name: 'Attempt 2' }).waitFor();
    await view.page.keyboard.press('c');
    await view.page.getByRole('heading', { name: 'Compare' }).waitFor();
    const [left, right] = [view.page.getByRole('log').first(), view.page.getByRole('log').nth(1)];
    await left.getByText('line 1 of both').waitFor();
    assert.equal(await left.getByText('the first attempt').count(), 0, 'the difference is not on the screen yet');
    await view.page.getByRole('button', { name: 'Go to the first difference' }).click();
    await left.getByText('the first attempt').waitFor();
    await right.getByText('the second attempt').waitFor();
    await view.open('/runs/main/twice');
    await view.page.locator('.lane').nth(1).waitFor();
    await problems(view);
    await view.close();
  });

  test('a deployment whose probe fails is rolled back, and the page says why', async () => {
    const view = await ready();
    const service = { type: 'service', port: 8011, auth: false, replicas: 1, commands: [PROBED(8011)], probes: [{ type: 'http', url: '/', interval: 1, timeout: 5, ready_after: 1 }], deployment: { ready_within: 3 } };
    await server.apply('probed', service);
    await server.until('probed', (run) => run.deployment?.state === 'complete');
    await view.open('/runs/main/probed?tab=deployments');
    await view.page.getByText('complete').first().waitFor();
    const sick = { ...service, port: 8012, commands: [PROBED(8012)], env: { SICK: '1' } };
    const { run_spec } = await server.run('probed');
    await server.call('/api/project/main/runs/apply', { plan: { run_spec: { ...run_spec, configuration: { ...sick, resources: SMALL, name: 'probed' } } }, force: true });
    await view.page.getByText(/Deployment 1 was rolled back: replica 1 is not ready/).waitFor({ timeout: 60_000 });
    await view.open('/runs/main/probed');
    await view.page.getByText(/was rolled back/).first().waitFor();
    assert.equal((await server.run('probed')).status, 'running');
    await problems(view);
    await view.close();
    await end('probed');
  });

  /** A job and a run that each take all of the machine. */
  const whole = async () => (await waitFor('the machine is there', async () => (await server.call('/api/instances/rows')).rows[0])).cpus;
  /** Lets jobs of a higher class preempt others at once. */
  const permitPreemption = async () => {
    const fleet = await server.call('/api/project/main/fleets/get', { name: 'local' });
    const spec = { ...fleet.spec, configuration: { ...fleet.spec.configuration, preemption: { min_run: 0, wait: 0, grace: 5 } } };
    await server.call('/api/project/main/fleets/apply', { plan: { spec, current_resource: fleet }, force: true });
  };

  test('a managed job whose attempt is preempted runs again, with both attempts on its page', async () => {
    const view = await ready();
    const { jobs } = await server.call('/api/project/main/jobs/launch', { text: `name: survivor\nresources:\n  cpus: ${await whole()}\nrun: |\n  echo attempt\n  sleep 600\n` });
    const number = jobs[0].job_id;
    const task = async () => (await server.call('/api/project/main/jobs/get', { job_id: number })).tasks[0];
    await waitFor('the first attempt runs', async () => (await task()).status === 'RUNNING');
    await view.open(`/jobs/main/${number}`);
    await view.page.locator('.head', { hasText: 'running' }).waitFor();
    await permitPreemption();
    await server.apply('urgent-work', { commands: ['sleep 600'], class: 'urgent', resources: { cpu: await whole(), memory: '0..', disk: null } });
    await server.until('urgent-work', 'running');
    await waitFor('the job recovers', async () => (await task()).status !== 'RUNNING');
    await view.page.locator('.head', { hasText: /recovering|pending|starting/ }).waitFor();
    await end('urgent-work');
    // An attempt in between may have looked in vain: the place that was lost is avoided first.
    await waitFor('a later attempt runs', async () => { const now = await task(); return now.status === 'RUNNING' && now.attempts.length > 1; }, 120_000).catch(async (error) => { throw new Error(`${error.message}: ${JSON.stringify(await task())}`); });
    const attempts = view.page.locator('table', { has: view.page.getByRole('columnheader', { name: 'Attempt' }) });
    const shown = await waitFor('both attempts are shown', async () => {
      const rows = await attempts.locator('tbody tr').evaluateAll((all) => all.map((row) => row.cells[6].textContent.trim()));
      return rows.length > 1 && rows[0] !== 'runs' && rows.at(-1) === 'runs' ? rows : null;
    });
    assert.match(shown[0], /preempt/);
    assert.ok(shown.slice(1, -1).every((reason) => reason !== ''), JSON.stringify(shown));
    await view.page.getByText('Attempts over time').waitFor();
    await waitFor('a lane for each attempt', async () => (await view.page.locator('.lane').count()) > 1);
    await problems(view);
    await view.close();
    await server.call('/api/project/main/jobs/cancel', { job_ids: [number] });
    await waitFor('the job is cancelled', async () => (await task()).status === 'CANCELLED');
  });

  test('a run that is preempted says for which run, and waits', async () => {
    const view = await ready();
    const all = { cpu: await whole(), memory: '0..', disk: null };
    await server.apply('gives-way', { commands: ['sleep 600'], class: 'idle', resources: all, retry: { on_events: ['no-capacity', 'interruption'], duration: '1h' } });
    await server.until('gives-way', 'running');
    await view.open('/runs/main/gives-way');
    await permitPreemption();
    await server.apply('takes-over', { commands: ['sleep 600'], class: 'urgent', resources: all });
    await server.until('takes-over', 'running');
    await view.page.getByRole('heading', { name: 'Preempted' }).waitFor();
    await view.page.getByText(/takes-over/).first().waitFor();
    // It is submitted again, and waits in its class.
    await view.open('/queue');
    await view.page.locator('.entries').getByRole('link', { name: 'gives-way', exact: true }).waitFor();
    await view.page.locator('.entries .chip', { hasText: 'idle' }).waitFor();
    await problems(view);
    await view.close();
    await end('gives-way', 'takes-over');
  });

  test('a deleted run says who deleted it', async () => {
    const view = await ready();
    await server.apply('short-lived', { commands: ['true'] });
    await server.until('short-lived', 'done');
    await server.call('/api/project/main/runs/delete', { runs_names: ['short-lived'] });
    await view.open('/runs/main/short-lived');
    await view.page.getByText(/It was deleted by admin at/).waitFor();
    await view.page.getByText(/request [\w-]{6,}/).waitFor();
    await view.close();
  });

  return async () => {
    await session?.close();
    await server?.stop();
  };
}
