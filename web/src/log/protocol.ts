/** What the page and the worker of a log say to each other. */
import type { LogHit, LogRef } from '../api/api';

export type ToWorker =
  /** Opens a log near an offset, or at its end. */
  | { type: 'open'; log: LogRef; at: number | 'end' }
  /** Asks for lines of the part that is kept. */
  | { type: 'window'; first: number; count: number; ticket: number }
  /** Makes the part hold an offset; answered by a state with `landed`. */
  | { type: 'seek'; at: number | 'end' }
  /** The reader is near an end of the part. */
  | { type: 'extend'; where: 'before' | 'after' }
  /** Searches the log, and what is added to it, until another search begins or this one is stopped. */
  | { type: 'search'; q: string; regex: boolean; ignoreCase: boolean; context: number; ticket: number }
  | { type: 'search-stop' }
  /** Whether the log may be followed by a stream; else it is read every few seconds. */
  | { type: 'stream'; isGranted: boolean }
  | { type: 'text'; from: number; to: number; ticket: number };

export interface ShownLine {
  /** Offset in the log. */
  offset: number;
  /** Bytes of the line. */
  length: number;
  text: string;
  /** Its bytes, where they are not its characters one by one. */
  bytes: Uint8Array | null;
  /** Whether it goes on in the next one. */
  cut: boolean;
}

export interface LogState {
  /** The part that is kept, `[start, end)`. */
  start: number;
  end: number;
  /** First byte and size of the whole log. */
  first: number;
  size: number;
  /** Lines of the part. */
  lines: number;
  /** Whether new bytes are read as they come. */
  attached: boolean;
  /** How the job ended, once nothing will be added. */
  ended: { status: string; exit_status: number | null; termination_reason: string | null } | null;
  error: string | null;
}

export type FromWorker =
  /** `shift`: lines that came before the first one (negative: that went). `landed`: line of a seek. */
  | { type: 'state'; state: LogState; shift: number; landed: number | null }
  | { type: 'lines'; first: number; lines: ShownLine[]; ticket: number }
  /** Times of offsets, newest last. */
  | { type: 'marks'; marks: [number, number][] }
  /** Hits of the search with this ticket, in the order of the log. They replace all known ones from offset `from` on. */
  | { type: 'hits'; ticket: number; from: number | null; hits: LogHit[]; scanned: number; size: number; done: boolean; more: boolean; error: string | null }
  /** Hits in the lines that were asked for last, where the search found more than it lists. */
  | { type: 'window-hits'; ticket: number; hits: LogHit[] }
  | { type: 'text'; text: string; ticket: number };
