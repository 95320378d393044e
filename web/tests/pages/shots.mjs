// Pictures of the pages: node tests/pages/shots.mjs DIR [name…] [--dark] [--phone] [--empty]
import { mkdirSync } from 'node:fs';
import { addresses, openBrowser, openPage, openServer } from './browser.mjs';

const [dir, ...rest] = process.argv.slice(2);
const names = rest.filter((arg) => !arg.startsWith('--'));
const dark = rest.includes('--dark');
const phone = rest.includes('--phone');
mkdirSync(dir, { recursive: true });
const server = await openServer({ frozen: true, empty: rest.includes('--empty') });
const browser = await openBrowser({ hasScrollbars: true });
const all = rest.includes('--empty') ? { overview: '/', runs: '/runs', jobs: '/jobs', queue: '/queue', services: '/services', me: '/me', usage: '/usage', limits: '/projects/research?tab=limits', sharing: '/projects/research?tab=sharing', backends: '/admin?tab=backends', containers: '/containers', fleets: '/fleets', volumes: '/volumes', gateways: '/gateways', costs: '/costs', events: '/events' } : addresses(server.world);
for (const [name, path] of Object.entries(all)) {
  if (names.length && !names.includes(name)) continue;
  const view = await openPage(browser, { url: server.url, dark, ...(phone ? { width: 390, height: 844 } : {}) });
  await view.open(path);
  await view.page.screenshot({ path: `${dir}/${name}${dark ? '-dark' : ''}${phone ? '-phone' : ''}.png` });
  const problems = await view.problems();
  if (problems.length) console.log(name, problems);
  await view.close();
}
await browser.close();
server.close();
