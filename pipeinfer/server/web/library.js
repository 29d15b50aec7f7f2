// The list of conversations: open, rename, export, delete, import.

import { Conversation } from "./conversation.js";
import { button, download, element } from "./element.js";

const SURE_SECONDS = 4;

export class Library {
  // dialog: holds the list, a file field for imports and a line for what is to be said. onOpen(
  // conversation), onGone(id): the open one was deleted or has another name (onNamed(id, title)).
  constructor({ dialog, list, input, note, store, current, onOpen, onGone, onNamed }) {
    Object.assign(this, { dialog, list, input, note, store, current, onOpen, onGone, onNamed });
    input.addEventListener("change", () => {
      this.take([...input.files]);
      input.value = "";
    });
  }

  async open() {
    this.dialog.showModal();
    await this.show();
    (this.list.querySelector("[aria-current]") ?? this.list.querySelector(".open"))?.focus();
  }

  async show() {
    const heads = await this.store.list();
    this.note.textContent = !await this.store.lasting()
      ? "This browser keeps nothing here: conversations are gone when the tab is closed."
      : heads.length ? "Kept in this browser only." : "No conversation yet.";
    this.list.replaceChildren(...heads.map((head) => this.item(head)));
  }

  item(head) {
    const item = element("li");
    const open = button("", "open", async () => {
      const found = await this.store.get(head.id);
      if (!found) return;
      this.dialog.close();
      this.onOpen(found);
    });
    if (head.id === this.current()) open.setAttribute("aria-current", "true");
    open.append(element("span", "title", head.title || "Untitled"),
      element("time", "", when(head.changed)));
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
      named("Delete", (event) => this.remove(event.currentTarget, head)));
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

  // The first press asks, the second one deletes.
  async remove(pressed, head) {
    if (!pressed.dataset.sure) {
      pressed.dataset.sure = "yes";
      pressed.textContent = "Really?";
      pressed.ariaLabel = `Really delete ${head.title || "Untitled"}? Press again`;
      setTimeout(() => {
        delete pressed.dataset.sure;
        pressed.textContent = "Delete";
        pressed.ariaLabel = `Delete: ${head.title || "Untitled"}`;
      }, 1000 * SURE_SECONDS);
      return;
    }
    await this.store.remove(head.id);
    this.onGone(head.id);
    await this.show();
    (this.list.querySelector(".open") ?? this.dialog.querySelector("button")).focus();
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
