// A browser at a real server, with everything that must not happen collected.
import AxeBuilder from '@axe-core/playwright';
import { countCalls, openBrowser, settle } from '../pages/browser.mjs';

export { openBrowser, settle };

const TAGS = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'];
const RULES = { 'heading-order': { enabled: true }, 'page-has-heading-one': { enabled: true }, region: { enabled: true } };

/** A context that is logged in with a single-use code, as `windlass ui` logs in. */
export async function openSession(browser, server, { width = 1440, height = 900, dark = false, token = server.token } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: dark ? 'dark' : 'light', timezoneId: 'UTC', reducedMotion: 'reduce' });
  await context.addInitScript(() => {
    globalThis.violations = [];
    document.addEventListener('securitypolicyviolation', (event) => globalThis.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample} (${event.sourceFile}:${event.lineNumber})`));
  });
  const page = await context.newPage();
  const { code } = await server.call('/api/session/code', {}, token);
  await page.goto(`${server.url}/ui/#code=${code}`);
  await page.waitForSelector('#main');
  await page.close();
  return { context, view: () => openView(context, server), close: () => context.close() };
}

/** A page of a session, which collects console messages, failed calls and violations of the policy. */
export async function openView(context, server) {
  const page = await context.newPage();
  countCalls(page);
  const problems = [];
  // What the page of an identity provider fails to load is not ours; the policy stops foreign files on pages of this server.
  const foreign = (message) => message.text().startsWith('Failed to load resource') && !message.location().url.startsWith(server.url);
  page.on('console', (message) => { if (['error', 'warning'].includes(message.type()) && !foreign(message)) problems.push(`console: ${message.text()}`); });
  page.on('pageerror', (error) => problems.push(`error: ${error.message}`));
  page.on('response', (response) => { if (response.status() >= 400) problems.push(`${response.status()} ${new URL(response.url()).pathname}`); });
  return {
    page,
    open: async (path) => {
      await page.goto(`${server.url}/ui${path}`);
      await page.waitForSelector('#main, .login');
      await settle(page);
    },
    problems: async () => [...problems, ...(await page.evaluate(() => globalThis.violations ?? []))],
    forget: () => { problems.length = 0; },
    close: () => page.close(),
  };
}

/** Findings of axe, one line each. In dark mode only what depends on colours is asked again. */
export async function axe(page, { colours = false } = {}) {
  const builder = new AxeBuilder({ page });
  if (colours) builder.withRules(['color-contrast', 'link-in-text-block']);
  else builder.options({ runOnly: { type: 'tag', values: TAGS }, rules: RULES, resultTypes: ['violations'] });
  const { violations } = await builder.analyze();
  return violations.map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => `${node.target.join(' ')} ${node.failureSummary?.split('\n')[1] ?? ''}`).join('; ')}`);
}
