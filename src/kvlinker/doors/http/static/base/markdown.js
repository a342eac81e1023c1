/**
 * Shows Markdown while it is written. Its tokens become elements of a fixed set, and text: no markup is ever parsed,
 * so that nothing of an answer can run, load, or look like a part of the page.
 */

import { Marked } from "../libraries/marked/marked.esm.js";
import { button, copy, make } from "./dom.js";
import { highlight } from "./highlighting.js";
import { formula, mathematics } from "./mathematics.js";

const LEFT_OUT = ["html", "tag", "def", "reflink"]; // markup stays text, and no later line changes what is shown of an earlier one
const PROTOCOLS = ["http:", "https:", "mailto:"];
const ABOVE = 2; // the levels of the page's own headings
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: "\"", nbsp: "\u00a0", "#39": "'" };
const LONG = 1000; // characters; the beginning of a list or paragraph that is longer is not made anew with each token

const marked = new Marked({ gfm: true, breaks: true }).use({
  extensions: mathematics,
  tokenizer: Object.fromEntries(LEFT_OUT.map(name => [name, () => undefined])),
});

/** A text in Markdown that grows in an element. `mark` makes the element for a number in brackets, null where it means nothing. */
export class Markdown {
  #place;
  #mark;
  #text = "";
  #isWhole = false;
  #settled = 0; // characters whose elements do not change any more
  #tail = []; // {raw, token, node} of the blocks behind them

  constructor(place, mark = () => null) {
    this.#place = place;
    this.#mark = mark;
  }

  /** Show as much of the text as there is; `isWhole` where no more will come. */
  show(text, isWhole) {
    const all = text.replaceAll("\r\n", "\n");
    const goesOn = this.#isWhole && all.length > this.#text.length; // then its last block may, too
    if (goesOn || !all.startsWith(this.#text)) this.#clear();
    this.#text = all;
    this.#isWhole = isWhole;
    const blocks = blocksOf(all.slice(this.#settled));
    const changed = this.#tail.findIndex(({ raw }, index) => raw !== blocks[index]?.raw);
    const old = changed < 0 ? [] : this.#tail.splice(changed);
    const added = blocks.slice(this.#tail.length).map((block, index) => ({ ...block, node: this.#grown(old[index], block) || this.#element(block.token) }));
    for (const { node } of old) if (!added.some(each => each.node === node)) node.remove();
    for (const { node } of added) if (!node.parentNode) this.#place.append(node);
    this.#tail.push(...added);
    this.#settle(isWhole ? blocks.length : Math.max(blocks.length - 2, blocks.findLastIndex(({ ends }) => ends) + 1)); // what comes may change the last two
  }

  #settle(count) {
    for (const { raw, token, node } of this.#tail.splice(0, count)) {
      this.#settled += raw.length;
      if (token.type === "code") highlight(node.querySelector("code"), token.lang);
    }
  }

  #clear() {
    this.#place.replaceChildren();
    this.#settled = 0;
    this.#tail = [];
  }

  #element(token) {
    const { type, tokens, text, depth } = token;
    switch (type) {
      case "heading": return make(`h${Math.min(6, depth + ABOVE)}`, {}, ...this.#inline(tokens));
      case "list": return this.#list(token);
      case "blockquote": return make("blockquote", {}, ...tokens.map(each => this.#element(each)));
      case "code": return code(token);
      case "table": return this.#table(token);
      case "math": return formula(text, true);
      case "hr": return make("hr");
      case "space": return document.createTextNode("");
      case "text": return make("span", {}, ...this.#inline(tokens || [token])); // of a tight list
      case "checkbox": return document.createTextNode(tick(token));
      default: return make("p", {}, ...this.#inline(tokens || [token]));
    }
  }

  #list({ ordered, start, items }) {
    const made = make(ordered ? "ol" : "ul", {}, ...items.map(item => (
      make("li", {}, ...item.tokens.map(each => this.#element(each)))
    )));
    if (ordered) made.start = start;
    return made;
  }

  #table({ header, rows }) {
    const table = make("table", {}, make("thead", {}, this.#row("th", header)), make("tbody", {}, ...rows.map(cells => this.#row("td", cells))));
    return make("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Table" }, table);
  }

  #row(tag, cells) {
    return make("tr", {}, ...cells.map(({ tokens, align }) => {
      const made = make(tag, {}, ...this.#inline(tokens));
      if (align) made.style.textAlign = align;
      return made;
    }));
  }

  /** Return the element of code or of a table that has only become longer; null for anything else. */
  #grown(old, { token }) {
    if (old?.token.type !== token.type) return null;
    if (token.type === "code") return grownCode(old, token);
    if (token.type !== "table" || !areAlike(old.token.header, token.header)) return null;
    const { rows } = token;
    const changed = old.token.rows.findIndex((cells, index) => !rows[index] || !areAlike(cells, rows[index]));
    const kept = changed < 0 ? old.token.rows.length : changed;
    const body = old.node.querySelector("tbody");
    while (body.rows.length > kept) body.lastChild.remove();
    body.append(...rows.slice(kept).map(cells => this.#row("td", cells)));
    return old.node;
  }

  #inline(tokens) {
    return tokens.flatMap(token => {
      switch (token.type) {
        case "strong": case "em": case "del": return make(token.type, {}, ...this.#inline(token.tokens));
        case "codespan": return make("code", {}, token.text);
        case "br": return make("br");
        case "math": return formula(token.text, token.display);
        case "link": return link(token.href, this.#inline(token.tokens));
        case "checkbox": return tick(token);
        case "image": return link(token.href, [token.text || token.href]); // shown to nobody's server without a click
        default: return token.tokens ? this.#inline(token.tokens) : this.#marked(unescaped(token.text));
      }
    });
  }

  /** Return a text with the elements of the numbers in brackets, as in [1] and [1, 2]. */
  #marked(text) {
    return text.split(/(\[\d+(?:, ?\d+)*\])/).flatMap(part => {
      const marks = /^\[\d/.test(part) ? part.match(/\d+/g).map(number => this.#mark(Number(number))) : [];
      return marks.length && marks.every(Boolean) ? marks : [part];
    });
  }
}

const tick = ({ checked }) => (checked ? "☑ " : "☐ ");

const unescaped = text => text.replace(/&(amp|lt|gt|quot|nbsp|#39);/g, (_, name) => ENTITIES[name]);

/** Return the blocks that a text begins with, {raw, token, ends}; of one that `ends`, no more will change. */
function blocksOf(text) {
  const blocks = [];
  for (const token of marked.lexer(text)) {
    if (token.type === "space" && blocks.length) blocks.at(-1).raw += token.raw;
    else blocks.push({ raw: token.raw, token });
  }
  const last = blocks.at(-1);
  if (!last || last.raw.length < LONG) return blocks;
  if (last.token.type === "list" && last.token.items.length > 1) return [...blocks.slice(0, -1), ...parted(last.token)];
  const cut = last.token.type === "paragraph" ? last.raw.lastIndexOf("\n", last.raw.length - 2) + 1 : 0;
  if (!cut) return blocks;
  const [begin, rest] = [last.raw.slice(0, cut), last.raw.slice(cut)];
  return [...blocks.slice(0, -1), { raw: begin, token: marked.lexer(begin)[0], ends: true }, ...blocksOf(rest)];
}

/** Return a list without its last item, and that. */
function parted(list) {
  const items = list.items.slice(0, -1);
  const raw = items.map(item => item.raw).join("");
  const rest = { ...list, items: list.items.slice(-1), start: Number(list.start) + items.length };
  return [{ raw, token: { ...list, items }, ends: true }, { raw: list.raw.slice(raw.length), token: rest }];
}

const areAlike = (cells, others) => (
  cells.length === others.length && cells.every(({ text, align }, index) => text === others[index].text && align === others[index].align)
);

function grownCode(old, { text, lang }) {
  if (old.token.lang !== lang || !text.startsWith(old.token.text)) return null;
  old.node.querySelector("code").firstChild.appendData(text.slice(old.token.text.length));
  return old.node;
}

function code({ text, lang }) {
  const content = make("code", {}, document.createTextNode(text));
  return make(
    "div", { className: "listing" },
    make("div", { className: "spread" }, make("small", {}, lang || "text"), button("Copy", ({ target }) => copy(content.textContent, target), { className: "plain", ariaLabel: "Copy the code" })),
    make("pre", { tabIndex: 0, role: "group", ariaLabel: `Code in ${lang || "text"}` }, content),
  );
}

/** Return a link that leads to a page of its own, behind whose words stands where it leads; other addresses are text. */
function link(href, words) {
  const address = URL.parse(href);
  if (!PROTOCOLS.includes(address?.protocol)) return words;
  const place = address.host || address.pathname;
  const made = make("a", { href: address.href, target: "_blank", rel: "noopener noreferrer" }, ...words);
  return made.textContent.includes(place) ? [made] : [made, make("small", {}, ` (${place})`)];
}
