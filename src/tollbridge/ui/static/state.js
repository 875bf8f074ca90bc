// What the page remembers: requests that ended, and a sample of the counters for each snapshot.

const MAX_ROWS = 1200;
const MAX_SAMPLES = 1200; // ten minutes
const SPANS_S = [60, 120, 300]; // that the charts over time show

export class State {
  constructor() {
    this.snapshot = null;
    this.rows = new Map(); // id -> row, in the order of their ends
    this.samples = [];
    this.startedAt = null;
  }

  remember(rows) {
    for (const row of rows) this.rows.set(row.id, row);
    while (this.rows.size > MAX_ROWS) this.rows.delete(this.rows.keys().next().value);
  }

  take(snapshot) {
    if (this.startedAt !== null && this.startedAt !== snapshot.started_at) { // another router: its counters begin anew
      this.rows.clear();
      this.samples = [];
    }
    this.startedAt = snapshot.started_at;
    this.snapshot = snapshot;
    this.remember([...snapshot.recent].reverse().filter((row) => !this.rows.has(row.id)));
    this.samples.push({ at: snapshot.at, totals: snapshot.totals, window: snapshot.window });
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
  }

  /** The seconds that the charts show: the least that holds all that is remembered, if any does. */
  get span() {
    const first = this.rows.values().next().value, now = this.snapshot.at;
    const age = now - Math.min(this.samples[0].at, first ? first.at : now);
    return SPANS_S.find((span) => span >= age) ?? SPANS_S.at(-1);
  }

  /** Requests that ended within the shown span. */
  recentRows() {
    const from = this.snapshot.at - this.span;
    return [...this.rows.values()].filter((row) => row.at + (row.total_s ?? 0) > from);
  }

  /** Requests per second {ended, good} over the last `seconds` by the counters, or since the page was opened. */
  rates(seconds, at = this.samples.length - 1) {
    const now = this.samples[at];
    let first = at;
    while (first > 0 && now.at - this.samples[first].at < seconds) first -= 1;
    const before = this.samples[first];
    const span = now.at - before.at;
    if (span <= 0) return null;
    return {
      ended: ((now.totals.requests ?? 0) - (before.totals.requests ?? 0)) / span,
      good: ((now.totals.in_slo ?? 0) - (before.totals.in_slo ?? 0)) / span,
    };
  }
}
