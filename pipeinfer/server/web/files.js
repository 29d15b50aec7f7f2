// Text files that go along with a message: chosen, dropped or pasted.

import { button, element } from "./element.js";
import { sizeText } from "./turns.js";

const MOST_BYTES = 512 * 1024;
const MOST_FILES = 16;

export class Files {
  // list: where they are shown; input: the file field; target: what they can be dropped on;
  // say(text): tells what went wrong.
  constructor({ list, input, target, say }) {
    Object.assign(this, { list, input, say });
    this.kept = [];
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
    });
    target.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    target.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    target.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
  }

  async add(files) {
    for (const file of files) {
      const wrong = await this.take(file);
      if (wrong) this.say(`${file.name} ${wrong}`);
    }
    this.show();
  }

  // What is wrong with a file, "" if nothing.
  async take(file) {
    if (this.kept.length >= MOST_FILES) return `is one too many: ${MOST_FILES} fit in a message`;
    if (file.size > MOST_BYTES) return `is too long: at most ${MOST_BYTES / 1024} KiB fit`;
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) return "is no text file";
      this.kept.push({ name: file.name, text });
      return "";
    } catch {
      return "is no text file in UTF-8: the model reads text only";
    }
  }

  // All of them, for a message that is sent.
  give() {
    const given = this.kept;
    this.kept = [];
    this.show();
    return given;
  }

  show() {
    this.list.hidden = this.kept.length === 0;
    this.list.replaceChildren(...this.kept.map((file) => {
      const item = element("li", "", `${file.name} · ${sizeText(file.text.length)}`);
      const remove = button("×", "quiet", () => {
        this.kept.splice(this.kept.indexOf(file), 1);
        this.show();
        this.input.focus();
      });
      remove.ariaLabel = `Remove ${file.name}`;
      item.append(remove);
      return item;
    }));
  }
}
