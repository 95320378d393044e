// Rules that the compilers do not know: text nodes only, no literal styles, no addresses of others, permissive licences.
import { existsSync, readFileSync, readdirSync, statSync } from 'node:fs';
import { join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';

const ROOT = fileURLToPath(new URL('..', import.meta.url));
const RULES = [
  [/\{@html\b/, 'text of others reaches the page as text nodes'],
  [/\.(innerHTML|outerHTML)\b|insertAdjacentHTML|document\.write|createContextualFragment/, 'text of others reaches the page as text nodes'],
  [/\sstyle="/, 'the policy forbids literal styles; use style:NAME or a class'],
  [/\beval\(|new Function\(/, 'the policy forbids code from text'],
  [/\b(sessionStorage|indexedDB)\b/, 'nothing is stored but preferences'],
  [/localStorage/, 'only prefs.svelte.ts stores', /prefs\.svelte\.ts$/],
  [/new EventSource\(/, 'streams are read with readEvents, which sends the header'],
  [/https?:\/\/(?!www\.w3\.org)[a-z]/, 'no addresses of others'],
];
const problems = [];
function walk(dir) {
  for (const name of readdirSync(dir)) {
    const path = join(dir, name);
    if (statSync(path).isDirectory()) walk(path);
    else if (/\.(svelte|ts|html|css)$/.test(name)) check(path);
  }
}
function check(path) {
  readFileSync(path, 'utf8').split('\n').forEach((line, n) => {
    for (const [pattern, why, except] of RULES) {
      if (pattern.test(line) && !except?.test(path)) problems.push(`${relative(ROOT, path)}:${n + 1}: ${why}`);
    }
  });
}
walk(join(ROOT, 'src'));
check(join(ROOT, 'index.html'));

const lock = JSON.parse(readFileSync(join(ROOT, 'package-lock.json'), 'utf8'));
const SHIPPED = new Set(['MIT', 'Apache-2.0', 'BSD-2-Clause', 'BSD-3-Clause', 'ISC', '0BSD', 'MIT-0']);
const TOOLS = new Set([...SHIPPED, 'MPL-2.0', 'Python-2.0', 'CC0-1.0', 'BlueOak-1.0.0', 'CC-BY-4.0', 'MIT OR Apache-2.0', '(MIT OR CC0-1.0)']);
for (const [path, entry] of Object.entries(lock.packages)) {
  if (path === '') continue;
  if (entry.resolved) problems.push(`package-lock.json: ${path} has an address`);
  if (!entry.integrity && !entry.optional) problems.push(`package-lock.json: ${path} has no checksum`);
  const file = join(ROOT, path, 'package.json');
  const license = entry.license ?? (existsSync(file) ? JSON.parse(readFileSync(file, 'utf8')).license : undefined);
  if (license === undefined) continue;
  if (!(entry.dev ? TOOLS : SHIPPED).has(license)) problems.push(`package-lock.json: ${path} has the licence ${license}`);
  if (entry.hasInstallScript && !entry.optional) problems.push(`package-lock.json: ${path} has an install script`);
}
for (const [name, version] of Object.entries({ ...lock.packages[''].dependencies, ...lock.packages[''].devDependencies })) {
  if (!/^\d+\.\d+\.\d+$/.test(version)) problems.push(`package.json: ${name} is not pinned`);
}
if (problems.length) {
  console.error(problems.join('\n'));
  process.exit(1);
}
console.log('rules hold');
