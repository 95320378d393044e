/**
 * The filter language of lists: `status:failed user:ada fleet:gpu-a,gpu-b since:2h text`.
 *
 * Tokens are separated by spaces; a value with spaces stands in double quotes. Values of one name are alternatives. Words
 * without a name are searched for in names, users and reasons.
 */
import type { ContainerRow, InstanceRow, ManagedJobRow, RowsRequest, RunRow } from '../api/api';
import { readDuration } from './time';

export interface Filter {
  /** Values by name, in the order they were written. */
  values: Record<string, string[]>;
  text: string;
}

export const NAMES = ['status', 'user', 'project', 'type', 'fleet', 'since', 'until'] as const;
export type Name = (typeof NAMES)[number];

const TOKEN = /"([^"]*)"|(\S+)/g;

export function parse(input: string): Filter {
  const values: Record<string, string[]> = {};
  const words: string[] = [];
  for (const token of tokens(input)) {
    const colon = token.indexOf(':');
    const name = colon > 0 ? token.slice(0, colon).toLowerCase() : '';
    if ((NAMES as readonly string[]).includes(name)) {
      const list = (values[name] ??= []);
      for (const value of token.slice(colon + 1).split(',')) {
        if (value !== '' && !list.includes(value)) list.push(value);
      }
      if (list.length === 0) delete values[name];
    } else {
      words.push(token);
    }
  }
  return { values, text: words.join(' ') };
}

/** Tokens of the input; `name:"two words"` is one. */
function tokens(input: string): string[] {
  const found: string[] = [];
  const joined = input.replace(/(\w+):"([^"]*)"/g, (_, name: string, value: string) => `${name}:${value.replaceAll(' ', '\u0000')}`);
  for (const match of joined.matchAll(TOKEN)) {
    const token = (match[1] ?? match[2] ?? '').replaceAll('\u0000', ' ');
    if (token !== '') found.push(token);
  }
  return found;
}

export function format(filter: Filter): string {
  const parts: string[] = [];
  for (const name of NAMES) {
    const list = filter.values[name];
    if (!list?.length) continue;
    const value = list.join(',');
    parts.push(value.includes(' ') ? `${name}:"${value}"` : `${name}:${value}`);
  }
  if (filter.text) parts.push(filter.text);
  return parts.join(' ');
}

/** The filter with a value added, or removed when it is there. */
export function toggle(input: string, name: Name, value: string): string {
  const filter = parse(input);
  const list = filter.values[name] ?? [];
  filter.values[name] = list.includes(value) ? list.filter((other) => other !== value) : [...list, value];
  return format(filter);
}

export function has(input: string, name: Name, value: string): boolean {
  return parse(input).values[name]?.includes(value) ?? false;
}

/** The request that asks the server for what the filter means. */
export function request(filter: Filter, now: number): RowsRequest {
  const body: RowsRequest = {};
  const { status, user, project, type, fleet } = filter.values;
  if (status) body.statuses = status;
  if (user) body.users = user;
  if (project) body.projects = project;
  if (type) body.types = type;
  if (fleet) body.fleets = fleet;
  if (filter.text) body.text = filter.text;
  const since = time(filter.values.since?.[0], now);
  const until = time(filter.values.until?.[0], now);
  if (since) body.since = since;
  if (until) body.until = until;
  return body;
}

/** `2h` is two hours ago; a date or time is itself. */
function time(text: string | undefined, now: number): string | null {
  if (!text) return null;
  const ago = readDuration(text);
  const ms = ago === null ? Date.parse(text) : now - ago * 1000;
  return Number.isNaN(ms) ? null : new Date(ms).toISOString();
}

type AnyRow = RunRow | InstanceRow | ManagedJobRow | ContainerRow;

/** Whether a row of the feed belongs to the list of a request, by the rules the server has. */
export function matches(row: AnyRow, body: RowsRequest): boolean {
  const text = (name: string): string | null => {
    const value = (row as unknown as Record<string, unknown>)[name];
    return typeof value === 'string' ? value : null;
  };
  const user = text('user') ?? text('owner');
  const status = text('status') ?? text('state');
  const type = text('type') ?? text('backend') ?? text('schedule_state') ?? text('dispatcher');
  const at = text('submitted_at') ?? text('created_at');
  if (body.projects?.length && !body.projects.includes(text('project') ?? '')) return false;
  if (body.users?.length && !body.users.includes(user ?? '')) return false;
  if (body.statuses?.length && !body.statuses.includes(status ?? '')) return false;
  if (body.types?.length && !body.types.includes(type ?? '')) return false;
  if (body.fleets?.length && !body.fleets.includes(text('fleet') ?? '')) return false;
  if (body.since && at && at < body.since) return false;
  if (body.until && at && at >= body.until) return false;
  if (body.text) {
    const wanted = body.text.toLowerCase();
    const where = [text('name'), user, text('reason'), text('message'), text('said'), text('id')];
    if (!where.some((part) => part?.toLowerCase().includes(wanted))) return false;
  }
  return true;
}
