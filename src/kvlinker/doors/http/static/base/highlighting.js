/** Colours code by highlight.js, which is loaded with the first code that is shown. */

import { make } from "./dom.js";

const MOST = 20_000; // characters, of which the colours come at once

/** Colour the text of an element that is in a language, where that is known. */
export async function highlight(element, language) {
  const code = element.textContent;
  if (!language || code.length > MOST) return;
  const { default: library } = await import("../libraries/highlight/highlight.min.js");
  if (!library.getLanguage(language)) return;
  const { rootNode } = library.highlight(code, { language, ignoreIllegals: true })._emitter;
  element.replaceChildren(...rootNode.children.map(elementOf));
}

function elementOf(node) {
  if (typeof node === "string") return node;
  return make("span", { className: node.scope ? `code-${node.scope.split(".")[0]}` : "" }, ...node.children.map(elementOf));
}
