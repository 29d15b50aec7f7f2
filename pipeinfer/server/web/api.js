// Talks to the server: keys, errors, server-sent events. Knows nothing of what is shown.

const KEY = "pipeinfer.api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY),
};

// What went wrong. status 0: no answer at all. code: the server's name for it.
export class Failure extends Error {
  constructor(message, { status = 0, code = "", retryAfter = 0 } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export async function ask(path, { body, signal, method, name } = {}) {
  const headers = name ? { "Idempotency-Key": name } : {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"), headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("no answer", { code: "unreachable" });
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw failure(answer.error ?? {}, response.status, response.headers.get("Retry-After"));
}

function failure(error, status, retryAfter = null) {
  return new Failure(error.message ?? `the server answered with status ${status}`, {
    status, code: error.code ?? "", retryAfter: Number(retryAfter) || 0 });
}

// The objects of a stream of server-sent events, until it ends. Gives `null` for [DONE]; an error
// event is thrown. onNumber: called when events have numbers: the server keeps this answer.
export async function* events(response, onNumber = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Failure("the connection was lost", { code: "broken" });
      }
      if (part.done) return;
      const blocks = (rest + part.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("id: ")) onNumber();
        const data = block.split("\n").filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") yield null;
        else if (data) yield checked(JSON.parse(data));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function checked(data) {
  if (!data.error) return data;
  const status = { cluster_failed: 503, shutting_down: 503, timeout: 504 }[data.error.code] ?? 500;
  throw failure(data.error, status);
}

// A failure in words: what happened, what to do, and which buttons help.
export function explain(error) {
  const wait = error.retryAfter ? ` in ${error.retryAfter} s` : " in a moment";
  const said = error.message;
  switch (error.code) {
    case "unreachable":
      return { title: "The server does not answer", said: "",
        advice: "It may have been stopped, or the network is down. Try again when it is back.",
        actions: ["retry"] };
    case "broken":
      return { title: "The connection was lost", said: "",
        advice: "The text so far is kept: Continue goes on from there, Try again begins anew.",
        actions: ["retry"] };
    case "not_found":
      return { title: "The rest of this answer is lost", said,
        advice: "The page was left while it came. What had come by then stays: Continue goes on "
          + "from there.",
        actions: ["retry"] };
    case "invalid_api_key":
      return { title: "The server wants an API key", said: "",
        advice: "Enter the key in the settings. Ask the person who runs the server for one.",
        actions: ["settings", "retry"] };
    case "queue_full":
      return { title: "The server is busy", said,
        advice: `Its queue is full. Try again${wait}.`, actions: ["retry"] };
    case "loading":
      return { title: "The model is still loading", said: "",
        advice: `The server accepts messages when it is ready. Try again${wait}.`,
        actions: ["retry"] };
    case "shutting_down":
      return { title: "The server is shutting down", said: "",
        advice: "It finishes running requests and accepts no new ones. Try again when it is back.",
        actions: ["retry"] };
    case "race_running":
      return { title: "Another race is running", said: "", advice: `Try again${wait}.`,
        actions: ["retry"] };
    case "race_failed":
      return { title: "The race has failed", said, advice: "", actions: ["retry"] };
    case "cluster_failed":
      return { title: "The cluster has failed", said,
        advice: "The server must be restarted; see its log for the cause.", actions: ["retry"] };
    case "context_length_exceeded":
      return { title: "The conversation is too long for the model", said,
        advice: "Start a new chat, or ask for fewer tokens in the settings.",
        actions: ["new", "settings"] };
    case "timeout":
      return { title: "The answer took too long", said,
        advice: "Ask for fewer tokens, or raise --request-timeout.",
        actions: ["settings", "retry"] };
    default:
  }
  if (error.status === 413) {
    return { title: "The conversation is too long to send", said,
      advice: "Start a new chat.", actions: ["new"] };
  }
  if (error.status === 400) {
    return { title: "The server cannot use this request", said,
      advice: "Look at the settings, or rephrase the message.",
      actions: ["settings", "retry"] };
  }
  return { title: "Something went wrong", said, advice: `Try again${wait}.`, actions: ["retry"] };
}
