/** Shows mathematics, written in TeX, as MathML by Temml, which is loaded with the first formula. */

import { make } from "./dom.js";

const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;
const INLINE = /^(?:\$\$([^$]+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n])*?(?:\\.|[^\\$\s]))\$(?!\d))/; // no prices: $5 and $10

const MOST = 1000;
const sets = new Map(); // formulas that are set, by how they are written: what is streamed is made anew with each token

/** Extensions of marked that read formulas between $, $$, \( \) and \[ \]. */
export const mathematics = [
  {
    name: "math", level: "block",
    start: text => text.match(/\$\$|\\\[/)?.index,
    tokenizer(text) {
      const found = text.match(BLOCK);
      return found && { type: "math", raw: found[0], text: found[1] ?? found[2], display: true };
    },
  },
  {
    name: "formula", level: "inline",
    start: text => text.match(/\$|\\[([]/)?.index,
    tokenizer(text) {
      const found = text.match(INLINE);
      if (!found) return undefined;
      const [raw, double, squared, round, single] = found;
      return { type: "math", raw, text: double ?? squared ?? round ?? single, display: (double ?? squared) !== undefined };
    },
  },
];

/** Return an element with a formula; its TeX is shown until it is there. */
export function formula(tex, display) {
  const source = tex.trim();
  const name = `${display} ${source}`;
  const set = sets.get(name)?.cloneNode(true);
  const made = make("span", { className: display ? "formula wide" : "formula" }, set ?? source);
  if (set) return made;
  import("../libraries/temml/temml.mjs").then(({ default: library }) => {
    library.render(source, made, { displayMode: display, throwOnError: false, trust: false });
    if (sets.size === MOST) sets.clear();
    sets.set(name, made.firstChild);
  });
  return made;
}
