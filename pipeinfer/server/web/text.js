// Answers as elements: paragraphs, fenced code, `code` and **bold**, with guessed text underlined.
// `marks` are [length, guessed] pairs that cover the text.

export function render(target, text, marks) {
  const at = reader(marks);
  const children = [];
  for (const block of blocks(text)) {
    children.push(block.code ? codeBlock(text, block, at) : paragraph(text, block, at));
  }
  target.replaceChildren(...children);
}

// Fenced code and what is between: {start, stop} of each, without the fences.
function blocks(text) {
  const found = [];
  const fence = /^```([^\n`]*)(?:\n|$)/gm;
  let from = 0;
  let open;
  while ((open = fence.exec(text)) !== null) {
    addParagraphs(found, text, from, open.index);
    const start = fence.lastIndex;
    const close = /^```[ \t]*$/gm;
    close.lastIndex = start;
    const end = close.exec(text);
    const stop = end ? end.index : text.length;
    found.push({ code: true, language: open[1].trim(), start, stop });
    from = end ? Math.min(close.lastIndex + 1, text.length) : text.length;
    fence.lastIndex = from;
    if (!end) return found;
  }
  addParagraphs(found, text, from, text.length);
  return found;
}

function addParagraphs(found, text, from, to) {
  const gap = /\n[ \t]*\n+/g;
  gap.lastIndex = from;
  let start = from;
  for (;;) {
    const next = gap.exec(text);
    const stop = next && next.index < to ? next.index : to;
    if (text.slice(start, stop).trim()) found.push({ code: false, start, stop });
    if (stop === to) return;
    start = Math.min(gap.lastIndex, to);
  }
}

function codeBlock(text, { language, start, stop }, at) {
  const figure = element("div", "code");
  const head = element("div", "code-head");
  const name = element("span");
  name.textContent = language;
  const copy = element("button", "quiet");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.dataset.copy = text.slice(start, stop).replace(/\n$/, "");
  head.append(name, copy);
  const pre = element("pre");
  pre.tabIndex = 0;
  const code = element("code");
  fill(code, text, start, stop, at);
  pre.append(code);
  figure.append(head, pre);
  return figure;
}

function paragraph(text, { start, stop }, at) {
  const body = element("p", "para");
  const inline = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;
  inline.lastIndex = start;
  let from = start;
  let found;
  while ((found = inline.exec(text)) !== null && found.index < stop) {
    fill(body, text, from, found.index, at);
    const wide = found[1] === undefined ? 2 : 1;
    const inner = element(wide === 2 ? "strong" : "code");
    fill(inner, text, found.index + wide, inline.lastIndex - wide, at);
    body.append(inner);
    from = inline.lastIndex;
  }
  fill(body, text, from, stop, at);
  return body;
}

// Text from start to stop; what was guessed in spans of its own, line by line and without the white
// space around it.
function fill(target, text, start, stop, at) {
  for (const [from, to, guessed] of at(start, stop)) {
    const part = text.slice(from, to);
    for (const piece of guessed ? part.split(/(\s*\n\s*|^\s+|\s+$)/) : [part]) {
      if (!guessed || !piece.trim()) {
        target.append(piece);
      } else {
        const span = element("span", "guess");
        span.textContent = piece;
        target.append(span);
      }
    }
  }
}

// A function that cuts [start, stop) where marks change; asked for rising ranges.
function reader(marks) {
  let index = 0;
  let begin = 0;
  return (start, stop) => {
    const parts = [];
    while (index < marks.length && begin + marks[index][0] <= start) begin += marks[index++][0];
    let at = start;
    while (at < stop) {
      const [length, guessed] = marks[index] ?? [Infinity, false];
      const to = Math.min(stop, begin + length);
      parts.push([at, to, guessed]);
      at = to;
      if (begin + length <= at && index < marks.length) begin += marks[index++][0];
    }
    return parts;
  };
}

// Adds a piece to marks, joined to the last one when it is of the same kind.
export function extend(marks, length, guessed) {
  const last = marks.at(-1);
  if (last && last[1] === guessed) last[0] += length;
  else if (length) marks.push([length, guessed]);
}

export function element(name, style = "") {
  const made = document.createElement(name);
  if (style) made.className = style;
  return made;
}
