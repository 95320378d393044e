/** The page's own Trusted Types policy: lets the addresses of its workers through and nothing else. */

interface Policy {
  createScriptURL(url: string): unknown;
}
interface Factory {
  createPolicy(name: string, rules: { createScriptURL: (url: string) => string }): Policy;
}

const factory = (globalThis as { trustedTypes?: Factory }).trustedTypes;
const WORKER = /^\/ui\/assets\/[A-Za-z0-9._-]+\.js$/;

const rules = {
  createScriptURL(url: string): string {
    const { origin, pathname } = new URL(url, location.href);
    if (origin !== location.origin || !WORKER.test(pathname)) throw new TypeError(`not a worker of this page: ${url}`);
    return url;
  },
};

const policy = factory?.createPolicy('windlass', rules);

/** The address of a worker as the browser wants it. */
export function workerUrl(url: string): string {
  return policy ? (policy.createScriptURL(url) as string) : rules.createScriptURL(url);
}
