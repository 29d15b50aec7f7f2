// Stages as lanes on a canvas, runs as bars that move through them. Knows runs, no server.

import { FATES, words } from "./runs.js";

const LEFT = 64; // where time begins, in pixels: the lanes' names are before it
const AXIS = 18;
const STAYS = 12; // seconds for which a change of the stages is kept in sight
const LAG = 0.3; // seconds behind the server's clock, so that what is shown is complete
const MOVING = 33; // milliseconds from one picture to the next while something moves
const STILL = 250; // and from one look to the next while nothing does: a page at rest costs little
const KINDS = { prompt: "prompt", token: "token", guess: "draft tokens", mixed: "token and draft tokens" };

export class Timeline {
  constructor({ canvas, tip, text, runs }) {
    Object.assign(this, { canvas, tip, text, runs });
    this.stages = [];
    this.words = words(true);
    this.span = 0; // seconds, 0: by the runs
    this.held = null; // right edge while it is held
    this.heldSpan = 0; // seconds that were shown then
    this.bars = [];
    this.drawn = "";
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    document.addEventListener("theme", () => this.recolour());
    new ResizeObserver(() => this.draw(true)).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    this.recolour();
    this.tick = this.tick.bind(this);
    requestAnimationFrame(this.tick);
    setInterval(() => this.describe(), 2000);
  }

  hold(on) {
    this.heldSpan = this.seconds();
    this.held = on ? this.edge() : null;
    this.draw(true);
  }

  setStages(stages, guesses) {
    this.words = words(guesses);
    this.stages = stages.filter((stage) => !stage.member); // members of a stage work in step
    this.describe();
    this.draw(true);
  }

  recolour() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(
      [...FATES.map(([style]) => style), "ink", "soft", "line", "sunk", "danger"]
        .map((name) => [name, get(name)]));
    this.draw(true);
  }

  // The time at the right edge: now, or soon after the last thing that happened.
  edge(span = 0) {
    if (this.held !== null) return this.held;
    const now = this.runs.now() - LAG;
    if (this.runs.inFlight()) return now;
    const last = this.runs.last || (this.runs.changes.at(-1)?.to ?? 0);
    return Math.min(now, last + 0.04 * (span || this.seconds()));
  }

  // How many seconds fit in: by choice, or so many that a bar can be seen.
  seconds() {
    if (this.span) return this.span;
    if (this.held !== null) return this.heldSpan;
    const width = Math.max(this.canvas.clientWidth - LEFT, 100);
    const change = this.runs.changes.at(-1);
    const since = change ? this.edge(1) - change.from : Infinity;
    if (since < STAYS) return 1.1 * Math.max(since, 2); // a change stays in sight for a while
    return Math.min(60, Math.max(1, this.runs.typical() * width / 9));
  }

  tick() {
    let pause = STILL;
    if (this.draw()) pause = this.still.matches ? 1000 : MOVING;
    setTimeout(() => requestAnimationFrame(this.tick), pause); // none in a tab that nobody sees
  }

  // Returns whether there was anything new to draw.
  draw(always = false) {
    const { canvas } = this;
    const width = canvas.clientWidth;
    const lanes = Math.max(this.stages.length, 1);
    const lane = Math.max(11, Math.min(40, 340 / (lanes + 1)));
    const height = Math.round(lane * (lanes + 1) + AXIS);
    const right = this.edge();
    const state = `${width} ${right.toFixed(3)} ${this.runs.version} ${this.seconds()}`;
    if (!width || (!always && state === this.drawn)) return false;
    this.drawn = state;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale)
        || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.paint(pen, { width, height, lane, right, left: right - this.seconds() });
    return true;
  }

  paint(pen, view) {
    const { width, height, lane, right, left } = view;
    const x = (time) => LEFT + (time - left) / (right - left) * (width - LEFT);
    this.paintAxis(pen, view, x);
    this.bars = [];
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height - AXIS);
    pen.clip();
    for (const change of this.runs.changes) this.paintChange(pen, change, view, x);
    for (const run of this.runs.between(left - 1, right)) this.paintRun(pen, run, view, x);
    pen.restore();
    pen.fillStyle = this.colours.soft;
    pen.font = `${Math.min(11.5, lane * 0.75)}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    const hosts = this.stages.map((stage) => stage.host);
    const apart = new Set(hosts).size > 1; // else one host's name at each says nothing
    ["in flight", ...hosts].forEach((host, row) => {
      const stage = apart && host ? `${row} ${host}` : `stage ${row}`;
      const text = row ? stage : host;
      pen.fillText(clipped(pen, text, LEFT - 12), 8, lane * (row + 0.5));
    });
  }

  paintAxis(pen, { width, height, lane, right, left }, x) {
    pen.strokeStyle = this.colours.line;
    pen.fillStyle = this.colours.soft;
    pen.lineWidth = 1;
    pen.font = "10.5px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    const step = nice((right - left) / Math.max(2, (width - LEFT) / 90));
    for (let n = 1; n * step < right - left; n += 1) {
      const at = Math.round(x(right - n * step)) + 0.5;
      pen.beginPath();
      pen.moveTo(at, 0);
      pen.lineTo(at, height - AXIS + 3);
      pen.stroke();
      const ago = `−${+(n * step).toPrecision(4)} s`;
      if (at < width - 24 && at > LEFT + 12) pen.fillText(ago, at - 14, height - 5);
    }
    for (let row = 1; row <= this.stages.length; row += 1) {
      pen.beginPath();
      pen.moveTo(0, Math.round(lane * row) + 0.5);
      pen.lineTo(width, Math.round(lane * row) + 0.5);
      pen.stroke();
    }
  }

  // A time without stages: from the last sign of a lost rank's pipeline to the others' first.
  paintChange(pen, { from, to, text }, { width, height }, x) {
    const [begin, end] = [x(from), Math.max(x(to), x(from) + 2)];
    if (end < LEFT || begin > width) return;
    pen.fillStyle = this.colours.danger;
    pen.globalAlpha = 0.18;
    pen.fillRect(begin, 0, end - begin, height - AXIS);
    pen.globalAlpha = 1;
    pen.fillRect(begin, 0, 1.5, height - AXIS);
    pen.font = "10.5px system-ui, sans-serif";
    pen.textBaseline = "top";
    const wide = pen.measureText(text).width;
    pen.fillText(text, Math.max(LEFT + 4, Math.min(begin + 6, width - wide - 4)), 4);
  }

  paintRun(pen, run, { lane, right }, x) {
    const colour = this.colours[run.style];
    const wrong = run.style === "rejected" || run.skipped;
    // on its way: a thin line from issue to answer
    pen.strokeStyle = colour;
    pen.lineWidth = 1.25;
    pen.globalAlpha = 0.75;
    const depth = 4 + (run.id % 5) / 4 * (lane - 8);
    pen.beginPath();
    pen.moveTo(x(run.issued), depth);
    pen.lineTo(x(run.done ?? right), depth);
    pen.stroke();
    pen.globalAlpha = 1;
    run.spans.forEach(([start, seconds, fate, waited], k) => {
      if (k >= this.stages.length) return; // there were more stages then
      const begin = x(start + (run.past ? 0 : this.runs.shift(k)));
      const long = Math.max(seconds > 0 ? 1.5 : 1, x(start + seconds) - x(start) - 0.5);
      const tall = (fate === "skipped" ? 0.2 : wrong ? 0.42 : 0.68) * lane;
      const top = lane * (k + 1) + (lane - tall) / 2;
      pen.fillStyle = colour;
      if (run.style === "open") {
        pen.strokeRect(begin + 0.75, top + 0.75, Math.max(long - 1.5, 0.5), tall - 1.5);
      } else {
        pen.beginPath();
        pen.roundRect(begin, top, long, tall, Math.min(2.5, long / 3));
        pen.fill();
      }
      if (waited > 0 && seconds > 0) { // all waits of the run are shown at its end, paler
        const part = long * Math.min(1, waited / seconds);
        pen.fillStyle = this.colours.sunk;
        pen.globalAlpha = 0.6;
        pen.fillRect(begin + long - part, top, part, tall);
        pen.globalAlpha = 1;
      }
      this.bars.push({ run, k, seconds, waited, left: begin, right: begin + long });
    });
    this.bars.push({ run, k: -1, left: x(run.issued), right: x(run.done ?? right), depth });
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const lane = (box.height - AXIS) / (Math.max(this.stages.length, 1) + 1);
    const row = Math.floor(py / lane) - 1;
    const bar = this.bars.findLast((b) => b.k === row && b.left - 2 <= px && px <= b.right + 2
      && (b.k >= 0 || Math.abs(b.depth - py) < 4));
    this.tip.hidden = !bar;
    if (!bar) return;
    const { run } = bar;
    const work = bar.k < 0 ? "" : bar.seconds > 0
      ? `\nstage ${bar.k + 1}: ${(1000 * bar.seconds).toPrecision(3)} ms`
        + (bar.waited > 0 ? `, ${(1000 * bar.waited).toPrecision(3)} ms of it waiting for members` : "")
      : `\nstage ${bar.k + 1}: skipped`;
    this.tip.textContent = `run ${run.id}, ${run.rows} row${run.rows === 1 ? "" : "s"} `
      + `(${KINDS[run.kind] ?? run.kind})\n${this.words[run.style]}${work}`;
    this.tip.style.left = `${Math.min(px + 12, box.width - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${py + 14}px`;
  }

  // The picture in words, for those who do not see it.
  describe() {
    const right = this.edge();
    const seconds = this.seconds();
    const seen = this.runs.between(right - seconds, right);
    const parts = FATES.map(([style]) => [seen.filter((r) => r.style === style).length, style])
      .filter(([count]) => count).map(([count, style]) => `${count} ${this.words[style]}`);
    const lost = this.runs.changes.filter(({ to }) => to >= right - seconds);
    this.text.textContent = lost.map(({ text }) => `${text}. `).join("") + `The last ${seconds.toPrecision(2)} seconds: ${seen.length} runs`
      + (parts.length ? `, of them ${parts.join(", ")}.` : ".");
  }
}

function nice(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return power * [1, 2, 2.5, 5, 10].find((n) => n * power >= step);
}

function clipped(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
