// Builds the files again and compares them with those that are committed: plain files byte for byte, compressed ones after
// unpacking, because another Node may compress otherwise. `UPDATE=1` writes them instead.
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, readdirSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { brotliDecompressSync, gunzipSync } from 'node:zlib';

const ROOT = fileURLToPath(new URL('..', import.meta.url));
const FIX = 'cargo xtask web';
const build = (dir) => {
  const env = dir ? { ...process.env, WINDLASS_WEB_DIST: dir } : process.env;
  execFileSync(join(ROOT, 'node_modules/.bin/vite'), ['build', '--logLevel', 'error'], { cwd: ROOT, env, stdio: ['ignore', 'ignore', 'inherit'] });
  execFileSync(process.execPath, [join(ROOT, 'scripts/pack.mjs')], { cwd: ROOT, env, stdio: ['ignore', 'ignore', 'inherit'] });
};
if (process.env.UPDATE) {
  build(null);
  process.exit(0);
}

function files(dir, below = dir) {
  return readdirSync(dir).flatMap((name) => {
    const path = join(dir, name);
    return statSync(path).isDirectory() ? files(path, below) : [relative(below, path)];
  });
}
function content(path) {
  const bytes = readFileSync(path);
  if (path.endsWith('.br')) return brotliDecompressSync(bytes);
  if (path.endsWith('.gz')) return gunzipSync(bytes);
  return bytes;
}
const fresh = mkdtempSync(join(tmpdir(), 'windlass-web-dist-'));
const problems = [];
try {
  build(fresh);
  const [built, kept] = [files(fresh), files(join(ROOT, 'dist'))];
  for (const name of built.filter((one) => !kept.includes(one))) problems.push(`web/dist/${name} is missing`);
  for (const name of kept.filter((one) => !built.includes(one))) problems.push(`web/dist/${name} is not built from the sources`);
  for (const name of built.filter((one) => kept.includes(one))) {
    if (!content(join(fresh, name)).equals(content(join(ROOT, 'dist', name)))) problems.push(`web/dist/${name} differs`);
  }
} finally {
  rmSync(fresh, { recursive: true, force: true });
}
if (problems.length) {
  console.error(`${problems.slice(0, 10).join('\n')}\n${problems.length} files of web/dist do not match the sources: run \`${FIX}\` and commit the result`);
  process.exit(1);
}
console.log('web/dist matches the sources');
