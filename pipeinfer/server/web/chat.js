// The conversation that is open: shown, continued, branched; the answer as it streams in; errors
// with what to do.

import { ask, events, explain, Failure } from "./api.js";
import { Conversation } from "./conversation.js";
import { Follower } from "./follower.js";
import { Answer, messageItem } from "./turns.js";

const SAVE_SECONDS = 1;

export class Chat {
  // open: settings and new were asked for (onAction); busy or not (onBusy); something is to be
  // kept (onChange, a Promise). guesses(): whether the server guesses ahead.
  constructor({ log, scroll, end, empty, guesses, onAction, onBusy, onChange }) {
    Object.assign(this, { log, empty, guesses, onAction, onBusy, onChange });
    this.follower = new Follower(scroll, log, end);
    this.conversation = new Conversation();
    this.controller = null;
    this.run = null; // the answer that is coming
    this.views = [];
    this.answering = null;
    this.handlers = {
      onTurn: (turn, step) => this.idle(() => {
        this.conversation.turnTo(turn, step);
        this.onChange(this.conversation);
        this.show();
      }),
      onEdit: (turn, text) => this.idle(() => this.say(turn.parent, text, turn.files)),
      onAgain: (turn) => this.idle(() => this.answer(turn.parent)),
      onContinue: (turn) => this.idle(() => this.answer(turn.parent, turn)),
    };
  }

  get busy() {
    return this.controller !== null;
  }

  // Opens the last message, if there is one, to be changed.
  editLast() {
    this.idle(() => [...this.log.querySelectorAll(".user .edit")].at(-1)?.click());
  }

  // What was asked last, "" before the first message.
  get lastMessage() {
    return this.conversation.path().findLast((turn) => turn.role === "user")?.content ?? "";
  }

  // Does something unless an answer is coming.
  idle(act) {
    if (!this.busy) act();
  }

  stop() {
    this.controller?.abort();
  }

  // Another conversation; an answer that is coming is stopped and kept with its own.
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.show();
    this.tellUnanswered();
    this.follower.begin();
  }

  // The page was left before anything came of the last answer.
  tellUnanswered() {
    const last = this.conversation.path().at(-1);
    if (last?.role !== "user") return;
    const view = new Answer(this.guesses(), this.handlers);
    this.views.push(view);
    this.log.append(view.item);
    view.end(null, [], "");
    view.problem({ title: "No answer", advice: "The page was left before one came.",
      actions: ["retry"] }, { retry: () => this.idle(() => this.answer(last.id)) });
  }

  show() {
    const { conversation } = this;
    for (const view of this.views) view.gone();
    this.views = [];
    this.log.replaceChildren(...conversation.path().map((turn) => this.item(turn)));
    this.empty.hidden = !conversation.empty;
  }

  item(turn) {
    const beside = this.conversation.branches(turn);
    if (turn.role === "user") return messageItem(turn, beside, this.handlers);
    const view = Answer.of(turn, beside, this.guesses(), this.handlers);
    this.views.push(view);
    return view.item;
  }

  send(text, files = []) {
    return this.say(this.conversation.last, text, files);
  }

  async say(parent, text, files) {
    const turn = this.conversation.add(parent, "user", text, { files });
    this.onChange(this.conversation);
    await this.answer(turn.id);
  }

  // Ask for an answer to what was said up to the turn `parent`, or for more of the answer `cut`.
  async answer(parent, cut = null) {
    const { conversation } = this;
    conversation.turns[parent].pick = cut?.id ?? null;
    this.show();
    const view = new Answer(this.guesses(), this.handlers);
    const run = { view, conversation, parent, cut, turn: cut, saved: performance.now() };
    if (cut) {
      this.views.pop().gone();
      this.log.lastChild.remove();
      view.goOn(cut);
    }
    this.views.push(view);
    this.log.append(view.item);
    this.follower.begin();
    const controller = new AbortController();
    this.controller = controller;
    this.run = run;
    this.answering = view;
    this.onBusy(true);
    let problem = null;
    try {
      await this.receive(run, controller.signal);
    } catch (error) {
      view.reason = error.name === "AbortError" ? "stopped" : "failed";
      if (view.reason === "failed") problem = error;
    }
    this.keep(run);
    view.end(run.turn, run.turn ? conversation.branches(run.turn) : [], view.summary());
    if (problem) this.fail(run, problem);
    if (this.controller === controller) {
      this.controller = this.answering = this.run = null;
      this.onBusy(false);
    }
  }

  async receive(run, signal) {
    const { conversation, view, cut } = run;
    const response = await ask("v1/chat/completions", { signal, body: {
      ...conversation.settings.params, messages: conversation.messages(cut?.id ?? run.parent),
      ...(cut ? { continue_final_message: true } : {}), stream: true,
      pipeinfer: { detail: true } } });
    for await (const chunk of events(response)) {
      if (chunk === null) return;
      view.take(chunk);
      if (performance.now() - run.saved > 1000 * SAVE_SECONDS) this.keep(run);
    }
    throw new Failure("the stream ended early", { code: "broken" });
  }

  // The page goes away: what came of an answer stays, marked as incomplete.
  leave() {
    if (this.run) this.keep(this.run);
  }

  // The answer so far becomes a turn.
  keep(run) {
    const { view, conversation } = run;
    run.saved = performance.now();
    if (!view.text) {
      const before = conversation.turns[run.parent];
      before.pick ??= before.children.at(-1) ?? null;
      return;
    }
    run.turn ??= conversation.add(run.parent, "assistant", "");
    const { text, marks, cut, tokens, guessed } = view;
    Object.assign(run.turn, { content: text, marks, note: view.kept(), cut, tokens, guessed });
    this.onChange(conversation);
  }

  fail(run, error) {
    if (!(error instanceof Failure)) {
      console.error(error);
      error = new Failure(String(error));
    }
    run.view.problem(explain(error), {
      retry: () => this.idle(() => this.answer(run.parent, run.cut)),
      settings: () => this.onAction("settings"),
      new: () => this.onAction("new"),
    });
  }
}
