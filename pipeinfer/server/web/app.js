// The page: joins the chat, its conversations and settings, and the pipeline.

import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { button, copies, element } from "./element.js";
import { Files } from "./files.js";
import { Library } from "./library.js";
import { Pipeline } from "./pipeline.js";
import { Race } from "./race.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { Tabs } from "./tabs.js";
import { Watcher } from "./watcher.js";

const $ = (id) => document.getElementById(id);
const STARTERS = ["Write a function that reverses a string",
  "Explain why the sky is blue", "Write a short poem about the sea"];

const wide = matchMedia("(min-width: 1200px)");

// --- conversations --------------------------------------------------------------------------

const store = new Store();

const pipeline = new Pipeline({ onChange: tellChange });

// Another tab has changed a conversation. A tab that nobody looks at shows it when it is seen again.
const tabs = new Tabs((id, gone) => {
  if (gone && id === chat.conversation.id) chat.forget();
  else follow(id);
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !chat.conversation.empty) follow(chat.conversation.id);
});

async function follow(id) {
  const { conversation } = chat;
  if (id === conversation.id) {
    const stored = await store.get(id);
    if (!stored || conversation !== chat.conversation) return;
    chat.follow(stored);
    if (!tabs.elsewhere(id)) $("notices").querySelector(".early")?.remove();
    if (!$("settings").open) settings.show();
    showOpen();
  }
  if (!document.hidden) library.refresh();
}

const chat = new Chat({
  log: $("log"), scroll: $("scroll"), end: $("to-end"), empty: $("empty"),
  guesses: () => pipeline.guesses !== false,
  tabs, mayAsk,
  onAction: (action) => (action === "settings" ? settings.open(watcher.locked) : newChat()),
  onBusy: (busy) => {
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    document.body.classList.toggle("busy", busy);
    if (!busy) $("notices").querySelector(".early")?.remove();
    if (!busy && document.activeElement === document.body) $("prompt").focus();
  },
  onChange: keep,
});

async function keep(conversation, leaving) {
  if (conversation.empty) return;
  showOpen();
  try {
    await store.put(conversation, leaving);
    tabs.tell("changed", conversation.id);
    library.refresh();
  } catch (error) {
    say(`This conversation cannot be kept: ${error?.message ?? error}. Delete old ones under Chats, `
      + "or export it.");
  }
}

const settings = new Settings({
  conversation: () => chat.conversation, onChange: keep, onKey: () => watcher.again() });

const library = new Library({
  dialog: $("chats"), beside: () => wide.matches, list: $("chat-list"), input: $("import-file"), note: $("chats-note"), store,
  search: $("find-chat"),
  current: () => chat.conversation.id,
  onOpen: open,
  onGone: (id) => {
    tabs.tell("gone", id);
    if (id === chat.conversation.id) chat.forget();
  },
  onNamed: (id, title) => {
    tabs.tell("changed", id);
    if (id !== chat.conversation.id) return;
    chat.conversation.rename(title);
    showOpen();
  },
});

function open(conversation) {
  chat.open(conversation);
  settings.show();
  showOpen();
  library.refresh();
}

// The address names the open conversation, so that it is there again after a reload.
function showOpen() {
  const { id, title, empty } = chat.conversation;
  history.replaceState(null, "", empty ? "." : `#${id}`);
  $("to-status").href = empty ? "status" : `status#${id}`; // whose way back leads here
  document.title = [empty ? "" : title, $("model").textContent, "pipeinfer"].filter(Boolean)
    .join(" · ");
}

function newChat() {
  open(new Conversation({ settings: Settings.begin() }));
  $("prompt").focus();
}

async function openNamed(id) {
  const found = id ? await store.get(id) : null;
  if (found && chat.conversation.empty) open(found);
}

// --- writing --------------------------------------------------------------------------------

const files = new Files({
  list: $("files"), input: $("attach-file"), target: document.querySelector(".chat"), say });

// Whether a message can be sent; if not, says what is needed first.
function mayAsk() {
  if (watcher.locked) settings.open(true);
  else if (tabs.elsewhere(chat.conversation.id)) {
    say("An answer to this chat is coming in another tab. It can be stopped there.", "early");
  } else return true;
  return false;
}

function send() {
  const text = $("prompt").value.trim();
  if (!text && !files.kept.length) return;
  if (chat.busy) {
    say("The answer is still coming. Esc or Stop ends it; then the message can be sent.", "early");
    return;
  }
  if (!mayAsk()) return;
  $("prompt").value = "";
  grow();
  chat.send(text, files.give());
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

const race = new Race({ prompt: () => chat.lastMessage || STARTERS[0] });

// --- what happens ---------------------------------------------------------------------------

function tellChange(what) {
  if (what.lost) chat.answering?.survived(what.who);
  say(`${what.title}. ${what.long}`, what.lost ? "lost" : "");
}

// A line above the conversation until it is closed.
function say(text, style = "") {
  if (style === "early" && $("notices").querySelector(".early")) return;
  const line = element("div", `notice ${style}`.trim());
  line.append(element("p", "", text), button("Close", "quiet", () => {
    line.remove();
    $("prompt").focus();
  }));
  $("notices").append(line);
  while ($("notices").children.length > 3) $("notices").firstChild.remove();
}

const watcher = new Watcher({
  field: $("state"),
  onProps: (props) => {
    $("model").textContent = props.model_alias;
    settings.defaults(props.default_generation_settings);
    settings.offer(props.models);
    race.offer(props.race);
    showOpen();
  },
  onFrame: (frame) => pipeline.take(frame),
  onLocked: () => settings.open(true),
});

// --- wiring ---------------------------------------------------------------------------------

copies();
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("prompt").value) {
    event.preventDefault();
    chat.editLast();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !document.querySelector("dialog[open]")) chat.stop();
});
$("attach").addEventListener("click", () => $("attach-file").click());
$("stop").addEventListener("click", () => {
  chat.stop();
  $("prompt").focus();
});
// Another page would end the answer that is coming: then the status has a tab of its own.
$("to-status").addEventListener("click", () => { $("to-status").target = chat.busy ? "_blank" : ""; });
addEventListener("pagehide", () => chat.leave());
addEventListener("pageshow", ({ persisted }) => { if (persisted) location.reload(); });
$("new-chat").addEventListener("click", newChat);
$("open-chats").addEventListener("click", () => library.open());
$("import").addEventListener("click", () => $("import-file").click());
addEventListener("hashchange", async () => {
  const found = await store.get(location.hash.slice(1));
  if (found && found.id !== chat.conversation.id) open(found);
});

// On a wide screen the list of chats stands beside the conversation.
function placeChats() {
  $("chats").close();
  $(wide.matches ? "beside" : "chats").append($("chats-body"));
  $("beside").hidden = !wide.matches;
  $("open-chats").hidden = wide.matches;
  library.refresh();
}
wide.addEventListener("change", placeChats);
placeChats();

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

$("api-base").textContent = new URL("v1", document.baseURI).href;
$("starters").append(...STARTERS.map((text) => {
  const item = element("li");
  item.append(button(text, "", () => chat.idle(() => chat.send(text))));
  return item;
}));
const named = location.hash.slice(1);
open(new Conversation({ settings: Settings.begin() }));
openNamed(named);
if (matchMedia("(pointer: fine)").matches) $("prompt").focus({ preventScroll: true });
