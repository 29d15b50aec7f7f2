// A race: the same prompt by three policies over stages that are paced as slow hosts, as the server
// runs it. Shows a line for each while it answers, how much faster the last one was, and what the
// stages computed meanwhile.

import { ask, events, explain, Failure } from "./api.js";
import { element } from "./element.js";
import { BY_NAME, FATES } from "./runs.js";

const $ = (id) => document.getElementById(id);

export class Race {
  // prompt(): what the field begins with.
  constructor({ prompt }) {
    Object.assign(this, { prompt, controller: null, lines: new Map() });
    $("open-race").addEventListener("click", () => this.open());
    $("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run($("race-prompt").value.trim());
    });
    $("race-stop").addEventListener("click", () => this.controller?.abort());
    $("race").addEventListener("close", () => this.controller?.abort());
  }

  // Whether the server offers one.
  offer(offered) {
    $("open-race").hidden = !offered;
  }

  open() {
    if (!this.lines.size) $("race-prompt").value = this.prompt();
    $("race").showModal();
    $("race-start").focus();
  }

  async run(prompt) {
    if (!prompt || this.controller) return;
    const controller = new AbortController();
    this.controller = controller;
    this.lines.clear();
    for (const name of ["race-lines", "race-legend", "race-picture"]) $(name).replaceChildren();
    this.busy(true);
    this.say("Three stages load the model …");
    try {
      await this.follow(prompt, controller.signal);
    } catch (error) {
      this.fail(error);
    } finally {
      this.controller = null;
      this.busy(false);
    }
  }

  async follow(prompt, signal) {
    for await (const one of events(await ask("race", { body: { prompt }, signal }))) {
      if (one.event === "begin") this.begin(one);
      if (one.event === "text") this.write(one);
      if (one.event === "end") this.end(one);
      if (one.event === "lanes") {
        this.draw(one);
        return;
      }
    }
    throw new Failure("the stream ended early", { code: "broken" });
  }

  begin({ stages, pace_ms: pace, racers }) {
    this.say(`${stages} stages of this machine, each slowed down to ${pace} ms and more for a run `
      + "(emulated). The policies answer one after the other.");
    for (const { policy, name } of racers) {
      const item = element("li");
      const line = { name, item, speed: element("span", "race-speed"), text: element("p") };
      item.append(element("strong", "", name), line.speed, line.text);
      this.lines.set(policy, line);
      $("race-lines").append(item);
    }
  }

  write(one) {
    const { text } = this.line(one);
    text.append(one.text);
    text.scrollTop = text.scrollHeight;
  }

  line({ policy }) {
    const line = this.lines.get(policy);
    line.item.classList.add("begun");
    return line;
  }

  end(result) {
    const line = this.line(result);
    line.result = result;
    const times = [...this.lines.values()][0] === line ? ""
      : ` · ${result.ratio.toFixed(1)} times, ${result.same ? "same text" : "another text"}`;
    line.speed.textContent = `${result.tokens_per_second.toFixed(1)} tokens/s${times}`;
    const results = [...this.lines.values()].map((one) => one.result);
    if (results.every(Boolean)) this.tell(results);
  }

  tell(results) {
    const last = results.at(-1);
    const factors = [...this.lines.values()].slice(0, -1).map(({ name, result }) => (
      `${(last.tokens_per_second / result.tokens_per_second).toFixed(1)} times as fast as ${name}`));
    const same = results.every((one) => one.same);
    this.say(same ? `The same text, ${factors.join(", ")}.`
      : "The texts differ. That must not happen: please report it with the prompt and the model.");
  }

  // A row for each stage: what it computed in `span` microseconds of each answer.
  draw({ span, lanes }) {
    const styles = new Set();
    for (const { policy, stages } of span > 0 ? lanes : []) {
      const box = element("div", "race-stages");
      stages.forEach((runs, i) => {
        const row = element("div", "race-stage");
        row.title = `stage ${i + 1}`;
        row.append(...runs.map(([start, end, fate]) => {
          const bar = element("span", BY_NAME[fate] ?? "rejected");
          styles.add(bar.className);
          bar.style.left = `${100 * start / span}%`;
          bar.style.width = `${100 * (end - start) / span}%`;
          return bar;
        }));
        box.append(row);
      });
      this.lines.get(policy).item.append(box);
    }
    $("race-legend").replaceChildren(...FATES.filter(([style]) => styles.has(style))
      .map(([style, text]) => element("li", style, text)));
    $("race-picture").hidden = !styles.size;
    $("race-picture").textContent = `What the stages computed within ${(span / 1e6).toFixed(1)} s `
      + "of each answer, a row for each stage:";
  }

  fail(error) {
    if (error.name === "AbortError") {
      this.say("Stopped.");
      return;
    }
    if (!(error instanceof Failure)) console.error(error);
    const { title, said, advice } = explain(
      error instanceof Failure ? error : new Failure(String(error)));
    this.say([`${title}.`, said, advice].filter(Boolean).join(" "));
  }

  say(text) {
    $("race-note").textContent = text;
  }

  busy(on) {
    $("race-start").hidden = on;
    $("race-stop").hidden = !on;
    $("race-prompt").disabled = on;
    $(on ? "race-stop" : "race-start").focus();
  }
}
