// The list of conversations: open, rename, export, delete, import.

import { Conversation } from "./conversation.js";
import { button, download, element } from "./element.js";

const FEW = 2; // chats from which on they can be searched

export class Library {
  // dialog: holds the list, a file field for imports and a line for what is to be said; unless
  // beside(): then they stand on the page. onOpen(conversation), onGone(id): the open one was
  // deleted or has another name (onNamed(id, title)).
  constructor({ dialog, beside, list, input, note, store, search, current, onOpen, onGone,
    onNamed }) {
    Object.assign(this, { dialog, beside, list, input, note, store, search, current, onOpen, onGone,
      onNamed });
    this.shown = ""; // the list as it was drawn
    search.addEventListener("input", () => this.filter());
    input.addEventListener("change", () => {
      this.take([...input.files]);
      input.value = "";
    });
  }

  async open() {
    this.dialog.showModal();
    this.search.value = "";
    await this.show();
    (this.list.querySelector("[aria-current]") ?? this.list.querySelector(".open"))?.focus();
  }

  // Draws the list beside the conversation again if it has changed and nothing is renamed in it.
  // From these checks to the restored focus nothing is awaited: a reader may act in between.
  async refresh() {
    const [heads, lasting] = await this.read();
    if (!this.beside() || this.list.querySelector(".rename")) return;
    if (this.keyOf(heads) === this.shown) return;
    const held = this.list.contains(document.activeElement)
      ? document.activeElement.closest("li").dataset.id : "";
    this.draw(heads, lasting);
    if (held) this.list.querySelector(`[data-id="${held}"] .open`)?.focus();
  }

  keyOf(heads) {
    return JSON.stringify([this.current(), ...heads.map(({ id, title }) => [id, title])]);
  }

  async show() {
    this.draw(...await this.read());
  }

  read() {
    return Promise.all([this.store.list(), this.store.lasting()]);
  }

  draw(heads, lasting) {
    this.shown = this.keyOf(heads);
    this.note.textContent = !lasting
      ? "This browser keeps nothing here: conversations are gone when the tab is closed."
      : heads.length ? "Kept in this browser only." : "No conversation yet.";
    this.list.replaceChildren(...heads.map((head) => this.item(head)));
    this.search.hidden = heads.length < FEW;
    this.filter();
  }

  // Only the chats whose name or text holds what is searched for, with the place where it stands.
  async filter() {
    const wanted = this.search.value.trim().toLowerCase();
    const places = wanted ? await this.store.find(wanted) : new Map();
    if (wanted !== this.search.value.trim().toLowerCase()) return;
    for (const item of this.list.children) {
      const title = (item.querySelector(".title")?.textContent ?? "").toLowerCase();
      const place = places.get(item.dataset.id) ?? "";
      item.hidden = !title.includes(wanted) && !place;
      item.querySelector(".place")?.replaceChildren(place);
    }
  }

  item(head) {
    const item = element("li");
    item.dataset.id = head.id;
    const open = button("", "open", async () => {
      const found = await this.store.get(head.id);
      if (!found) return;
      this.dialog.close();
      this.onOpen(found);
    });
    if (head.id === this.current()) open.setAttribute("aria-current", "true");
    open.append(element("span", "title", head.title || "Untitled"),
      element("time", "", when(head.changed)), element("span", "place"));
    const tools = element("div", "tools-of-item");
    const named = (text, act) => {
      const made = button(text, "quiet", act);
      made.ariaLabel = `${text}: ${head.title || "Untitled"}`;
      return made;
    };
    tools.append(
      named("Rename", () => this.rename(item, head)),
      named("Export", () => this.give(head, "md")),
      named("JSON", () => this.give(head, "json")),
      named("Delete", () => this.remove(head)));
    item.append(open, tools);
    return item;
  }

  rename(item, head) {
    const form = element("form", "rename");
    const field = element("input");
    field.value = head.title;
    field.ariaLabel = "Name";
    field.maxLength = 120;
    const save = button("Save", "primary");
    save.type = "submit";
    form.append(field, save);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const found = await this.store.get(head.id);
      found.rename(field.value);
      await this.store.put(found);
      this.onNamed(head.id, found.title);
      await this.show();
      this.list.querySelector(".open")?.focus();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      this.show();
    });
    item.replaceChildren(form);
    field.select();
  }

  async give(head, kind) {
    const found = await this.store.get(head.id);
    const name = head.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat";
    if (kind === "md") download(`${name}.md`, found.toText(), "text/markdown");
    else download(`${name}.json`, found.toJson(), "application/json");
  }

  // It can be had back until the list changes again.
  async remove(head) {
    const found = await this.store.get(head.id);
    await this.store.remove(head.id);
    this.onGone(head.id);
    await this.show();
    const undo = button("Undo", "quiet", async () => {
      await this.store.put(found);
      await this.show();
      this.list.querySelector(".open")?.focus();
    });
    this.note.replaceChildren(`“${head.title || "Untitled"}” was deleted. `, undo);
    undo.focus();
  }

  async take(files) {
    let last = null;
    for (const file of files) {
      try {
        last = Conversation.fromJson(await file.text());
        await this.store.put(last);
      } catch (error) {
        this.note.textContent = `${file.name} cannot be imported: ${error.message}`;
        return;
      }
    }
    await this.show();
  }
}

function when(time) {
  const then = new Date(time);
  const today = then.toDateString() === new Date().toDateString();
  return today ? then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : then.toLocaleDateString([], { day: "numeric", month: "short" });
}
