/**
 * Streams of logs, of all tabs of a browser. Over HTTP/1.1 a browser opens six connections to a server: the feed and the
 * blocks take one each, two logs are followed, and two are left for calls. Further logs are read every few seconds.
 */
export const LOG_STREAMS_MAX = 2;

export class LogStreams<Owner> {
  #wanted: { owner: Owner; id: string; isGranted: boolean }[] = [];
  #tell: (owner: Owner, id: string, isGranted: boolean) => void;

  constructor(tell: (owner: Owner, id: string, isGranted: boolean) => void) {
    this.#tell = tell;
  }

  want(owner: Owner, id: string): void {
    if (this.#wanted.some((one) => one.owner === owner && one.id === id)) return;
    this.#wanted.push({ owner, id, isGranted: false });
    this.#grant();
  }

  release(owner: Owner, id: string): void {
    this.#wanted = this.#wanted.filter((one) => one.owner !== owner || one.id !== id);
    this.#grant();
  }

  /** Releases everything of a tab that is gone. */
  drop(owner: Owner): void {
    this.#wanted = this.#wanted.filter((one) => one.owner !== owner);
    this.#grant();
  }

  #grant(): void {
    for (const one of this.#wanted.slice(0, LOG_STREAMS_MAX)) {
      if (one.isGranted) continue;
      one.isGranted = true;
      this.#tell(one.owner, one.id, true);
    }
  }
}
