/** The feed of all tabs of a browser: one connection, however many tabs there are. */
import { FeedConnection, type FeedMessage } from './connection';

const ports = new Set<MessagePort>();
const connection = new FeedConnection((message) => {
  for (const port of ports) port.postMessage(message);
});

interface SharedScope {
  onconnect: ((event: MessageEvent) => void) | null;
}

(globalThis as unknown as SharedScope).onconnect = (event) => {
  const port = event.ports[0];
  if (!port) return;
  ports.add(port);
  port.onmessage = ({ data }: MessageEvent<'leave'>) => {
    if (data !== 'leave') return;
    ports.delete(port);
    if (ports.size === 0) connection.stop();
  };
  if (connection.hello) port.postMessage({ type: 'hello', hello: connection.hello } satisfies FeedMessage);
  port.postMessage({ type: 'state', state: connection.state } satisfies FeedMessage);
  connection.start();
};
