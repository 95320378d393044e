/** Completion from a JSON Schema: which fields may stand at a line, and which values a field takes. */
import type { Document } from '../api/api';

type Node = Record<string, unknown>;

export interface Field {
  name: string;
  detail: string;
}

function isNode(value: unknown): value is Node {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** The node with its reference followed. */
function follow(schema: Node, node: Node): Node {
  let at = node;
  for (let depth = 0; depth < 8 && typeof at.$ref === 'string'; depth++) {
    const parts = at.$ref.replace(/^#\//, '').split('/');
    let next: unknown = schema;
    for (const part of parts) next = isNode(next) ? next[part.replaceAll('~1', '/').replaceAll('~0', '~')] : undefined;
    if (!isNode(next)) return {};
    at = next;
  }
  return at;
}

/** Every alternative of a node. */
function alternatives(schema: Node, node: Node, depth = 0): Node[] {
  const at = follow(schema, node);
  if (depth > 6) return [at];
  const lists = ['oneOf', 'anyOf', 'allOf'].flatMap((name) => (Array.isArray(at[name]) ? (at[name] as unknown[]).filter(isNode) : []));
  const items = isNode(at.items) ? [at.items] : [];
  return [at, ...[...lists, ...items].flatMap((entry) => alternatives(schema, entry, depth + 1))];
}

function properties(schema: Node, node: Node): Map<string, Node> {
  const found = new Map<string, Node>();
  for (const option of alternatives(schema, node)) {
    if (!isNode(option.properties)) continue;
    for (const [name, value] of Object.entries(option.properties)) if (isNode(value) && !found.has(name)) found.set(name, value);
  }
  return found;
}

/** Names of the fields around a line, the outermost first. */
export function pathTo(text: string, line: number): string[] {
  const lines = text.split('\n');
  const path: string[] = [];
  const indent = (value: string) => /^\s*/.exec(value)?.[0].length ?? 0;
  let depth = indent(lines[line - 1] ?? '');
  for (let i = line - 2; i >= 0 && depth > 0; i--) {
    const match = /^(\s*)(?:- )?([\w.-]+):/.exec(lines[i] ?? '');
    if (match && (match[1] ?? '').length < depth) {
      path.unshift(match[2] ?? '');
      depth = (match[1] ?? '').length;
    }
  }
  return path;
}

/** Alternatives for the `type` that the text names. */
function rootOf(schema: Node, text: string): Node {
  const type = /^type:\s*([\w-]+)/m.exec(text)?.[1];
  if (!type) return schema;
  for (const option of alternatives(schema, schema)) {
    const kind = isNode(option.properties) && isNode(option.properties.type) ? follow(schema, option.properties.type) : null;
    if (kind && (kind.const === type || (Array.isArray(kind.enum) && kind.enum.includes(type)))) return option;
  }
  return schema;
}

function nodeAt(schema: Node, text: string, line: number): Node {
  let node = rootOf(schema, text);
  for (const name of pathTo(text, line)) node = properties(schema, node).get(name) ?? {};
  return node;
}

export function fieldsAt(schema: Document, text: string, line: number): Field[] {
  return [...properties(schema, nodeAt(schema, text, line))].map(([name, node]) => {
    const description = typeof node.description === 'string' ? node.description : '';
    return { name, detail: description.split('\n')[0]?.slice(0, 60) ?? '' };
  });
}

export function valuesOf(schema: Document, text: string, line: number, name: string): string[] {
  const found = new Set<string>();
  for (const place of alternatives(schema, nodeAt(schema, text, line))) {
    const node = isNode(place.properties) ? place.properties[name] : undefined;
    if (!isNode(node)) continue;
    for (const option of alternatives(schema, node)) {
      if (typeof option.const === 'string') found.add(option.const);
      if (Array.isArray(option.enum)) for (const value of option.enum) if (typeof value === 'string') found.add(value);
      if (option.type === 'boolean') found.add('true').add('false');
    }
  }
  return [...found];
}
