// Other tabs of this browser with the same page: what they have changed, and the chats that they
// answer in.

const LASTING = 5000; // ms after which a tab that says nothing counts as closed
const REPLY = 300; // ms in which tabs answer each other

export class Tabs {
  // onChange(id, gone): another tab has changed or deleted a conversation, or ended its answer there.
  constructor(onChange) {
    this.own = ""; // the conversation that this tab answers in
    this.heard = new Map(); // when another tab said that it answers in a conversation
    this.channel = globalThis.BroadcastChannel ? new BroadcastChannel("pipeinfer") : null;
    this.channel?.addEventListener("message", ({ data: { op, id } }) => {
      if (op === "who" && id === this.own) this.tell("answers", id);
      if (op === "answers") this.heard.set(id, performance.now());
      if (op === "over") this.heard.delete(id);
      if (["changed", "over", "gone"].includes(op)) onChange(id, op === "gone");
    });
  }

  tell(op, id) {
    this.channel?.postMessage({ op, id });
  }

  // This tab answers in a conversation from now on; "": in none.
  answers(id) {
    clearInterval(this.pulse);
    if (this.own) this.tell("over", this.own);
    this.own = id;
    if (!id) return;
    this.tell("answers", id);
    this.pulse = setInterval(() => this.tell("answers", id), LASTING / 4);
  }

  // Whether another tab answers there.
  elsewhere(id) {
    return performance.now() - (this.heard.get(id) ?? -Infinity) < LASTING;
  }

  // The same, asked now.
  async find(id) {
    this.tell("who", id);
    await new Promise((resolve) => { setTimeout(resolve, REPLY); });
    return this.elsewhere(id);
  }
}
