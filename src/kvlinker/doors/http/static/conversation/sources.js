/** The sources of an answer: its marks, and the list below it, with how much the question's attention went to each. */

import { button, make, percent } from "../base/dom.js";
import { openPassage } from "../documents/passage.js";
import { current } from "./conversations.js";
import { numbered } from "./requests.js";

const upTo = turn => numbered(current.turns.slice(0, current.turns.indexOf(turn) + 1));

/** Return the element for a source's number in a turn's answer; null for a number that is none. */
export function markOf(turn, number) {
  const chunk = upTo(turn)[number - 1];
  return chunk ? button(`[${number}]`, () => openPassage(chunk), { className: "mark", title: chunk.title, ariaLabel: `Source ${number}: ${chunk.title}` }) : null;
}

/** Return the list of a turn's sources: its own chunks, and those of earlier turns that the answer names; empty without any. */
export function sourceList(turn) {
  const { chunks, answer: { text, read = {} } } = turn;
  const named = new Set(Array.from(text.matchAll(/\[(\d+(?:, ?\d+)*)\]/g)).flatMap(([, numbers]) => numbers.split(",").map(Number)));
  const entries = upTo(turn).map((chunk, index) => ({ chunk, number: index + 1 })).filter(({ chunk, number }) => chunks.includes(chunk) || named.has(number));
  if (!entries.length) return [];
  return [make("ol", { className: "sources", ariaLabel: "Sources" }, ...entries.map(({ chunk, number }) => (
    entry(chunk, number, named.has(number), read[chunk.id])
  )))];
}

function entry(chunk, number, isNamed, share) {
  const title = chunk.gone ? `${chunk.title} (left out)` : chunk.title;
  const opener = button(title, () => openPassage(chunk), { className: isNamed ? "named" : "", title: "Open the passage" });
  return make("li", {}, make("span", { className: "number" }, `[${number}]`), opener, ...(share === undefined ? [] : [attentionBar(share)]));
}

function attentionBar(share) {
  const part = make("i");
  part.style.width = percent(share);
  const words = `${percent(share)} of the attention to sources`;
  return make("span", { className: "attention", title: words }, make("span", { className: "bar", role: "img", ariaLabel: words }, part), `${Math.round(100 * share)}%`);
}
