// Runs as the server reports them, and the clock they are shown by. Knows no canvas.

// Outcomes of runs: name, words, the server's name. Those of guesses have `true` at their end.
export const FATES = [
  ["plain", "plain", "non-speculative"],
  ["accepted", "accepted", "accepted", true],
  ["partly", "partly accepted", "partly accepted", true],
  ["rejected", "rejected or cancelled", "rejected", true],
  ["prompt", "prompt", "prompt"],
  ["open", "not decided yet", ""],
];

// The words for each outcome, where guesses are made or not: without them every token is plain.
export function words(guesses) {
  const all = Object.fromEntries(FATES.map(([style, text]) => [style, text]));
  return guesses ? all : { ...all, plain: "tokens" };
}

export const BY_NAME = Object.fromEntries(FATES.map(([style, , name]) => [name, style]));
const KEEP_SECONDS = 90;
const MOST = 20000;

export class Runs {
  constructor() {
    this.reset();
  }

  reset() {
    this.all = new Map();
    this.flying = new Set(); // names of those that are not back yet
    this.half = { version: -1, seconds: 0 }; // see typical
    this.counts = Object.fromEntries(FATES.map(([style]) => [style, 0]));
    this.bounds = [];
    this.changes = []; // {from, to, text}: when other stages took over
    this.ahead = null; // server's clock minus this one, in seconds
    this.last = 0; // when something happened last, by the server's clock
    this.version = 0;
  }

  // Other stages are there from `to` on; nothing that was in flight at `from` comes back. What was
  // is kept under names of its own, with the clocks as they were known by then.
  change({ from, to, text }) {
    this.changes.push({ from, to, text });
    const before = [...this.all.values()];
    this.all = new Map(before.map((run, i) => {
      if (run.done === null) run.done = Math.max(run.issued, Math.min(from, this.last));
      run.spans = run.spans.map(([start, ...rest], k) => [start + this.shift(k), ...rest]);
      return [`before ${this.version} ${i}`, { ...run, past: true }];
    }));
    this.bounds = [];
    this.flying.clear();
    this.version += 1;
  }

  // The server's time now, as far as it can be told.
  now() {
    return Date.now() / 1000 + (this.ahead ?? 0);
  }

  // A time that the server has just sent: it was at least that late there.
  heard(time) {
    const ahead = time - Date.now() / 1000;
    if (this.ahead === null || ahead > this.ahead) this.ahead = ahead;
  }

  take(items) {
    for (const item of items) {
      if ("issued" in item) this.issued(item);
      else if ("done" in item) this.done(item);
      else if ("fate" in item) this.decided(item);
    }
    this.version += 1;
    this.forget();
  }

  issued(item) {
    const style = { prompt: "prompt", token: "plain" }[item.kind] ?? "open";
    this.all.set(item.id, { ...item, style, spans: [], done: null, skipped: false });
    this.flying.add(item.id);
    this.last = Math.max(this.last, item.issued);
  }

  done(item) {
    const run = this.all.get(item.id);
    if (!run) return;
    Object.assign(run, { done: item.done, skipped: item.skipped, spans: item.spans });
    this.flying.delete(item.id);
    this.last = Math.max(this.last, item.done);
    this.heard(item.done);
    this.bound(run);
  }

  decided(item) {
    const run = this.all.get(item.id);
    const style = BY_NAME[item.fate] ?? "open";
    this.counts[style] += 1;
    if (run) run.style = style;
  }

  // Stages have clocks of their own: a run cannot be at a stage before it was at the one before,
  // nor after it was back. What contradicts that says by how much a clock is off.
  bound(run) {
    let earliest = run.issued;
    run.spans.forEach(([start, seconds], k) => {
      const bound = this.bounds[k] ??= { least: -Infinity, most: Infinity };
      bound.least = Math.max(bound.least, earliest - start);
      bound.most = Math.min(bound.most, run.done - (start + seconds));
      earliest = start + seconds + this.shift(k);
    });
  }

  // Seconds to add to the times of stage k (from 0).
  shift(k) {
    const { least, most } = this.bounds[k] ?? { least: 0, most: 0 };
    if (least > 0 && most >= 0) return least;
    if (most < 0 && least <= 0) return most;
    return least > 0 && most < 0 ? (least + most) / 2 : 0;
  }

  inFlight() {
    return this.flying.size;
  }

  forget() {
    const limit = this.last - KEEP_SECONDS;
    for (const [id, run] of this.all) {
      if (this.all.size <= MOST && run.issued >= limit) break;
      this.all.delete(id);
      this.flying.delete(id);
    }
  }

  // Which part of the last seconds stage k (from 0) computed, 0 to 1.
  load(k, seconds) {
    const to = this.now();
    const from = to - seconds;
    let busy = 0;
    for (const run of this.all.values()) {
      const span = run.past ? null : run.spans[k];
      if (!span) continue;
      const start = span[0] + this.shift(k);
      const share = span[1] > 0 ? 1 - Math.min(1, (span[3] ?? 0) / span[1]) : 0; // not waiting
      busy += share * Math.max(0, Math.min(to, start + span[1]) - Math.max(from, start));
    }
    return Math.min(1, busy / seconds);
  }

  // The runs that touch [from, to], oldest first.
  between(from, to) {
    const found = [];
    for (const run of this.all.values()) {
      if (run.issued <= to && (run.done ?? Infinity) >= from) found.push(run);
    }
    return found;
  }

  // Half of all pieces of work take at least this long, in seconds (0: none yet).
  typical() {
    if (this.half.version === this.version) return this.half.seconds; // asked with every picture
    const seconds = [];
    for (const run of [...this.all.values()].slice(-200)) {
      for (const [, worked] of run.spans) if (worked > 0) seconds.push(worked);
    }
    seconds.sort((a, b) => a - b);
    this.half = { version: this.version, seconds: seconds[seconds.length >> 1] ?? 0 };
    return this.half.seconds;
  }
}
