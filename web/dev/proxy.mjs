// The files of `dist` in front of a real server: shows a change of the UI without building the server again.
// `node dev/proxy.mjs http://127.0.0.1:3000 [port]`
import { readFileSync, existsSync, statSync } from 'node:fs';
import { createServer, request as send } from 'node:http';
import { connect } from 'node:net';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';
import { SECURITY, TYPES } from './server.mjs';

const DIST = process.env.WINDLASS_WEB_DIST ?? fileURLToPath(new URL('../dist/', import.meta.url));

/** Starts the proxy. Everything that is no file of the UI goes to the server as it is, `Host` and `Origin` included. */
export async function startProxy(target, port = 0) {
  const { hostname, port: targetPort } = new URL(target);
  const to = { host: hostname, port: Number(targetPort) };
  const server = createServer((req, res) => {
    const path = req.url.split('?')[0];
    if (path.startsWith('/ui/')) {
      const file = join(DIST, normalize(decodeURIComponent(path.slice(4))));
      const found = file.startsWith(DIST) && existsSync(file) && statSync(file).isFile() ? file : join(DIST, 'index.html');
      res.writeHead(200, { ...SECURITY, 'Content-Type': TYPES[extname(found)] ?? 'application/octet-stream', 'Cache-Control': 'no-store' });
      res.end(readFileSync(found));
      return;
    }
    const passed = send({ ...to, method: req.method, path: req.url, headers: req.headers }, (answer) => {
      res.writeHead(answer.statusCode, answer.rawHeaders.reduce((list, value, n) => (n % 2 ? list.at(-1).push(value) : list.push([value]), list), []).flat());
      res.flushHeaders();
      answer.pipe(res);
      answer.on('error', () => res.destroy());
    });
    passed.on('error', () => res.destroy());
    res.on('close', () => passed.destroy());
    req.pipe(passed);
  });
  server.on('upgrade', (req, socket, head) => {
    const other = connect(to.port, to.host, () => {
      const lines = [`${req.method} ${req.url} HTTP/1.1`];
      for (let n = 0; n < req.rawHeaders.length; n += 2) lines.push(`${req.rawHeaders[n]}: ${req.rawHeaders[n + 1]}`);
      other.write(`${lines.join('\r\n')}\r\n\r\n`);
      other.write(head);
      socket.pipe(other).pipe(socket);
    });
    other.on('error', () => socket.destroy());
    socket.on('error', () => other.destroy());
  });
  server.keepAliveTimeout = 1000;
  await new Promise((done) => server.listen(port, hostname, done));
  return { url: `http://${hostname}:${server.address().port}`, close: () => { server.close(); server.closeAllConnections(); } };
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [target = 'http://127.0.0.1:3000', port = '8088'] = process.argv.slice(2);
  const { url } = await startProxy(target, Number(port));
  console.log(`${url}/ui/ shows dist at ${target}`);
}
