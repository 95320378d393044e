/** Who is logged in. */
import { session as api, type Session } from '../api/api';
import { closeFeed, openFeed } from '../store/store.svelte';
import { ApiError, onSessionLost } from './call';
import { time } from './clock.svelte';
import { prefs } from './prefs.svelte';

let current = $state.raw<Session | null>(null);
let known = $state(false);
let failure = $state.raw<ApiError | null>(null);

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
  time.set(session.now);
  openFeed();
}

/** Asks for the session of the cookie; a code in the fragment opens one first. */
export async function restoreSession(): Promise<void> {
  onSessionLost(() => {
    current = null;
    closeFeed();
  });
  const code = /^#code=([\w-]+)$/.exec(location.hash)?.[1];
  if (location.hash) history.replaceState(null, '', location.pathname + location.search);
  try {
    setSession(code ? await api.open({ code }) : await api.get());
  } catch (error) {
    if (error instanceof ApiError && error.status !== 401) failure = error;
  }
  known = true;
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
  }
}
