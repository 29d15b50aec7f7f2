// One turn of a conversation on the page: a message, or an answer while it comes and afterwards.

import { button, copyButton, element } from "./element.js";
import { Markdown } from "./markdown.js";
import { extend } from "./marks.js";

const DO = { retry: "Try again", settings: "Open settings", new: "New chat" };

function label(text) {
  return element("span", "hidden", `${text}: `);
}

// ‹ 2 / 3 › where a turn has others beside it.
function switcher(turn, beside, onTurn) {
  const place = beside.indexOf(turn.id);
  const box = element("span", "branches");
  const back = button("‹", "quiet", () => onTurn(turn, -1));
  const next = button("›", "quiet", () => onTurn(turn, 1));
  back.ariaLabel = "Version before";
  next.ariaLabel = "Next version";
  back.disabled = place === 0;
  next.disabled = place === beside.length - 1;
  box.append(back, element("span", "", `${place + 1} / ${beside.length}`), next);
  return box;
}

// --- messages -------------------------------------------------------------------------------

// handlers: onTurn(turn, step), onEdit(turn, text).
export function messageItem(turn, beside, handlers) {
  const item = element("li", "user");
  const body = element("div", "text", turn.content);
  const foot = element("div", "foot");
  const edit = button("Edit", "quiet", () => editing(item, turn, handlers));
  edit.classList.add("edit");
  if (beside.length > 1) foot.append(switcher(turn, beside, handlers.onTurn));
  foot.append(edit);
  item.append(label("You"), ...filesOf(turn), ...(turn.content ? [body] : []), foot);
  return item;
}

function filesOf(turn) {
  if (!turn.files?.length) return [];
  const list = element("ul", "files");
  list.append(...turn.files.map(shownFile));
  return [list];
}

// A file of a message: a picture itself, of others the name.
export function shownFile({ name, text, media }) {
  if (!media) return element("li", "", `${name} · ${sizeText(text.length)}`);
  if (!media.startsWith("data:image/")) return element("li", "", name);
  const item = element("li", "picture");
  const image = element("img");
  image.src = media;
  image.alt = name;
  item.append(image);
  return item;
}

function sizeText(letters) {
  return letters < 1000 ? `${letters} characters` : `${(letters / 1000).toPrecision(3)} thousand`;
}

function editing(item, turn, { onEdit }) {
  const form = element("form", "editor");
  const field = element("textarea");
  field.value = turn.content;
  field.rows = Math.min(12, turn.content.split("\n").length + 1);
  field.ariaLabel = "Message";
  const buttons = element("div", "do");
  const send = button("Send", "primary");
  send.type = "submit";
  const before = [...item.childNodes];
  const from = document.activeElement;
  const leave = () => {
    item.replaceChildren(...before);
    from.focus();
  };
  buttons.append(button("Cancel", "quiet", leave), send);
  form.append(field, buttons);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() || turn.files?.length) onEdit(turn, field.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  item.replaceChildren(form);
  field.focus();
}

// --- answers --------------------------------------------------------------------------------

export class Answer {
  // guesses: whether the server guesses ahead. handlers: onTurn(turn, step), onAgain(turn),
  // onContinue(turn).
  constructor(guesses, handlers) {
    Object.assign(this, { guesses, handlers, text: "", marks: [], tokens: 0, guessed: 0,
      reason: "", timings: null, frame: 0, losses: [], lost: null, heard: performance.now() });
    this.item = element("li", "answer");
    this.item.setAttribute("aria-busy", "true");
    this.body = element("div", "text");
    this.shown = new Markdown(this.body);
    this.item.append(label("Model"), this.body);
    this.repaint = () => this.draw(true);
    document.addEventListener("colours", this.repaint);
  }

  // As it was kept. coming: another tab writes it.
  static of(turn, beside, guesses, handlers, coming) {
    const view = new Answer(guesses, handlers);
    view.text = turn.content;
    view.marks = turn.marks ?? [];
    view.draw(true);
    if (coming) view.end(null, [], "This answer is coming in another tab");
    else view.end(turn, beside, turn.note ?? "");
    return view;
  }

  // What there is of an answer, to which more is added.
  goOn({ content, marks = [], tokens = 0, guessed = 0 }) {
    Object.assign(this, { text: content, marks: marks.map((mark) => [...mark]), tokens, guessed });
    this.draw(true);
  }

  // Whether the model had more to say.
  get cut() {
    return this.reason !== "stop";
  }

  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    if (chunk.prompt_progress) this.reads(chunk.prompt_progress);
    if (this.lost) {
      const pause = (performance.now() - this.lost.since) / 1000;
      this.losses.push(`${this.lost.who} was lost on the way: ${pause.toFixed(1)} s of pause, `
        + "no token lost");
      this.lost = null;
    }
    this.heard = performance.now();
    const { content = "", reasoning_content: thought = "" } = choice.delta;
    if (thought) this.text += this.thinking ? thought : `<think>\n${thought}`;
    else if (content && this.thinking) this.text += "\n</think>\n\n";
    if (thought || content) this.thinking = Boolean(thought);
    this.text += content;
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

  // How much of the prompt is computed, until something of the answer has come.
  reads({ processed, total }) {
    this.reading ??= element("p", "reading");
    this.reading.textContent = `reading ${processed.toLocaleString("en")} of `
      + `${total.toLocaleString("en")} tokens`;
    this.item.append(this.reading);
  }

  draw(all = false) {
    this.frame = 0;
    if (this.text) this.reading?.remove();
    this.shown.show(this.text, this.marks, all);
  }

  // A rank was lost while this is written. That no token was is said when the next one has come.
  survived(who) {
    this.lost ??= { who, since: this.heard };
  }

  // Nothing more comes. turn: what is kept of it, null for nothing.
  end(turn, beside, note) {
    cancelAnimationFrame(this.frame);
    this.reading?.remove();
    this.draw(true);
    this.item.removeAttribute("aria-busy");
    const foot = element("div", "foot");
    if (turn) {
      foot.append(copyButton(this.text));
      const again = button("Again", "quiet", () => this.handlers.onAgain(turn));
      again.title = "Another answer to the same message";
      foot.append(again);
      if (turn.cut && !turn.children.length) {
        foot.append(button("Continue", "quiet", () => this.handlers.onContinue(turn)));
      }
      if (beside.length > 1) foot.append(switcher(turn, beside, this.handlers.onTurn));
    }
    foot.append(element("span", "facts-of-answer", note));
    this.item.append(foot);
  }

  gone() {
    document.removeEventListener("colours", this.repaint);
  }

  summary() {
    const parts = [];
    if (this.tokens) parts.push(`${this.tokens} token${this.tokens === 1 ? "" : "s"}`);
    const speed = this.timings?.predicted_per_second;
    if (speed) parts.push(`${speed.toPrecision(3)} per second`);
    if (this.tokens && this.guesses) {
      parts.push(this.guessed ? `${Math.round(100 * this.guessed / this.tokens)} % drafted`
        : "speculation off: does not pay here");
    }
    const restored = this.timings?.restored_n;
    if (restored) {
      const all = this.timings.prompt_n + this.timings.cache_n;
      parts.push(`${restored.toLocaleString("en")} of ${all.toLocaleString("en")} prompt tokens from disk`);
    }
    const ends = { length: "cut off at the limit", stopped: "stopped", failed: "incomplete" };
    if (this.reason in ends && (this.tokens || this.reason === "stopped")) {
      parts.push(ends[this.reason]);
    }
    return [...parts, ...this.losses].join(" · ");
  }

  // The summary of what is kept while more may come: the page may be left.
  kept() {
    return [this.summary(), this.reason ? "" : "incomplete"].filter(Boolean).join(" · ");
  }

  problem({ title, said, advice, actions }, handlers) {
    const box = element("div", "problem");
    box.setAttribute("role", "alert");
    box.append(element("strong", "", title), element("p", "", advice));
    if (said) box.append(element("p", "said", `The server said: ${said}`));
    const buttons = element("div", "do");
    buttons.append(...actions.map((action) => button(DO[action], "", handlers[action])));
    box.append(buttons);
    this.item.append(box);
  }
}
