// Which parts of a text were guessed ahead, and their underlines.
// Marks are [length, guessed] pairs that cover the text as the model wrote it.

const FAR = 400; // characters of markup that may stand between two words

// Adds a piece to marks, joined to the last one when it is of the same kind.
export function extend(marks, length, guessed) {
  const last = marks.at(-1);
  if (last && last[1] === guessed) last[0] += length;
  else if (length) marks.push([length, guessed]);
}

// Underlines what was guessed of `nodes`, which show source.slice(from, to) as Markdown. Words are
// found again in the source one after the other: markup stands there only.
export function underline(nodes, source, from, to, marks) {
  if (!marks.some(([, guessed]) => guessed)) return;
  const at = reader(marks);
  const place = { next: from };
  for (const text of texts(nodes)) {
    const parts = cut(text.data, source, to, place, at);
    if (parts.some(([, guessed]) => guessed)) text.replaceWith(...parts.map(shown));
  }
}

function texts(nodes) {
  const found = [];
  for (const node of nodes) {
    const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    if (node.nodeType === Node.TEXT_NODE) found.push(node);
    while (walker.nextNode()) {
      if (!walker.currentNode.parentElement.closest(".code-head")) found.push(walker.currentNode);
    }
  }
  return found;
}

// A text in pieces [text, guessed].
function cut(text, source, to, place, at) {
  const parts = [];
  const add = (piece, guessed) => {
    const last = parts.at(-1);
    if (last && last[1] === guessed) last[0] += piece;
    else parts.push([piece, guessed]);
  };
  for (const piece of text.match(/\s+|\S+/g) ?? []) {
    if (!piece.trim()) {
      add(piece, false);
      continue;
    }
    const found = source.indexOf(piece, place.next);
    if (found >= 0 && found - place.next <= FAR && found + piece.length <= to) {
      for (const [start, stop, guessed] of at(found, found + piece.length)) {
        add(source.slice(start, stop), guessed);
      }
      place.next = found + piece.length;
    } else {
      for (const letter of piece) one(letter, source, to, place, at, add);
    }
  }
  return joined(parts);
}

// A letter of a word that stands otherwise in the source, as behind a backslash.
function one(letter, source, to, place, at, add) {
  const found = source.indexOf(letter, place.next);
  if (found < 0 || found - place.next > 12 || found + letter.length > to) {
    add(letter, false);
    return;
  }
  add(letter, at(found, found + letter.length)[0][2]);
  place.next = found + letter.length;
}

// White space between two guessed words is underlined with them, at a line's end it is not.
function joined(parts) {
  const made = [];
  parts.forEach(([text, guessed], i) => {
    const between = !guessed && !text.trim() && !text.includes("\n")
      && made.at(-1)?.[1] && parts[i + 1]?.[1];
    if ((between || guessed) && made.at(-1)?.[1]) made.at(-1)[0] += text;
    else made.push([text, guessed]);
  });
  return made;
}

function shown([text, guessed]) {
  if (!guessed) return text;
  const span = document.createElement("span");
  span.className = "guess";
  span.textContent = text;
  return span;
}

// A function that cuts [start, stop) where marks change; asked for rising ranges.
function reader(marks) {
  let index = 0;
  let begin = 0;
  return (start, stop) => {
    const parts = [];
    while (index < marks.length && begin + marks[index][0] <= start) begin += marks[index++][0];
    let from = start;
    while (from < stop) {
      const [length, guessed] = marks[index] ?? [Infinity, false];
      const to = Math.min(stop, begin + length);
      parts.push([from, to, guessed]);
      from = to;
      if (begin + length <= from && index < marks.length) begin += marks[index++][0];
    }
    return parts;
  };
}
