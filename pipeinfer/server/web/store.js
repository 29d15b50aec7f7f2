// Where conversations are kept: this browser's IndexedDB, or where it has none, this tab's memory.
// Their names and times stand apart, so that a list needs no more than these.

import { Conversation } from "./conversation.js";

const NAME = "pipeinfer";
const HEADS = "heads";
const BODIES = "bodies";
const BEFORE = 24; // letters that are shown before and after what was found
const AFTER = 60;

export class Store {
  constructor() {
    this.memory = null; // id to JSON, where nothing can be kept
    this.opened = this.open();
  }

  // Whether conversations outlive the tab.
  async lasting() {
    return (await this.opened) !== null;
  }

  open() {
    return new Promise((resolve) => {
      const forget = () => {
        this.memory = new Map();
        resolve(null);
      };
      try {
        const request = indexedDB.open(NAME, 1);
        request.onupgradeneeded = () => {
          request.result.createObjectStore(HEADS, { keyPath: "id" });
          request.result.createObjectStore(BODIES, { keyPath: "id" });
        };
        request.onsuccess = () => {
          request.result.onversionchange = () => request.result.close();
          this.base = request.result;
          resolve(this.base);
        };
        request.onerror = request.onblocked = forget;
      } catch {
        forget();
      }
    });
  }

  // Names and times of all conversations, the youngest first.
  async list() {
    const base = await this.opened;
    const heads = base ? await done(base.transaction(HEADS).objectStore(HEADS).getAll())
      : [...this.memory.values()].map((text) => JSON.parse(text));
    return heads.sort((a, b) => b.changed - a.changed);
  }

  // Where a text in lower case stands: of each conversation that holds it, the first place.
  async find(text) {
    const base = await this.opened;
    const all = base ? await done(base.transaction(BODIES).objectStore(BODIES).getAll())
      : [...this.memory.values()].map((one) => JSON.parse(one));
    const found = new Map();
    for (const { id, turns } of all) {
      for (const { content = "" } of Object.values(turns)) {
        const at = content.toLowerCase().indexOf(text);
        if (at < 0) continue;
        const from = Math.max(0, at - BEFORE);
        found.set(id, `${from ? "…" : ""}${content.slice(from, at + text.length + AFTER)}`);
        break;
      }
    }
    return found;
  }

  async get(id) {
    const base = await this.opened;
    const found = base ? await done(base.transaction(BODIES).objectStore(BODIES).get(id))
      : JSON.parse(this.memory.get(id) ?? "null");
    return found ? new Conversation(found) : null;
  }

  // What other tabs have added to the conversation becomes a part of it: none overwrites another's.
  // leaving: the page goes away, and there is no time to read. Throws what the browser says when
  // there is no room.
  async put(conversation, leaving = false) {
    const base = leaving ? this.base : await this.opened;
    if (!base) {
      this.memory.set(conversation.id, JSON.stringify(conversation));
      return;
    }
    const change = base.transaction([HEADS, BODIES], "readwrite");
    const bodies = change.objectStore(BODIES);
    const write = () => {
      const { id, title, changed } = conversation;
      change.objectStore(HEADS).put({ id, title, changed });
      bodies.put(JSON.parse(JSON.stringify(conversation)));
      change.commit();
    };
    if (leaving) write();
    else {
      const stored = bodies.get(conversation.id);
      stored.onsuccess = () => {
        if (stored.result) conversation.merge(stored.result);
        write();
      };
    }
    await finished(change);
  }

  async remove(id) {
    const base = await this.opened;
    if (!base) {
      this.memory.delete(id);
      return;
    }
    const change = base.transaction([HEADS, BODIES], "readwrite");
    change.objectStore(HEADS).delete(id);
    change.objectStore(BODIES).delete(id);
    await finished(change);
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(change) {
  return new Promise((resolve, reject) => {
    change.oncomplete = () => resolve();
    change.onerror = change.onabort = () => reject(change.error);
  });
}
