/**
 * Rows of one kind by id. Rows are plain objects that are replaced whole.
 *
 * Rows come from lists and from the feed, in any order and more than once. Of two for the same id the one that was read
 * later by the database's clock (`as_of`) stays; so the order in which they arrive does not matter.
 */

const TOMBSTONES_MAX = 10_000;

export class Table<Row> {
  readonly rows = new Map<string, Row>();
  readonly #read = new Map<string, number>();
  readonly #gone = new Map<string, number>();

  /** Answers whether the row is now the one that is kept and was not before. */
  put(id: string, row: Row, asOf: number): boolean {
    if ((this.#gone.get(id) ?? -1) >= asOf) return false;
    const before = this.#read.get(id);
    if (before !== undefined && before >= asOf) return false;
    this.#gone.delete(id);
    this.#read.set(id, asOf);
    this.rows.set(id, row);
    return true;
  }

  remove(id: string, asOf: number): boolean {
    const before = this.#read.get(id);
    if (before !== undefined && before > asOf) return false;
    const known = this.#gone.get(id);
    if (known === undefined || known < asOf) {
      this.#gone.delete(id);
      this.#gone.set(id, asOf);
      if (this.#gone.size > TOMBSTONES_MAX) {
        const oldest = this.#gone.keys().next().value;
        if (oldest !== undefined) this.#gone.delete(oldest);
      }
    }
    this.#read.delete(id);
    return this.rows.delete(id);
  }

  clear(): void {
    this.rows.clear();
    this.#read.clear();
    this.#gone.clear();
  }

  /** Drops rows that nothing shows, so that a tab of many hours stays small. */
  keepOnly(ids: Set<string>): void {
    for (const id of this.rows.keys()) {
      if (!ids.has(id)) {
        this.rows.delete(id);
        this.#read.delete(id);
      }
    }
  }
}
