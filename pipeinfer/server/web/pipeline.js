// The pipeline beside the chat: figures, the timeline, charts, and what happens to stages.

import { away, described } from "./changes.js";
import { Chart } from "./charts.js";
import { element } from "./element.js";
import { FATES, Runs, words } from "./runs.js";
import { Timeline } from "./timeline.js";

const LOAD_SECONDS = 3;
const RESTING = 16; // tokens without a tested guess after which guessing counts as off
const $ = (id) => document.getElementById(id);

export class Pipeline {
  // onChange(what): other stages have taken over while we looked on, see changes.js.
  constructor({ onChange }) {
    this.onChange = onChange;
    this.facts = null;
    this.before = null; // the status before
    this.acceptance = null;
    this.rests = 0; // tokens since the last guess was tested
    this.runs = new Runs();
    this.timeline = new Timeline({
      canvas: $("lanes"), tip: $("tip"), text: $("lanes-text"), runs: this.runs });
    this.rates = new Chart($("rate-chart"), { colour: "plain", format: (v) => `${v}` });
    const share = { top: 1, format: (v) => `${100 * v} %` };
    this.right = new Chart($("acceptance-chart"), { ...share, colour: "accepted" });
    this.load = new Chart($("load-chart"), { ...share, colour: "prompt" });
    $("span").addEventListener("change", () => {
      this.timeline.span = Number($("span").value);
      this.timeline.draw(true);
    });
    $("hold").addEventListener("click", () => {
      const on = $("hold").getAttribute("aria-pressed") !== "true";
      $("hold").setAttribute("aria-pressed", String(on));
      this.timeline.hold(on);
    });
    this.showLegend();
  }

  // Whether anything is guessed ahead; null while the server is not known.
  get guesses() {
    return this.facts && this.facts.policy !== "iterative";
  }

  take(frame) {
    switch (frame.op) {
      case "facts":
        if (frame.facts.stages) this.takeFacts(frame.facts);
        break;
      case "status":
        this.showStatus(frame);
        break;
      case "state":
        if (frame.state === "restarting") this.onChange(away(frame));
        break;
      case "runs":
        this.runs.take(frame.items);
        this.showLegend();
        break;
      default:
    }
  }

  // The server's facts: at the start of a stream, and when its stages have changed.
  takeFacts(facts) {
    const known = this.facts;
    const changes = facts.changes ?? [];
    const seen = known?.changes?.length ?? 0;
    const goesOn = known && known.load_seconds === facts.load_seconds && changes.length >= seen;
    this.facts = facts;
    if (goesOn) {
      for (const change of changes.slice(seen)) {
        const what = described(change, known.stages);
        this.runs.change(what);
        this.onChange(what);
      }
    } else {
      this.runs.reset();
      this.runs.changes = changes.map((change) => described(change));
      for (const chart of [this.rates, this.right, this.load]) chart.reset();
      this.before = null;
    }
    this.showFacts(facts);
  }

  showFacts(facts) {
    const { stages } = facts;
    const names = [...new Map(stages.map((stage) => [stage.stage, stage])).values()];
    const count = `${names.length} stage${names.length === 1 ? "" : "s"}`;
    document.body.classList.toggle("plain", !this.guesses);
    this.timeline.setStages(stages, this.guesses);
    for (const place of document.querySelectorAll(".stage-count")) place.textContent = count;
    const layers = names.map((stage) => stage.layers[1] - stage.layers[0]);
    $("facts").textContent = [
      `${facts.model} over ${count} (${layers.join(", ")} layers)`,
      ...(this.guesses && facts.draft ? [`drafts by ${facts.draft}`] : []),
      `context ${facts.n_ctx.toLocaleString("en")} tokens`,
    ].join(", ");
    this.showLegend();
  }

  showStatus(status) {
    this.runs.heard(status.time);
    const rate = this.rateOf(status);
    this.before = status;
    const rests = this.rests >= RESTING;
    $("rests").hidden = !rests;
    const known = this.acceptance === null ? "–" : `${Math.round(100 * this.acceptance)} %`;
    const share = rests ? "off" : known;
    const load = this.meanLoad();
    this.load.add(status.time, load);
    $("rate").textContent = rate >= 100 ? Math.round(rate) : +rate.toFixed(1);
    $("acceptance").textContent = share;
    $("load").textContent = `${Math.round(100 * load)} %`;
    $("runs").textContent = status.runs;
    const running = status.lanes.length;
    $("requests").textContent = status.waiting ? `${running} + ${status.waiting}` : running;
    $("requests").title = status.waiting ? `${running} running, ${status.waiting} waiting` : "";
    const cells = status.cells_used / Math.max(1, status.cells);
    $("cache").textContent = `${Math.round(100 * cells)} %`;
    const second = this.guesses ? (rests ? "speculation off" : `${share} of drafts accepted`)
      : `stages ${Math.round(100 * load)} % busy`;
    $("brief").textContent = running ? `${Math.round(rate)} tokens/s, ${second}` : "idle";
  }

  // Tokens per second since the status before.
  rateOf(status) {
    const { before } = this;
    const totals = status.totals;
    if (!before || status.time <= before.time || totals.accepted < before.totals.accepted) return 0;
    const rate = (totals.accepted - before.totals.accepted) / (status.time - before.time);
    const tested = totals.guesses_tested - before.totals.guesses_tested;
    this.rests = tested > 0 ? 0 : this.rests + totals.accepted - before.totals.accepted;
    if (tested > 0) {
      this.acceptance = (totals.accepted_speculative - before.totals.accepted_speculative) / tested;
    }
    this.rates.add(status.time, rate);
    if (this.acceptance !== null) this.right.add(status.time, this.acceptance);
    return rate;
  }

  meanLoad() {
    const count = Math.max(0, ...(this.facts?.stages ?? []).map((one) => one.stage));
    let sum = 0;
    for (let k = 0; k < count; k += 1) sum += this.runs.load(k, LOAD_SECONDS);
    return count ? sum / count : 0;
  }

  showLegend() {
    const fates = FATES.filter(([, , , ofGuesses]) => this.guesses !== false || !ofGuesses);
    const called = words(this.guesses !== false);
    $("legend").replaceChildren(...fates.map(([style]) => {
      const count = this.runs.counts[style];
      return element("li", style,
        count ? `${called[style]} ${count.toLocaleString("en")}` : called[style]);
    }));
  }
}
