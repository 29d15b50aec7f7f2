// The page: joins the chat, the pipeline and the settings, and follows the server's state.

import { ask, events, key } from "./api.js";
import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { FATES, Runs } from "./runs.js";
import { Timeline } from "./timeline.js";
import { element } from "./text.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const SAVED = "pipeinfer.settings";
const STARTERS = ["Write a function that reverses a string",
  "Explain what a pipeline stage does", "Write a class for a stack"];
const RETRY_SECONDS = 2;

// --- settings -------------------------------------------------------------------------------

function settings() {
  const params = {};
  for (const name of NUMBERS) {
    const field = $(name);
    if (field.value !== "" && field.validity.valid) params[name] = Number(field.value);
  }
  return { system: $("system").value.trim(), params };
}

function save() {
  const values = Object.fromEntries([...NUMBERS, "system"].map((name) => [name, $(name).value]));
  localStorage.setItem(SAVED, JSON.stringify({ ...values, mark: $("mark").checked }));
  document.body.classList.toggle("unmarked", !$("mark").checked);
}

function restore() {
  const values = JSON.parse(localStorage.getItem(SAVED) ?? "{}");
  for (const name of [...NUMBERS, "system"]) $(name).value = values[name] ?? "";
  $("mark").checked = values.mark ?? true;
  $("api-key").value = key.get();
  save();
}

function openSettings() {
  $("settings").showModal();
  if ($("state").dataset.state === "locked") $("api-key").focus();
}

function takeKey() {
  const changed = $("api-key").value.trim() !== key.get();
  key.set($("api-key").value.trim());
  if (changed) watcher.again();
}

// --- chat -----------------------------------------------------------------------------------

const chat = new Chat({
  log: $("log"), scroll: $("scroll"), empty: $("empty"), settings,
  onAction: (action) => (action === "settings" ? openSettings() : newChat()),
  onBusy: (busy) => {
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    if (!busy && document.activeElement === document.body) $("prompt").focus();
  },
  onTokens: () => {},
});

function newChat() {
  chat.clear();
  $("prompt").focus();
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || chat.busy) return;
  $("prompt").value = "";
  grow();
  chat.send(text);
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Cannot copy";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// --- the pipeline ---------------------------------------------------------------------------

const runs = new Runs();
const timeline = new Timeline({
  canvas: $("lanes"), tip: $("tip"), text: $("lanes-text"), runs });
const rateChart = new Chart($("rate-chart"), { colour: "plain", format: (v) => `${v}` });
const acceptanceChart = new Chart($("acceptance-chart"), {
  colour: "accepted", top: 1, format: (v) => `${100 * v} %` });
let before = null; // the status before
let acceptance = null;

function show(frame) {
  switch (frame.op) {
    case "facts":
      if (frame.facts.stages) showFacts(frame.facts);
      showState(frame.state);
      break;
    case "status":
      showStatus(frame);
      break;
    case "runs":
      runs.take(frame.items);
      showLegend();
      break;
    case "state":
      showState(frame.state, frame.reason);
      break;
    default:
  }
}

function showFacts(facts) {
  const stages = facts.stages;
  const count = `${stages.length} stage${stages.length === 1 ? "" : "s"}`;
  runs.reset();
  rateChart.reset();
  acceptanceChart.reset();
  before = null;
  timeline.setStages(stages);
  $("stage-count").textContent = count;
  const layers = stages.map((stage) => stage.layers[1] - stage.layers[0]);
  $("facts").textContent = [
    `${facts.model} over ${count} (${layers.join(", ")} layers)`,
    facts.draft ? `guesses by ${facts.draft}` : "no draft model, so nothing is guessed",
    `context ${facts.n_ctx.toLocaleString("en")} tokens`,
  ].join(", ");
  $("notes").textContent = (facts.notes ?? []).join(" · ");
  showLegend();
}

function showStatus(status) {
  runs.heard(status.time);
  const totals = status.totals;
  let rate = 0;
  if (before && status.time > before.time && totals.accepted >= before.totals.accepted) {
    const seconds = status.time - before.time;
    rate = (totals.accepted - before.totals.accepted) / seconds;
    const tested = totals.guesses_tested - before.totals.guesses_tested;
    if (tested > 0) {
      acceptance = (totals.accepted_speculative - before.totals.accepted_speculative) / tested;
    }
    rateChart.add(status.time, rate);
    if (acceptance !== null) acceptanceChart.add(status.time, acceptance);
  }
  before = status;
  const share = acceptance === null ? "–" : `${Math.round(100 * acceptance)} %`;
  $("rate").textContent = rate >= 100 ? Math.round(rate) : +rate.toFixed(1);
  $("acceptance").textContent = share;
  $("runs").textContent = status.runs;
  const running = status.lanes.length;
  $("requests").textContent = status.waiting ? `${running} + ${status.waiting}` : running;
  $("requests").title = status.waiting ? `${running} running, ${status.waiting} waiting` : "";
  $("cache").textContent = `${Math.round(100 * status.cells_used / Math.max(1, status.cells))} %`;
  $("brief").textContent = running
    ? `${Math.round(rate)} tokens/s, ${share} of guesses right` : "idle";
}

function showLegend() {
  $("legend").replaceChildren(...FATES.map(([style, text]) => {
    const item = element("li", style);
    const count = runs.counts[style];
    item.textContent = count ? `${text} ${count.toLocaleString("en")}` : text;
    return item;
  }));
}

// --- the server's state ---------------------------------------------------------------------

const STATES = { ready: "ready", loading: "loading", draining: "shutting down",
  stopped: "stopped", failed: "failed", gone: "no answer", locked: "API key needed" };

function showState(state, reason = "") {
  const field = $("state");
  if (field.dataset.state === state && field.title === reason) return;
  field.dataset.state = state === "stopped" ? "gone" : state;
  field.textContent = STATES[state] ?? state;
  field.title = reason;
}

async function showHealth() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    const health = await response.json();
    if (response.ok) return true;
    showState(health.status, health.reason);
    const stages = Object.values(health.stages ?? {});
    const loaded = stages.filter((stage) => stage.phase === "ready").length;
    if (stages.length) $("state").textContent = `loading, ${loaded} of ${stages.length} stages`;
  } catch {
    showState("gone");
  }
  return false;
}

async function showModel(signal) {
  const props = await (await ask("props", { signal })).json();
  $("model").textContent = props.model_alias;
  document.title = `${props.model_alias} · pipeinfer`;
  for (const name of NUMBERS) {
    const value = props.default_generation_settings[name];
    if (value !== undefined) $(name).placeholder = value;
  }
}

// Follows the server: waits until it is ready, then shows what it tells, and begins anew when the
// stream ends. Rests while nobody looks at the page.
class Watcher {
  constructor() {
    this.controller = null;
    this.changed = false; // something has, since the last rest
    this.wakeUp = () => {};
    document.addEventListener("visibilitychange", () => this.again());
    this.run();
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
      } else if (await showHealth()) {
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

  async follow() {
    this.controller = new AbortController();
    try {
      await showModel(this.controller.signal);
      const response = await ask("pipeline", { signal: this.controller.signal });
      for await (const frame of events(response)) if (frame) show(frame);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 401) {
        showState("locked");
        await this.rest(null);
      } else if (error.name !== "Error") {
        console.error(error);
      }
    }
  }
}

// --- wiring ---------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !$("settings").open) chat.stop();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) copy(button);
});
$("stop").addEventListener("click", () => {
  chat.stop();
  $("prompt").focus();
});
$("new-chat").addEventListener("click", newChat);
$("open-settings").addEventListener("click", openSettings);
for (const [id, event] of [["settings-form", "submit"], ["settings", "close"]]) {
  $(id).addEventListener(event, () => {
    save();
    takeKey();
  });
}
$("mark").addEventListener("change", save);
$("reset").addEventListener("click", () => {
  localStorage.removeItem(SAVED);
  key.set("");
  restore();
});
$("span").addEventListener("change", () => {
  timeline.span = Number($("span").value);
  timeline.draw(true);
});
$("hold").addEventListener("click", () => {
  const on = $("hold").getAttribute("aria-pressed") !== "true";
  $("hold").setAttribute("aria-pressed", String(on));
  timeline.hold(on);
});

const narrow = matchMedia("(max-width: 900px)");
function fold(folded) {
  document.querySelector(".pipeline").classList.toggle("folded", folded);
  $("fold").setAttribute("aria-expanded", String(!folded));
}
$("fold").addEventListener("click", () => {
  if (narrow.matches) fold($("fold").getAttribute("aria-expanded") === "true");
});
narrow.addEventListener("change", () => fold(narrow.matches));
fold(narrow.matches);

$("starters").append(...STARTERS.map((text) => {
  const item = element("li");
  const button = element("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => {
    $("prompt").value = text;
    grow();
    $("prompt").focus();
  });
  item.append(button);
  return item;
}));
restore();
showLegend();
const watcher = new Watcher();
if (matchMedia("(pointer: fine)").matches) $("prompt").focus({ preventScroll: true });
