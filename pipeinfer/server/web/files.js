// Text files, pictures and sound that go along with a message: chosen, dropped or pasted. Pictures are
// scaled here: the server computes longer for larger ones.

import { button, element } from "./element.js";
import { shownFile } from "./turns.js";

const MOST_BYTES = 512 * 1024;
const MOST_FILES = 16;
const MOST_SOUND = 10e6;
const MOST_PIXELS = 1.2e6;
const MOST_PNG = 1.5e6; // characters; a photo becomes a JPEG

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
    try {
      if (file.type.startsWith("image/")) {
        this.kept.push({ name: file.name, media: await scaled(file) });
        return "";
      }
      if (file.type.startsWith("audio/") && file.size < MOST_SOUND) {
        this.kept.push({ name: file.name, media: await uriOf(file) });
        return "";
      }
    } catch {
      return "cannot be read by this browser";
    }
    if (file.size > MOST_BYTES) return `is too long: at most ${MOST_BYTES / 1024} KiB fit`;
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) return "is no text file";
      this.kept.push({ name: file.name, text });
      return "";
    } catch {
      return "is neither a picture, nor sound, nor a text file in UTF-8";
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
      const item = shownFile(file);
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

// A picture of at most MOST_PIXELS as a data: URI, upright and on white.
async function scaled(file) {
  const bitmap = await createImageBitmap(file);
  const { width, height } = bitmap;
  const shrink = Math.min(1, Math.sqrt(MOST_PIXELS / (width * height)));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(width * shrink));
  canvas.height = Math.max(1, Math.round(height * shrink));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const png = canvas.toDataURL("image/png");
  return png.length < MOST_PNG ? png : canvas.toDataURL("image/jpeg", 0.9);
}

function uriOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
