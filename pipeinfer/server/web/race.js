// A race: the same prompt by three policies over stages that are paced as slow hosts, as the server
// runs it. Shows a line for each while it answers, and how much faster the last one was.

import { ask, events, explain, Failure } from "./api.js";
import { element } from "./element.js";

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
    $("race-lines").replaceChildren();
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
      if (one.event === "end" && this.end(one)) return;
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

  // Whether that was the last one.
  end(result) {
    const line = this.line(result);
    line.result = result;
    const times = [...this.lines.values()][0] === line ? ""
      : ` · ${result.ratio.toFixed(1)} times, ${result.same ? "same text" : "another text"}`;
    line.speed.textContent = `${result.tokens_per_second.toFixed(1)} tokens/s${times}`;
    const results = [...this.lines.values()].map((one) => one.result);
    if (!results.every(Boolean)) return false;
    this.tell(results);
    return true;
  }

  tell(results) {
    const last = results.at(-1);
    const same = results.every((one) => one.same);
    this.say(same ? `The same text, ${last.ratio.toFixed(1)} times as fast.`
      : "The texts differ. That must not happen: please report it with the prompt and the model.");
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
