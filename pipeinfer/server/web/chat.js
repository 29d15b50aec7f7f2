// The conversation: messages, the answer as it streams in, stopping, errors with what to do.

import { ask, events, explain, Failure } from "./api.js";
import { Follower } from "./follower.js";
import { element, extend, render } from "./text.js";

export class Chat {
  // settings: () => {system, params}; onAction: "settings" or "new" was asked for; onTokens(count)
  // is told of output tokens as they arrive.
  constructor({ log, scroll, empty, settings, onAction, onBusy, onTokens }) {
    Object.assign(this, { log, scroll, empty, settings, onAction, onBusy, onTokens });
    this.follower = new Follower(scroll, log);
    this.messages = [];
    this.controller = null;
  }

  get busy() {
    return this.controller !== null;
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
    this.empty.hidden = false;
  }

  stop() {
    this.controller?.abort();
  }

  async send(text) {
    this.messages.push({ role: "user", content: text });
    const item = element("li", "user");
    const body = element("div", "text");
    body.textContent = text;
    item.append(label("You"), body);
    this.log.append(item);
    this.empty.hidden = true;
    await this.answer();
  }

  // Ask for the answer to what has been said so far.
  async answer() {
    const view = new Answer(this.log);
    this.follower.begin();
    const controller = new AbortController();
    this.controller = controller;
    this.onBusy(true);
    const before = this.messages.length;
    try {
      await this.receive(view, controller.signal);
    } catch (error) {
      if (error.name === "AbortError") view.reason = "stopped";
      else this.fail(view, error, before);
    }
    view.finish();
    if (view.text && this.messages.length === before) {
      this.messages.push({ role: "assistant", content: view.text });
    }
    if (this.controller === controller) {
      this.controller = null;
      this.onBusy(false);
    }
  }

  async receive(view, signal) {
    const { system, params } = this.settings();
    const messages = system ? [{ role: "system", content: system }, ...this.messages]
      : this.messages;
    const response = await ask("v1/chat/completions", { signal, body: {
      ...params, messages, stream: true, pipeinfer: { detail: true } } });
    for await (const chunk of events(response)) {
      if (chunk === null) return;
      view.take(chunk);
      this.onTokens(chunk.pipeinfer?.tokens?.length ?? 0);
    }
    throw new Failure("the stream ended early", { code: "broken" });
  }

  fail(view, error, before) {
    if (!(error instanceof Failure)) {
      console.error(error);
      error = new Failure(String(error));
    }
    const found = explain(error);
    view.reason = "failed";
    view.problem(found, {
      retry: () => {
        view.item.remove();
        this.messages.length = before;
        this.answer();
      },
      settings: () => this.onAction("settings"),
      new: () => this.onAction("new"),
    });
  }
}

// One answer on the page.
class Answer {
  constructor(log) {
    this.text = "";
    this.marks = [];
    this.tokens = 0;
    this.guessed = 0;
    this.reason = "";
    this.timings = null;
    this.frame = 0;
    this.item = element("li", "answer");
    this.item.setAttribute("aria-busy", "true");
    this.body = element("div", "text");
    this.item.append(label("Model"), this.body);
    log.append(this.item);
  }

  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    this.text += choice.delta.content ?? "";
    const detail = chunk.pipeinfer;
    if (detail) {
      detail.texts.forEach((text, i) => extend(this.marks, text.length, detail.speculated[i]));
      this.tokens += detail.texts.length;
      this.guessed += detail.speculated.filter(Boolean).length;
    }
    if (chunk.timings) this.timings = chunk.timings;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    render(this.body, this.text, this.marks);
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.item.removeAttribute("aria-busy");
    const foot = element("div", "foot");
    if (this.text) {
      const copy = element("button", "quiet");
      copy.type = "button";
      copy.textContent = "Copy";
      copy.dataset.copy = this.text;
      foot.append(copy);
    }
    const facts = element("span", "facts-of-answer");
    facts.textContent = this.summary();
    foot.append(facts);
    this.item.append(foot);
  }

  summary() {
    const parts = [];
    if (this.tokens) parts.push(`${this.tokens} token${this.tokens === 1 ? "" : "s"}`);
    const speed = this.timings?.predicted_per_second;
    if (speed) parts.push(`${speed.toPrecision(3)} per second`);
    if (this.tokens) parts.push(`${Math.round(100 * this.guessed / this.tokens)} % guessed ahead`);
    const ends = { length: "cut off at the limit", stopped: "stopped", failed: "incomplete" };
    if (this.reason in ends && (this.tokens || this.reason === "stopped")) {
      parts.push(ends[this.reason]);
    }
    return parts.join(" · ");
  }

  problem({ title, said, advice, actions }, handlers) {
    const box = element("div", "problem");
    box.setAttribute("role", "alert");
    const heading = element("strong");
    heading.textContent = title;
    const text = element("p");
    text.textContent = advice;
    box.append(heading, text);
    if (said) {
      const quote = element("p", "said");
      quote.textContent = `The server said: ${said}`;
      box.append(quote);
    }
    const buttons = element("div", "do");
    const names = { retry: "Try again", settings: "Open settings", new: "New chat" };
    for (const action of actions) {
      const button = element("button");
      button.type = "button";
      button.textContent = names[action];
      button.addEventListener("click", handlers[action]);
      buttons.append(button);
    }
    box.append(buttons);
    this.item.append(box);
  }
}

function label(text) {
  const span = element("span", "hidden");
  span.textContent = `${text}: `;
  return span;
}
