// A model's text as elements: Markdown by marked, made safe by DOMPurify, code coloured by
// highlight.js. HTML in the text is shown as text. Only what has changed is made anew.

import { copyButton, element } from "./element.js";
import { underline } from "./marks.js";
import DOMPurify from "./vendor/purify.js";
import { Marked } from "./vendor/marked.js";

const TAGS = ["p", "br", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "hr",
  "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "a", "span"];
const ATTRIBUTES = ["href", "title", "class", "start", "align"];
const MOST_COLOURED = 40000; // characters of a code block
const LINK = /^(https?|mailto):/i;

const marked = new Marked({
  gfm: true, breaks: true,
  renderer: {
    html: ({ text, block }) => {
      if (/^<br\s*\/?>$/i.test(text.trim())) return "<br>";
      return block ? `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>` : escaped(text);
    },
    // Nothing is loaded from elsewhere because a model says so.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => {
      const language = /^[\w+#.-]+/.exec(lang ?? "")?.[0] ?? "";
      const style = language ? ` class="language-${escaped(language)}"` : "";
      return `<pre><code${style}>${escaped(text)}\n</code></pre>`;
    },
  },
});

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;").replaceAll("'", "&#39;");
}

function clean(html) {
  return DOMPurify.sanitize(html, { RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false });
}

// One text in `target`.
export class Markdown {
  constructor(target) {
    this.target = target;
    this.blocks = []; // {raw, nodes}
    this.coloured = 0;
  }

  // marks: see marks.js. all: make everything anew.
  show(text, marks = [], all = false) {
    const source = text.replaceAll("\r\n", "\n").replaceAll("\r", "\n");
    const tokens = lexed(source);
    let same = 0;
    if (!all && this.coloured === colours.version) {
      const most = Math.min(this.blocks.length, tokens.length) - 1;
      while (same < most && this.blocks[same].raw === tokens[same].raw) same += 1;
    }
    this.coloured = colours.version;
    for (const { nodes } of this.blocks.splice(same)) for (const node of nodes) node.remove();
    let from = tokens.slice(0, same).reduce((sum, token) => sum + token.raw.length, 0);
    for (const token of tokens.slice(same)) {
      const nodes = made(token, tokens.links);
      const to = from + token.raw.length;
      underline(nodes, source, from, to, marks);
      this.target.append(...nodes);
      this.blocks.push({ raw: token.raw, nodes });
      from = to;
    }
  }
}

export function render(target, text, marks = []) {
  target.replaceChildren();
  new Markdown(target).show(text, marks, true);
}

function lexed(source) {
  try {
    return marked.lexer(source);
  } catch { // too deep for its recursion: shown as it is
    return Object.assign([{ type: "plain", raw: source }], { links: {} });
  }
}

function made(token, links) {
  if (token.type === "plain") return [element("pre", "", token.raw)];
  let fragment;
  try {
    fragment = clean(marked.parser(Object.assign([token], { links })));
  } catch {
    return [element("pre", "", token.raw)];
  }
  for (const link of fragment.querySelectorAll("a")) safe(link);
  for (const code of fragment.querySelectorAll("pre > code")) frame(code);
  for (const table of fragment.querySelectorAll("table")) scrolled(table);
  return [...fragment.childNodes].filter((node) => node.nodeType === Node.ELEMENT_NODE
    || node.data.trim());
}

// A link leads elsewhere, in a tab of its own that knows nothing of this one.
function safe(link) {
  const href = link.getAttribute("href") ?? "";
  if (!LINK.test(href)) {
    link.replaceWith(...link.childNodes);
    return;
  }
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  if (!link.title) link.title = href;
}

function scrolled(table) {
  const box = element("div", "table");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Table");
  table.replaceWith(box);
  box.append(table);
}

function frame(code) {
  const language = code.className.replace("language-", "");
  const text = code.textContent;
  code.removeAttribute("class");
  const figure = element("div", "code");
  const head = element("div", "code-head");
  head.append(element("span", "", language), copyButton(text.replace(/\n$/, "")));
  const pre = code.parentElement;
  pre.replaceWith(figure);
  pre.tabIndex = 0;
  figure.append(head, pre);
  if (language && text.length <= MOST_COLOURED) colours.paint(code, text, language);
}

// --- colours --------------------------------------------------------------------------------

// Loads highlight.js when the first code block that names its language appears.
const colours = {
  highlighter: null,
  loading: null,
  version: 0,

  paint(code, text, language) {
    if (!this.highlighter) {
      this.load();
      return;
    }
    if (!this.highlighter.getLanguage(language)) return;
    const found = this.highlighter.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(clean(found.value));
  },

  load() {
    this.loading ??= import("./vendor/highlight.js").then((module) => {
      this.highlighter = module.default;
      this.version += 1;
      document.dispatchEvent(new Event("colours"));
    }).catch((error) => console.warn(error));
  },
};
