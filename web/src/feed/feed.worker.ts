/** The streams of all tabs of a browser: one feed, one stream of blocks, and the turns of logs, however many tabs there are. */
import { BlockStream } from './blocks';
import { FeedConnection, type FeedMessage, type FromTab } from './connection';
import { LogStreams } from './streams';

const ports = new Set<MessagePort>();
/** Tabs that show blocks. */
const watchers = new Set<MessagePort>();
const connection = new FeedConnection((message) => {
  for (const port of ports) port.postMessage(message);
});
const blocks = new BlockStream((known) => {
  for (const port of watchers) port.postMessage({ type: 'blocks', blocks: known } satisfies FeedMessage);
});
const logs = new LogStreams<MessagePort>((port, id, isGranted) => port.postMessage({ type: 'log-stream', id, isGranted } satisfies FeedMessage));

interface SharedScope {
  onconnect: ((event: MessageEvent) => void) | null;
}

function unwatch(port: MessagePort): void {
  watchers.delete(port);
  if (watchers.size === 0) blocks.stop();
}
function leave(port: MessagePort): void {
  ports.delete(port);
  unwatch(port);
  logs.drop(port);
  if (ports.size === 0) connection.stop();
}

(globalThis as unknown as SharedScope).onconnect = (event) => {
  const port = event.ports[0];
  if (!port) return;
  ports.add(port);
  port.onmessage = ({ data }: MessageEvent<FromTab>) => {
    if (data.type === 'leave') leave(port);
    else if (data.type === 'log') logs[data.isWanted ? 'want' : 'release'](port, data.id);
    else if (!data.areWanted) unwatch(port);
    else {
      watchers.add(port);
      if (blocks.known.size) port.postMessage({ type: 'blocks', blocks: blocks.known } satisfies FeedMessage);
      blocks.start();
    }
  };
  // A tab that crashed says nothing; browsers that know this event tell of it.
  port.addEventListener('close', () => leave(port));
  if (connection.hello) port.postMessage({ type: 'hello', hello: connection.hello } satisfies FeedMessage);
  port.postMessage({ type: 'state', state: connection.state } satisfies FeedMessage);
  connection.start();
};
