/** Time of the server, told once a second. */

let offset = 0;
let now = $state(Date.now());

export const time = {
  /** Milliseconds since 1970 by the server's clock; changes once a second. */
  get now(): number {
    return now;
  },
  /** The same, exact. */
  exact(): number {
    return Date.now() + offset;
  },
  /** Takes the server's time. */
  set(server: string): void {
    offset = Date.parse(server) - Date.now();
    if (Number.isNaN(offset) || Math.abs(offset) < 1000) offset = 0;
    now = Date.now() + offset;
  },
};

setInterval(() => {
  if (!document.hidden) now = Date.now() + offset;
}, 1000);
document.addEventListener('visibilitychange', () => {
  if (!document.hidden) now = Date.now() + offset;
});
