// The settings dialog: what belongs to the conversation, and what to this browser.

import { key } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const SAVED = "pipeinfer.settings";
const $ = (id) => document.getElementById(id);

export class Settings {
  // conversation(): the open one; onChange: its settings have; onKey: the API key has.
  constructor({ conversation, onChange, onKey }) {
    Object.assign(this, { conversation, onChange, onKey });
    $("open-settings").addEventListener("click", () => this.open());
    for (const [id, event] of [["settings-form", "submit"], ["settings", "close"]]) {
      $(id).addEventListener(event, () => this.take());
    }
    $("mark").addEventListener("change", () => this.keep());
    $("reset").addEventListener("click", () => this.reset());
    const { mark = true } = saved();
    $("mark").checked = mark;
    document.body.classList.toggle("unmarked", !mark);
    $("api-key").value = key.get();
    this.show();
  }

  // What new conversations begin with: what was set last.
  static begin() {
    const { system = "", params = {} } = saved();
    return { system, params: { ...params } };
  }

  // What the server does where nothing is set.
  defaults(values) {
    for (const name of NUMBERS) {
      if (values[name] !== undefined) $(name).placeholder = values[name];
    }
  }

  // models: the names of those that a request can bring, if there are several.
  offer(models) {
    // the dialog may be open, with a choice that is not taken yet
    const chosen = $("settings").open ? $("which").value : this.conversation().settings.params.model;
    $("which-field").hidden = models.length < 2;
    $("which").replaceChildren(...["", ...models].map(
      (name) => new Option(name || "the one that is loaded", name)));
    $("which").value = chosen ?? "";
  }

  // locked: the server wants a key.
  open(locked = false) {
    this.show();
    $("key-wanted").hidden = !locked;
    $("key-wanted").textContent = key.get() ? "The server does not accept this key."
      : "This server wants an API key. Ask the person who runs it for one.";
    if (!$("settings").open) $("settings").showModal();
    if (locked) $("api-key").focus();
  }

  show() {
    const { system, params } = this.conversation().settings;
    $("system").value = system;
    for (const name of NUMBERS) $(name).value = params[name] ?? "";
    $("which").value = params.model ?? "";
  }

  take() {
    const params = {};
    for (const name of NUMBERS) {
      const field = $(name);
      if (field.value !== "" && field.validity.valid) params[name] = Number(field.value);
    }
    if ($("which").value) params.model = $("which").value;
    const settings = { system: $("system").value.trim(), params };
    const conversation = this.conversation();
    if (JSON.stringify(conversation.settings) !== JSON.stringify(settings)) {
      conversation.use(settings);
      this.onChange(conversation);
    }
    this.keep();
    this.takeKey();
  }

  keep() {
    const { settings } = this.conversation();
    const mark = $("mark").checked;
    localStorage.setItem(SAVED, JSON.stringify({ ...settings, mark }));
    document.body.classList.toggle("unmarked", !mark);
  }

  takeKey() {
    const given = $("api-key").value.trim();
    if (given === key.get()) return;
    key.set(given);
    this.onKey();
  }

  reset() {
    for (const name of [...NUMBERS, "system", "which"]) $(name).value = "";
    $("mark").checked = true;
    $("api-key").value = "";
    this.take();
  }
}

function saved() {
  try {
    return JSON.parse(localStorage.getItem(SAVED) ?? "{}") ?? {};
  } catch {
    return {};
  }
}
