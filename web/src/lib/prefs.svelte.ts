/** Preferences of this browser. Nothing secret is stored. */

export interface Prefs {
  theme: 'system' | 'light' | 'dark';
  density: 'compact' | 'cosy';
  /** Single keys can be switched off (WCAG 2.1.4). */
  keys: boolean;
  zone: 'local' | 'utc';
  /** Project of pages that need one. */
  project: string;
  /** Columns that are hidden, by page. */
  hidden: Record<string, string[]>;
}

const KEY = 'windlass.prefs';
const DEFAULTS: Prefs = { theme: 'system', density: 'cosy', keys: true, zone: 'local', project: '', hidden: {} };

function load(): Prefs {
  try {
    return { ...DEFAULTS, ...(JSON.parse(localStorage.getItem(KEY) ?? '{}') as Partial<Prefs>) };
  } catch {
    return { ...DEFAULTS };
  }
}

export const prefs = $state<Prefs>(load());

export function savePrefs(): void {
  try {
    localStorage.setItem(KEY, JSON.stringify(prefs));
  } catch {
    // Storage is full or forbidden: the preferences last as long as the tab.
  }
  applyTheme();
}

export function applyTheme(): void {
  const root = document.documentElement;
  if (prefs.theme === 'system') delete root.dataset.theme;
  else root.dataset.theme = prefs.theme;
  root.dataset.density = prefs.density;
}
