// A conversation as a tree of turns: an edited message and an answer asked for again are branches
// beside the old ones. Knows no page and no server.

const FORM = "pipeinfer conversation 1";
const TITLE = 60;

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  // settings: {system, params}; turns: {id: {id, parent, role, content, files, note, cut, children,
  // pick, asked, rev}}, where "" is the id of the root, pick the child that is shown, and cut says
  // that the model had more to say. asked: of the answer that is coming: its id at the server, the
  // turn that it becomes and, where that is continued, what that was before. rev: rises with each
  // change, as `named` and `set` rise when name or settings change.
  constructor(saved = {}) {
    const now = Date.now();
    Object.assign(this, {
      id: newId(), title: "", named: false, created: now, changed: now, set: 0,
      settings: { system: "", params: {} },
      turns: { "": { id: "", parent: null, children: [], pick: null } },
    }, saved);
  }

  get empty() {
    return this.turns[""].children.length === 0;
  }

  // The turns that are shown, first to last.
  path() {
    const found = [];
    let turn = this.turns[""];
    while (turn.pick !== null) {
      turn = this.turns[turn.pick];
      found.push(turn);
    }
    return found;
  }

  get last() {
    return this.path().at(-1)?.id ?? "";
  }

  // A new turn after `parent`, which is shown from now on.
  add(parent, role, content, more = {}) {
    const id = newId();
    this.turns[id] = { id, parent, role, content, files: [], children: [], pick: null, ...more };
    this.turns[parent].children.push(id);
    this.turns[parent].pick = id;
    if (!this.named && role === "user" && parent === "") this.title = titleOf(content, more.files);
    this.changed = Date.now();
    return this.turns[id];
  }

  // The turns beside this one, itself included.
  branches(turn) {
    return this.turns[turn.parent].children;
  }

  // Shows the branch `step` places further.
  turnTo(turn, step) {
    const beside = this.branches(turn);
    const next = beside[beside.indexOf(turn.id) + step];
    if (next) this.turns[turn.parent].pick = next;
  }

  rename(title) {
    this.title = title.trim() || "Untitled";
    this.named = true;
    this.set = Date.now();
  }

  use(settings) {
    this.settings = settings;
    this.set = Date.now();
  }

  // Changes what a turn holds.
  alter(turn, changes) {
    Object.assign(turn, changes, { rev: (turn.rev ?? 0) + 1 });
  }

  // Takes over what another tab has stored: its new turns, and of those of both the newer one.
  // follows: whether what it has added is shown from now on.
  merge(other, follows = false) {
    for (const turn of Object.values(other.turns)) {
      const own = this.turns[turn.id];
      if (!own) {
        this.turns[turn.id] = turn;
        continue;
      }
      const children = [...new Set([...turn.children, ...own.children])];
      const more = follows && children.length > own.children.length;
      const pick = more ? turn.pick : own.pick ?? turn.pick;
      if ((turn.rev ?? 0) > (own.rev ?? 0)) {
        if (!turn.asked) delete own.asked;
        Object.assign(own, turn);
      }
      Object.assign(own, { children, pick });
    }
    if ((other.set ?? 0) > this.set) {
      const { title, named, settings, set } = other;
      Object.assign(this, { title, named, settings, set });
    }
    this.title ||= other.title;
    this.changed = Math.max(this.changed, other.changed);
  }

  // What the model gets: everything up to a turn.
  messages(upTo) {
    const found = [];
    for (let turn = this.turns[upTo]; turn.parent !== null; turn = this.turns[turn.parent]) {
      found.unshift({ role: turn.role, content: contentOf(turn) });
    }
    const system = this.settings.system.trim();
    return system ? [{ role: "system", content: system }, ...found] : found;
  }

  toText() {
    const parts = [`# ${this.title || "Conversation"}`];
    if (this.settings.system.trim()) parts.push(`**System:** ${this.settings.system.trim()}`);
    for (const turn of this.path()) {
      parts.push(`## ${turn.role === "user" ? "You" : "Model"}`, withFiles(turn));
    }
    return `${parts.join("\n\n")}\n`;
  }

  toJson() {
    return JSON.stringify({ form: FORM, ...this }, null, 1);
  }

  // Throws Error that says what is wrong.
  static fromJson(text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch {
      throw new Error("the file is not JSON");
    }
    if (data?.form !== FORM) throw new Error("the file holds no conversation of this page");
    const made = new Conversation({ title: String(data.title ?? ""), named: true });
    const { system = "", params = {} } = data.settings ?? {};
    made.settings = { system: String(system), params: numbers(params) };
    copyTurns(data.turns ?? {}, "", "", made);
    return made;
  }
}

// What `from` holds under its turn `source` becomes what `made` holds under `target`.
function copyTurns(from, source, target, made) {
  const open = [[source, target]];
  const seen = new Set();
  while (open.length) {
    const [old, now] = open.pop();
    if (seen.has(old) || !from[old]) throw new Error("the file's turns do not fit together");
    seen.add(old);
    for (const child of from[old].children ?? []) {
      const turn = from[child] ?? {};
      const files = (turn.files ?? []).map(({ name, text, media }) => (
        /^data:(image|audio)\//.test(media) ? { name: String(name), media }
          : { name: String(name), text: String(text) }));
      const role = turn.role === "user" ? "user" : "assistant";
      const note = turn.note ? { note: String(turn.note) } : {};
      const cut = turn.cut === true ? { cut: true } : {};
      const added = made.add(now, role, String(turn.content ?? ""), { files, ...note, ...cut });
      open.push([child, added.id]);
    }
    const place = (from[old].children ?? []).indexOf(from[old].pick);
    made.turns[now].pick = made.turns[now].children.at(place) ?? null;
  }
}

function numbers(params) {
  return Object.fromEntries(Object.entries(params).filter(([, value]) => (
    typeof value === "number" && Number.isFinite(value))));
}

function titleOf(content, files = []) {
  const text = content.trim().split("\n")[0] || files[0]?.name || "";
  return text.length > TITLE ? `${text.slice(0, TITLE - 1)}…` : text;
}

// What the model gets of a message: pictures and sound as parts before its text.
function contentOf(turn) {
  const files = turn.files ?? [];
  const text = withFiles({ ...turn, files: files.filter(({ media }) => !media) });
  const shown = files.filter(({ media }) => media).map(({ media }) => (
    media.startsWith("data:audio/")
      ? { type: "input_audio", input_audio: { data: media.slice(media.indexOf(",") + 1) } }
      : { type: "image_url", image_url: { url: media } }));
  return shown.length ? [...shown, ...(text ? [{ type: "text", text }] : [])] : text;
}

// A message with its files before it, each in a fence longer than any that it holds.
function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text, media }) => {
    if (media) return media.startsWith("data:image/") ? `![${name}](${media})` : name;
    const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((ticks) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, ...(content ? [content] : [])].join("\n\n");
}
