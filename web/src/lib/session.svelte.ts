/** Who is logged in. */
import { session as api, type Session } from '../api/api';
import { clearRows, closeFeed, openFeed } from '../store/store.svelte';
import { ApiError, onSessionLost } from './call';
import { time } from './clock.svelte';
import { prefs } from './prefs.svelte';
import { go, route } from './route.svelte';

let current = $state.raw<Session | null>(null);
let known = $state(false);
let failure = $state.raw<ApiError | null>(null);
let refused = $state<string | null>(null);

export const auth = {
  /** Null before login. */
  get session(): Session | null {
    return current;
  },
  /** Whether the server was asked. */
  get known(): boolean {
    return known;
  },
  /** Why the server could not be asked. */
  get failure(): ApiError | null {
    return failure;
  },
  /** Why the code of the address opened no session. */
  get refused(): string | null {
    return refused;
  },
  get isAdmin(): boolean {
    return current?.user.global_role === 'admin';
  },
  get username(): string {
    return current?.user.username ?? '';
  },
  /** Names of projects the caller may see. */
  get projects(): string[] {
    return current?.projects.map((project) => project.name) ?? [];
  },
  projectId(name: string): string | null {
    return current?.projects.find((project) => project.name === name)?.id ?? null;
  },
  role(project: string): string | null {
    return current?.projects.find((entry) => entry.name === project)?.role ?? null;
  },
  /** Project of pages that need one: the preferred, else the first. */
  get project(): string {
    return auth.projects.includes(prefs.project) ? prefs.project : (auth.projects[0] ?? '');
  },
};

function setSession(session: Session): void {
  current = session;
  failure = null;
  refused = null;
  time.set(session.now);
  openFeed();
}

/** Opens a session if the identity provider has sent the browser here; undefined if it has not. */
function finishLogin(): Promise<Session> | undefined {
  if (route.path !== '/login') return undefined;
  const [code, state, error] = [route.get('code'), route.get('state'), route.get('error')];
  // Nothing of it stays in the address or the history.
  go('/', { replace: true });
  if (code && state) return api.finishOidc({ code, state });
  if (error) refused = `The identity provider ended the login: ${error.replaceAll('_', ' ')}.`;
  return undefined;
}

/** Asks for the session of the cookie; a code in the fragment or of the identity provider opens one first. */
export async function restoreSession(): Promise<void> {
  onSessionLost(() => {
    current = null;
    closeFeed();
    clearRows();
  });
  const code = /^#code=([\w-]+)$/.exec(location.hash)?.[1];
  if (location.hash) history.replaceState(null, '', location.pathname + location.search);
  const finishing = finishLogin();
  try {
    setSession(await (finishing ?? (code ? api.open({ code }) : api.get())));
  } catch (error) {
    if (error instanceof ApiError && finishing) refused = error.message;
    else if (error instanceof ApiError && error.status !== 401) failure = error;
    else if (error instanceof ApiError && code) refused = error.message;
  }
  known = true;
}

/** Asks again for user, roles and projects. */
export async function refreshSession(): Promise<void> {
  current = await api.get();
}

export async function login(token: string): Promise<void> {
  setSession(await api.open({ token }));
}

export async function logout(): Promise<void> {
  closeFeed();
  try {
    await api.close();
  } finally {
    current = null;
    clearRows();
  }
}
