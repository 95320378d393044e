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
  | { type: 'search'; q: string; regex: boolean; ignoreCase: boolean; context: number }
  | { type: 'search-stop' }
  | { type: 'text'; from: number; to: number; ticket: number };

export interface ShownLine {
  /** Offset in the log. */
  offset: number;
  /** Bytes of the line. */
  length: number;
  text: string;
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
  | { type: 'hits'; hits: LogHit[]; scanned: number; size: number; done: boolean; more: boolean; error: string | null }
  | { type: 'text'; text: string; ticket: number };
