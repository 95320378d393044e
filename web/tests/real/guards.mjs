// What pages must not show or do, and what everybody can reach without a mouse, at the real server.
import assert from 'node:assert/strict';
import { axe, openSession } from './browser.mjs';
import { CANARY, waitFor } from './server.mjs';

export function addGuards(test, { browser, server, session, names }) {
  test('the value of a secret is shown to nobody who did not ask for it', async () => {
    const view = await session.view();
    const answers = [];
    view.page.on('response', async (response) => {
      const path = new URL(response.url()).pathname;
      if (path.startsWith('/api/') && !/stream|search/.test(path)) answers.push([path, await response.text().catch(() => '')]);
    });
    for (const tab of ['', '?tab=logs', '?tab=logs&d=1', '?tab=configuration', '?tab=raw', '?tab=metrics']) {
      await view.open(`/runs/main/${names.secret}${tab}`);
      assert.ok(!(await view.page.content()).includes(CANARY), tab);
    }
    await view.open('/projects/main?tab=secrets');
    await view.page.getByText('TOKEN').first().waitFor();
    await view.open('/events');
    await view.open(`/launch?run=main/${names.secret}`);
    await view.page.waitForFunction(() => document.querySelector('.host')?.shadowRoot?.querySelector('.cm-content')?.textContent.includes('secrets.TOKEN'));
    assert.ok(answers.length > 10);
    assert.deepEqual(answers.filter(([, text]) => text.includes(CANARY)).map(([path]) => path), []);
    await view.close();
  });

  test('a terminal ends with the right of its user', async () => {
    const { creds } = await server.call('/api/users/create', { username: 'carol', global_role: 'user', active: true });
    await server.call('/api/projects/main/add_members', { members: [{ username: 'carol', project_role: 'manager' }] });
    const own = await openSession(browser, server, { token: creds.token });
    const view = await own.view();
    await view.open(`/runs/main/${names.live}?tab=terminal`);
    await view.page.getByText('Connected').waitFor();
    await view.page.keyboard.type('echo still-$((1 + 1))\r');
    await view.page.locator('.xterm-rows', { hasText: 'still-2' }).waitFor();
    assert.deepEqual(await axe(view.page), []);
    await server.call('/api/projects/main/remove_members', { usernames: ['carol'] }).catch(async () => {
      const { members } = await server.call('/api/projects/main/get');
      await server.call('/api/projects/main/set_members', { members: members.filter((member) => member.user.username !== 'carol').map((member) => ({ username: member.user.username, project_role: member.project_role })) });
    });
    await view.page.getByText('Your right to this job ended.').waitFor();
    await own.close();
  });

  test('dialogs hand the focus back, and axe finds nothing in palette, help and dialogs', async () => {
    const view = await session.view();
    const { page } = view;
    await view.open(`/runs/main/${names.live}`);
    const focused = () => page.evaluate(() => document.activeElement?.textContent?.trim());
    const stop = page.getByRole('button', { name: 'Stop' });
    await stop.focus();
    await page.keyboard.press('Enter');
    await page.getByRole('dialog').waitFor();
    assert.deepEqual(await axe(page), []);
    await page.keyboard.press('Escape');
    await page.getByRole('dialog').waitFor({ state: 'detached' });
    assert.equal(await focused(), 'Stop');
    await page.keyboard.press('Control+k');
    await page.getByRole('combobox').fill('cou');
    await page.getByRole('option', { name: /counter/ }).first().waitFor();
    assert.deepEqual(await axe(page), []);
    await page.keyboard.press('Escape');
    await page.getByRole('combobox').waitFor({ state: 'detached' });
    assert.equal(await focused(), 'Stop');
    await page.keyboard.press('?');
    await page.getByRole('dialog', { name: 'Keys' }).waitFor();
    assert.deepEqual(await axe(page), []);
    await page.keyboard.press('Escape');
    await page.getByRole('dialog').waitFor({ state: 'detached' });
    assert.equal(await focused(), 'Stop');
    assert.deepEqual(await view.problems(), []);
    await view.close();
  });

  test('timeline and heat map have names for those who do not see them', async () => {
    const view = await session.view();
    await view.open(`/runs/main/${names.done}`);
    const spans = view.page.locator('.track .span');
    await spans.first().waitFor();
    const texts = await spans.evaluateAll((all) => all.map((one) => one.getAttribute('aria-label')));
    assert.ok(texts.length > 1 && texts.every((text) => /^(queue|instance|image|start|run|stop|drain): .*\d/.test(text)), JSON.stringify(texts));
    assert.ok(texts.some((text) => /^run: .* on local/.test(text)), JSON.stringify(texts));
    await view.open('/fleets');
    const { rows: [instance] } = await server.call('/api/instances/rows');
    await waitFor('the heat map says what is taken', async () => {
      const { rows: [now] } = await server.call('/api/instances/rows');
      return view.page.getByRole('link', { name: `${instance.name}: ${now.blocks_busy} of ${now.blocks_total} blocks taken` }).isVisible();
    });
    await view.close();
  });
}
