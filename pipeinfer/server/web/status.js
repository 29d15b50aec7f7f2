// The operator's page: who holds what, what it takes, what happened, and what a rebalance would do.

import { ask, key } from "./api.js";
import { described } from "./changes.js";
import { element } from "./element.js";
import { Runs } from "./runs.js";
import { Watcher } from "./watcher.js";

const LOAD_SECONDS = 5;
const SLOW = 1.5; // times its best from which on a stage is pointed out
const $ = (id) => document.getElementById(id);
const runs = new Runs();
let facts = null;
let status = null;

function bytes(count) {
  if (!Number.isFinite(count) || count <= 0) return "–";
  const power = Math.min(4, Math.floor(Math.log2(count) / 10));
  return `${(count / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function row(cells, style = "") {
  const made = element("tr", style);
  made.append(...cells.map((cell) => {
    if (cell instanceof Node) return cell;
    return element("td", "", `${cell}`);
  }));
  return made;
}

function milliseconds(seconds) {
  return seconds > 0 ? `${(1000 * seconds).toPrecision(3)} ms` : "–";
}

function holds(stage) {
  const [start, stop] = stage.layers;
  const count = stop - start;
  const layers = count === 1 ? `layer ${start}` : `layers ${start} to ${stop - 1} (${count})`;
  if (!stage.of_slices) return layers;
  return `${stage.slices} of ${stage.of_slices} slices, ${layers.replace(/ \(.*/, "")}`;
}

// --- what there is --------------------------------------------------------------------------

function showFacts() {
  const { stages } = facts;
  $("facts").textContent = [`pipeinfer ${facts.version}`, facts.model,
    facts.draft ? `draft ${facts.draft}` : "no draft", `policy ${facts.policy}`,
    `context ${facts.n_ctx.toLocaleString("en")} tokens`,
    `up to ${facts.parallel} requests at once`].join(" · ");
  $("recoveries").textContent = facts.changes.filter((change) => change.lost.length).length;
  $("notes").textContent = (facts.notes ?? []).join(" · ");
  $("ranks").replaceChildren(...(facts.ranks ?? []).map((one) => {
    const lost = facts.lost.includes(one.rank);
    const first = facts.ranks.find(({ host, memory }) => host === one.host && memory === one.memory);
    const memory = first === one ? bytes(one.memory) : `shared with rank ${first.rank}`;
    return row([one.rank, one.host, does(one.rank, stages), one.cores, memory],
      lost ? "lost" : "");
  }));
  showStages();
  showChanges();
}

function does(rank, stages) {
  if (facts.lost.includes(rank)) return "lost";
  const work = rank === 0 ? ["takes requests", ...(facts.draft ? ["drafts"] : [])] : [];
  for (const stage of stages) {
    if (stage.rank === rank) work.push(`stage ${stage.stage}, ${holds(stage)}`);
  }
  return work.join("; ") || (facts.spares.includes(rank)
    ? facts.ranks.find((one) => one.rank === rank)?.does ?? "is spare" : "idle");
}

function showStages() {
  const grid = facts.stages.some((stage) => stage.of_slices);
  $("waits").hidden = $("waits-hint").hidden = !grid;
  showAdvice();
  $("stages").replaceChildren(...facts.stages.map((stage) => {
    const at = stage.stage - 1;  // members of a stage work in step
    const wide = Boolean(stage.of_slices);
    const seconds = (wide ? status?.member_seconds?.[stage.node - 1] : 0)
      || status?.stage_seconds?.[at];
    const waits = wide ? status?.member_waiting_seconds?.[stage.node - 1] : undefined;
    const slowdown = status?.stage_slowdown?.[at];
    const slow = element("td", slowdown >= SLOW ? "slow" : "",
      slowdown ? `${slowdown.toFixed(2)} times` : "–");
    return row([stage.of_slices ? `${stage.stage}.${stage.member + 1}` : stage.stage, stage.rank,
      stage.host, holds(stage), bytes(stage.weight_bytes), bytes(stage.cache_bytes),
      stage.threads ?? "–", milliseconds(seconds),
      ...(grid ? [milliseconds(waits)] : []), slow,
      loadCell(at, stage)]);
  }));
}

// What to do about the slowest stage, if one is much slower than it was.
function showAdvice() {
  const slow = status?.stage_slowdown ?? [];
  const most = Math.max(0, ...slow);
  const stage = facts.stages.find((one) => one.stage - 1 === slow.indexOf(most));
  const text = most < SLOW || !stage ? "" : `Stage ${stage.stage} on ${stage.host} takes `
    + `${most.toFixed(2)} times as long as at its best. See there (top) whether another program `
    + "runs, and end it, or whether the processor is hot; if it stays, What would change? below "
    + "shows a better split.";
  if ($("advice").textContent !== text) $("advice").textContent = text;
}

function loadCell(k, stage) {
  const load = runs.load(k, LOAD_SECONDS);
  const cell = element("td");
  const meter = element("meter");
  meter.min = 0;
  meter.max = 1;
  meter.value = load;
  meter.ariaLabel = `Load of stage ${stage.stage}`;
  cell.append(meter, `${Math.round(100 * load)} %`);
  return cell;
}

function showChanges() {
  const items = facts.changes.map((change) => {
    const what = described(change);
    const item = element("li", what.lost ? "lost" : "");
    item.append(element("time", "", new Date(1000 * change.when).toLocaleString()),
      element("p", "", `${what.title}. ${what.long} ${what.lost ? `Why: ${change.why}.` : ""}`));
    return item;
  });
  const none = element("li", "", "Nothing: the stages are those of the start.");
  $("changes").replaceChildren(...(items.length ? items.reverse() : [none]));
}

function showStatus(next) {
  runs.heard(next.time);
  if (status && next.time > status.time && next.totals.accepted >= status.totals.accepted) {
    const rate = (next.totals.accepted - status.totals.accepted) / (next.time - status.time);
    $("rate").textContent = rate >= 100 ? Math.round(rate) : +rate.toFixed(1);
  }
  status = next;
  $("running").textContent = next.lanes.length;
  $("waiting").textContent = next.waiting;
  $("runs").textContent = next.runs;
  $("cache").textContent = `${Math.round(100 * next.cells_used / Math.max(1, next.cells))} %`;
  if (facts) showStages();
}

function take(frame) {
  if (frame.op === "facts" && frame.facts.stages) {
    const seen = facts?.changes.length ?? 0;
    for (const change of frame.facts.changes.slice(seen)) runs.change(described(change));
    facts = frame.facts;
    $("key-form").hidden = true;
    showFacts();
  } else if (frame.op === "status") {
    showStatus(frame);
  } else if (frame.op === "runs") {
    runs.take(frame.items);
  }
}

// --- balance --------------------------------------------------------------------------------

async function about(call) {
  for (const id of ["preview", "rebalance"]) $(id).disabled = true;
  $("plan").textContent = "Asking…";
  try {
    $("plan").replaceChildren(...await call());
  } catch (error) {
    $("plan").textContent = `That did not work: ${error.message}`;
  }
  for (const id of ["preview", "rebalance"]) $(id).disabled = false;
}

$("preview").addEventListener("click", () => about(async () => {
  const plan = await (await ask("rebalance/plan")).json();
  const said = element("p", "", plan.changes
    ? `It would be ${plan.gain.toFixed(2)} times as fast: ${plan.message}.` : `${plan.message}.`);
  if (!plan.changes) return [said];
  const table = element("table");
  const head = element("tr");
  head.append(...["Rank", "Host", "Holds now", "Would hold"].map((text) => {
    const cell = element("th", "", text);
    cell.scope = "col";
    return cell;
  }));
  const ranks = [...new Set([...facts.stages, ...plan.stages].map((one) => one.rank))].sort(
    (a, b) => a - b);
  table.append(head, ...ranks.map((rank) => {
    const [now, then] = [facts.stages, plan.stages].map((stages) => (
      stages.find((one) => one.rank === rank)));
    return row([rank, (now ?? then).host, now ? holds(now) : "nothing",
      then ? holds(then) : "nothing"]);
  }));
  return [said, table];
}));

$("rebalance").addEventListener("click", () => about(async () => {
  const done = await (await ask("rebalance", { body: {} })).json();
  return [element("p", "", `${done.message[0].toUpperCase()}${done.message.slice(1)}.`)];
}));

$("to-chat").href = `.${location.hash}`; // the conversation that was left

// --- the server -----------------------------------------------------------------------------

const watcher = new Watcher({
  field: $("state"),
  onProps: (props) => { $("model").textContent = props.model_alias; },
  onFrame: take,
});
new MutationObserver(() => {
  $("key-form").hidden = !watcher.locked;
}).observe($("state"), { attributes: true, attributeFilter: ["data-state"] });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("api-key").value.trim());
  watcher.again();
});
