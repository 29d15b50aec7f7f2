// The conversation that is open: shown, continued, branched; the answer as it streams in; errors
// with what to do.

import { ask, events, explain, Failure } from "./api.js";
import { Conversation, newId } from "./conversation.js";
import { Follower } from "./follower.js";
import { Answer, messageItem } from "./turns.js";

const PATH = "v1/chat/completions";
const SAVE_SECONDS = 1;
const AGAIN_SECONDS = 6; // after which an answer that another tab left is taken up

export class Chat {
  // open: settings and new were asked for (onAction); busy or not (onBusy); something is to be
  // kept (onChange(conversation, leaving), a Promise). guesses(): whether the server guesses ahead. tabs: the other ones.
  // mayAsk(): whether a message can be sent now; says why not.
  constructor({ log, scroll, end, empty, guesses, tabs, mayAsk, onAction, onBusy, onChange }) {
    Object.assign(this, { log, empty, guesses, tabs, mayAsk, onAction, onBusy, onChange });
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
    if (!this.busy && this.mayAsk()) act();
  }

  stop() {
    this.controller?.abort();
  }

  // Another conversation; an answer that is coming is stopped and kept with its own.
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.show();
    this.takeUp();
    this.follower.begin();
  }

  // The open conversation was deleted.
  forget() {
    if (this.run) this.run.dropped = true;
    this.onAction("new");
  }

  // The open conversation as another tab has stored it.
  follow(stored) {
    const before = JSON.stringify(this.conversation.path());
    this.conversation.merge(stored, !this.busy);
    clearTimeout(this.later);
    this.later = setTimeout(() => this.takeUp(), 1000 * AGAIN_SECONDS);
    if (this.busy || this.log.querySelector(".editor")) return;
    if (JSON.stringify(this.conversation.path()) !== before) this.stale = true;
    if (this.stale && !document.hidden) this.show();
  }

  // Goes on with an answer that the page was left in; or says that none came.
  async takeUp() {
    const { conversation } = this;
    if (this.busy || !this.unanswered) return;
    const elsewhere = await this.tabs.find(conversation.id);
    const turn = this.unanswered;
    if (conversation !== this.conversation || this.busy || !turn) return;
    if (elsewhere) this.show();
    else if (turn.asked) this.answer(turn.id, null, turn.asked);
    else this.tellUnanswered(turn);
  }

  // The last message, if nothing or not all of its answer has come.
  get unanswered() {
    const last = this.conversation.path().at(-1);
    if (last?.role !== "assistant") return last;
    const turn = this.conversation.turns[last.parent];
    return turn.asked && turn;
  }

  tellUnanswered(last) {
    if (this.log.lastChild?.matches(".answer")) return;
    const view = new Answer(this.guesses(), this.handlers);
    this.views.push(view);
    this.log.append(view.item);
    view.end(null, [], "");
    view.problem({ title: "No answer", advice: "The page was left before one came.",
      actions: ["retry"] }, { retry: () => this.idle(() => this.answer(last.id)) });
  }

  show() {
    const { conversation } = this;
    this.stale = false;
    for (const view of this.views) view.gone();
    this.views = [];
    this.log.replaceChildren(...conversation.path().map((turn) => this.item(turn)));
    this.empty.hidden = !conversation.empty;
  }

  item(turn) {
    const beside = this.conversation.branches(turn);
    if (turn.role === "user") return messageItem(turn, beside, this.handlers);
    const coming = this.conversation.turns[turn.parent].asked?.turn === turn.id
      && this.tabs.elsewhere(this.conversation.id);
    const view = Answer.of(turn, beside, this.guesses(), this.handlers, coming);
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

  // Ask for an answer to what was said up to the turn `parent`, or for more of the answer `cut`; or
  // for all of one that was `asked` for before.
  async answer(parent, cut = null, asked = null) {
    const { conversation } = this;
    const turn = conversation.turns[asked?.turn] ?? cut;
    conversation.turns[parent].pick = turn?.id ?? null;
    this.show();
    const view = new Answer(this.guesses(), this.handlers);
    const run = { view, conversation, parent, cut, asked, turn, saved: turn?.content ?? "",
      resumed: Boolean(asked) };
    if (turn) {
      this.views.pop().gone();
      this.log.lastChild.remove();
      view.goOn(turn);
    }
    this.views.push(view);
    this.log.append(view.item);
    this.follower.begin();
    const controller = new AbortController();
    this.controller = controller;
    this.run = run;
    this.answering = view;
    this.tabs.answers(conversation.id);
    this.onBusy(true);
    const saving = setInterval(() => {
      if (view.text !== run.saved) this.keep(run);
    }, 1000 * SAVE_SECONDS);
    let problem = null;
    try {
      await this.receive(run, controller.signal);
    } catch (error) {
      if (this.left) return;
      view.reason = error.name === "AbortError" ? "stopped" : "failed";
      if (view.reason === "failed") problem = error;
    }
    clearInterval(saving);
    this.close(run, problem);
    view.end(run.turn, run.turn ? conversation.branches(run.turn) : [], view.summary());
    if (problem) this.fail(run, problem);
    if (this.controller === controller) {
      this.controller = this.answering = this.run = null;
      this.tabs.answers("");
      this.onBusy(false);
    }
  }

  async receive(run, signal) {
    const { conversation, view, cut } = run;
    const response = run.asked
      ? await ask(`${PATH}/${run.asked.id}?stream=true`, { signal })
      : await ask(PATH, { signal, name: newId(), body: {
        ...conversation.settings.params, messages: conversation.messages(cut?.id ?? run.parent),
        ...(cut ? { continue_final_message: true } : {}), stream: true, return_progress: true,
        pipeinfer: { detail: true } } });
    let first = true;
    for await (const chunk of events(response, () => { run.numbered = true; })) {
      if (chunk === null) return;
      if (first) this.began(run, chunk.id);
      first = false;
      view.take(chunk);
    }
    throw new Failure("the stream ended early", { code: "broken" });
  }

  // The server has taken a request: from now on the rest of its answer can be asked for.
  began(run, id) {
    const { conversation, view, cut } = run;
    if (run.asked) {
      view.goOn(run.asked.before ?? { content: "" });
      return;
    }
    const before = cut && { content: cut.content, marks: cut.marks, tokens: cut.tokens,
      guessed: cut.guessed };
    run.asked = { id, turn: cut?.id, before };
    conversation.alter(conversation.turns[run.parent], { asked: run.asked });
    this.onChange(conversation);
  }

  // An answer has ended. What the server still has is asked for when the page is opened again.
  close(run, problem) {
    const has = (run.resumed || run.numbered) && [0, 401, 503].includes(problem?.status);
    const { conversation, asked, view } = run;
    if (asked && !has) conversation.alter(conversation.turns[run.parent], { asked: undefined });
    if (view.reason === "stopped" && run.numbered) {
      ask(`${PATH}/${asked.id}`, { method: "DELETE" }).catch(() => {});
    }
    this.keep(run);
  }

  // The page goes away: what came of an answer stays, marked as incomplete.
  leave() {
    this.left = true;
    if (this.run) this.keep(this.run, true);
    this.tabs.answers("");
  }

  // The answer so far becomes a turn.
  keep(run, leaving = false) {
    const { view, conversation } = run;
    if (run.dropped) return;
    run.saved = view.text;
    if (!view.text) {
      const before = conversation.turns[run.parent];
      before.pick ??= before.children.at(-1) ?? null;
      this.onChange(conversation, leaving);
      return;
    }
    if (!run.turn) {
      run.turn = conversation.add(run.parent, "assistant", "");
      if (run.asked) run.asked.turn = run.turn.id;
      conversation.alter(conversation.turns[run.parent], {});
    }
    const { text, marks, cut, tokens, guessed } = view;
    conversation.alter(run.turn, { content: text, marks, note: view.kept(), cut, tokens, guessed });
    this.onChange(conversation, leaving);
  }

  fail(run, error) {
    if (!(error instanceof Failure)) {
      console.error(error);
      error = new Failure(String(error));
    }
    const words = explain(error);
    // a new answer would throw away what has come; the foot has Continue
    if (error.code === "not_found" && run.view.text) words.actions = [];
    run.view.problem(words, {
      retry: () => this.idle(() => this.answer(run.parent, run.cut,
        run.conversation.turns[run.parent].asked)),
      settings: () => this.onAction("settings"),
      new: () => this.onAction("new"),
    });
  }
}
