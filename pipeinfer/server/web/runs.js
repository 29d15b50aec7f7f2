// Runs as the server reports them, and the clock they are shown by. Knows no canvas.

export const FATES = [
  ["plain", "not guessed", "non-speculative"],
  ["accepted", "guessed, right", "accepted"],
  ["partly", "partly right", "partly accepted"],
  ["rejected", "wrong or cancelled", "rejected"],
  ["prompt", "prompt", "prompt"],
  ["open", "not decided yet", ""],
];
const BY_NAME = Object.fromEntries(FATES.map(([style, , name]) => [name, style]));
const KEEP_SECONDS = 90;
const MOST = 20000;

export class Runs {
  constructor() {
    this.reset();
  }

  reset() {
    this.all = new Map();
    this.counts = Object.fromEntries(FATES.map(([style]) => [style, 0]));
    this.bounds = [];
    this.ahead = null; // server's clock minus this one, in seconds
    this.last = 0; // when something happened last, by the server's clock
    this.version = 0;
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
    this.last = Math.max(this.last, item.issued);
  }

  done(item) {
    const run = this.all.get(item.id);
    if (!run) return;
    Object.assign(run, { done: item.done, skipped: item.skipped, spans: item.spans });
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
    let count = 0;
    for (const run of this.all.values()) count += run.done === null;
    return count;
  }

  forget() {
    const limit = this.last - KEEP_SECONDS;
    for (const [id, run] of this.all) {
      if (this.all.size <= MOST && run.issued >= limit) break;
      this.all.delete(id);
    }
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
    const seconds = [];
    for (const run of [...this.all.values()].slice(-200)) {
      for (const [, worked] of run.spans) if (worked > 0) seconds.push(worked);
    }
    seconds.sort((a, b) => a - b);
    return seconds[seconds.length >> 1] ?? 0;
  }
}
