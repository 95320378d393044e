/** The address as state: path, parameters and query. */

export const BASE = '/ui';

export interface Route {
  /** Path below `/ui`, with a leading slash. */
  path: string;
  query: URLSearchParams;
}

function read(): Route {
  const path = location.pathname.startsWith(BASE) ? location.pathname.slice(BASE.length) : location.pathname;
  return { path: path === '' ? '/' : path, query: new URLSearchParams(location.search) };
}

let current = $state.raw<Route>(read());

export const route = {
  get path(): string {
    return current.path;
  },
  get query(): URLSearchParams {
    return current.query;
  },
  /** Value of the query, or the fallback. */
  get(name: string, fallback = ''): string {
    return current.query.get(name) ?? fallback;
  },
};

/** Goes to a path below `/ui`, query included. */
export function go(to: string, options: { replace?: boolean } = {}): void {
  const url = BASE + to;
  if (url === location.pathname + location.search) return;
  const leavesPage = new URL(url, location.href).pathname !== location.pathname;
  if (options.replace) history.replaceState(history.state, '', url);
  else history.pushState(null, '', url);
  current = read();
  if (leavesPage) queueMicrotask(() => document.getElementById('main')?.scrollTo(0, 0));
}

/** Changes values of the query; null, undefined and empty ones are removed. */
export function setQuery(values: Record<string, string | number | null | undefined>, options: { replace?: boolean } = { replace: true }): void {
  const query = new URLSearchParams(current.query);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === '') query.delete(name);
    else query.set(name, String(value));
  }
  const text = query.toString();
  go(current.path + (text ? `?${text}` : ''), options);
}

/** An address for a link. Parts are encoded. */
export function href(...parts: (string | number)[]): string {
  return `${BASE}/${parts.map((part) => encodeURIComponent(part)).join('/')}`;
}

/** Parameters of a pattern like `/runs/:project/:name`; null when the path is another. */
export function match(pattern: string, path: string): Record<string, string> | null {
  const wanted = pattern.split('/');
  const given = path.replace(/\/+$/, '').split('/');
  if (wanted.length !== given.length) return null;
  const values: Record<string, string> = {};
  for (const [i, part] of wanted.entries()) {
    const text = given[i] ?? '';
    if (part.startsWith(':')) {
      try {
        values[part.slice(1)] = decodeURIComponent(text);
      } catch {
        return null;
      }
      if (text === '') return null;
    } else if (part !== text) return null;
  }
  return values;
}

/** Follows links inside the UI without loading the page again. */
export function followLinks(): void {
  addEventListener('popstate', () => {
    current = read();
  });
  document.addEventListener('click', (event) => {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = (event.target as Element | null)?.closest?.('a');
    if (!link || link.target || link.hasAttribute('download')) return;
    const url = new URL(link.href, location.href);
    if (url.origin !== location.origin || !(url.pathname === BASE || url.pathname.startsWith(`${BASE}/`))) return;
    event.preventDefault();
    go(url.pathname.slice(BASE.length) + url.search || '/');
  });
}
