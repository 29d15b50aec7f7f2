// Follows the server: waits until it is ready, then hands on what it tells, and begins anew when
// the stream ends. Rests while nobody looks at the page.

import { ask, events, Failure } from "./api.js";

const RETRY_SECONDS = 2;
const STATES = { ready: "ready", loading: "loading", asleep: "asleep", restarting: "restarting",
  recovering: "recovering", draining: "shutting down",
  stopped: "stopped", failed: "failed", gone: "no answer", locked: "API key needed" };

export class Watcher {
  // field: where the state is told; onProps(props), onFrame(frame); onLocked(): a key is needed.
  constructor({ field, onProps, onFrame, onLocked }) {
    Object.assign(this, { field, onProps, onFrame, onLocked });
    this.controller = null;
    this.changed = false; // something has, since the last rest
    this.wakeUp = () => {};
    document.addEventListener("visibilitychange", () => this.again());
    this.run();
  }

  get locked() {
    return this.field.dataset.state === "locked";
  }

  again() {
    this.changed = true;
    this.controller?.abort();
    this.wakeUp();
  }

  async run() {
    for (;;) {
      if (document.hidden) {
        await this.rest(null);
      } else if (await this.healthy()) {
        await this.follow();
        await this.rest(0.2);
      } else {
        await this.rest(RETRY_SECONDS);
      }
    }
  }

  // Until something changes, at most so many seconds (null: no bound).
  async rest(seconds) {
    if (!this.changed) {
      await new Promise((resolve) => {
        this.wakeUp = resolve;
        if (seconds !== null) setTimeout(resolve, 1000 * seconds);
      });
    }
    this.changed = false;
  }

  async healthy() {
    try {
      const response = await fetch("health", { cache: "no-store" });
      const health = await response.json();
      if (response.ok) return true;
      this.state(health.status, health.reason);
      const stages = Object.values(health.stages ?? {});
      const loaded = stages.filter((stage) => stage.phase === "ready").length;
      if (stages.length) {
        const waiting = stages.find((stage) => stage.phase !== "ready")?.text;
        this.field.textContent =
          `loading, ${loaded} of ${stages.length} stages${waiting ? `: ${waiting}` : ""}`;
      }
    } catch {
      this.state("gone");
    }
    return false;
  }

  async follow() {
    this.controller = new AbortController();
    const { signal } = this.controller;
    try {
      this.onProps(await (await ask("props", { signal })).json());
      const response = await ask("pipeline", { signal });
      for await (const frame of events(response)) if (frame) this.take(frame);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 401) {
        this.state("locked");
        this.onLocked?.();
        await this.rest(null);
      } else if (error.status === 0) {
        this.state("gone");
      } else if (!(error instanceof Failure)) {
        console.error(error);
      }
    }
  }

  take(frame) {
    const before = this.field.dataset.state;
    if (frame.op === "facts" || frame.op === "state") this.state(frame.state, frame.reason);
    this.onFrame(frame);
    // another job has come, maybe with another model
    if (frame.op === "facts" && before === "restarting") this.again();
  }

  state(state, reason = "") {
    const { field } = this;
    if (field.dataset.state === state && field.title === reason) return;
    field.dataset.state = state === "stopped" ? "gone" : state;
    field.textContent = STATES[state] ?? state;
    field.title = reason;
  }
}
