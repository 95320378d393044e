// Makes the pictures of the documentation from the made-up world, which stands still: node tests/pages/pictures.mjs [name…]
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { addresses, openBrowser, openPage, openServer, settle } from './browser.mjs';

const DIR = fileURLToPath(new URL('../../../docs/pictures', import.meta.url));
const LARGEST = 100 * 1024;
const DESKTOP = { width: 1280, height: 800 };
/** Lists with many columns need the width. */
const WIDE = { width: 1440, height: 800 };
const PHONE = { width: 390, height: 844 };
/** Picture, page, and how it is shown: what is done first, and what stands at the top. */
const PICTURES = [
  ['overview', 'overview', DESKTOP], ['runs', 'runs', WIDE], ['story', 'run-lost', DESKTOP], ['why', 'run-waits', DESKTOP], ['logs', 'logs', { ...DESKTOP, query: '&find=checkpoint', act: (page) => page.locator('.a-hit').first().waitFor() }], ['compare', 'compare', { ...DESKTOP, act: async (page) => { await page.getByRole('button', { name: 'Go to the first difference' }).click(); await page.getByText('The first difference is in line').waitFor(); } }], ['queue', 'queue', DESKTOP],
  ['fleets', 'fleets', { ...DESKTOP, dark: true }], ['job', 'job', DESKTOP], ['launch', 'launch', DESKTOP], ['service', 'service', DESKTOP], ['costs', 'costs', DESKTOP], ['phone', 'run-waits', PHONE],
];

const words = process.argv.slice(2);
mkdirSync(DIR, { recursive: true });
const server = await openServer({ frozen: true });
const browser = await openBrowser({ hasScrollbars: true });
const pages = addresses(server.world);
/** PNG as WebP, small enough for a repository. */
async function compress(png) {
  const page = await browser.newPage();
  for (const quality of [0.9, 0.8, 0.7, 0.5]) {
    const data = await page.evaluate(async ([source, quality]) => {
      const image = await createImageBitmap(await (await fetch(source)).blob());
      const canvas = new OffscreenCanvas(image.width, image.height);
      canvas.getContext('2d').drawImage(image, 0, 0);
      const blob = await canvas.convertToBlob({ type: 'image/webp', quality });
      const bytes = new Uint8Array(await blob.arrayBuffer());
      let text = '';
      for (const byte of bytes) text += String.fromCharCode(byte);
      return btoa(text);
    }, [`data:image/png;base64,${png.toString('base64')}`, quality]);
    const bytes = Buffer.from(data, 'base64');
    if (bytes.length <= LARGEST || quality === 0.5) {
      await page.close();
      return bytes;
    }
  }
}
for (const [name, path, { dark = false, query = '', act, ...size }] of PICTURES) {
  if (words.length && !words.includes(name)) continue;
  const view = await openPage(browser, { url: server.url, dark, ...size });
  await view.open(pages[path] + query);
  if (act) { await act(view.page); await settle(view.page); }
  const bytes = await compress(await view.page.screenshot());
  writeFileSync(join(DIR, `ui-${name}.webp`), bytes);
  console.log(`${name}: ${(bytes.length / 1024).toFixed(0)} KB`);
  await view.close();
}
await browser.close();
server.close();
