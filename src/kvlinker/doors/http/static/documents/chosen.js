/** The chunks that the next question is to be asked about, and how chunks are found. */

import { post } from "../base/api.js";
import { button, by, make } from "../base/dom.js";

export const CACHES = "v1/context_caches";

/** The ticked chunks, by id: {id, title, document, endsLine}. */
export const chosen = new Map();

export const documentOf = ({ name, id, metadata }) => metadata.source || name || id;

export const titleOf = cache => {
  const { index } = cache.metadata;
  return documentOf(cache) + (index === undefined ? "" : ` #${Number(index) + 1}`);
};

/** Return what a conversation keeps of a context cache. */
export const chunkOf = cache => ({ id: cache.id, title: titleOf(cache), document: documentOf(cache), endsLine: Boolean(cache.text?.endsWith("\n")) });

export function choose(chunk) {
  chosen.set(chunk.id, chunk);
  showChosen();
}

export function unchoose(id) {
  if (chosen.delete(id)) showChosen();
}

function showChosen() {
  by("chosen").replaceChildren(...Array.from(chosen.values(), ({ id, title }) => (
    make("li", {}, button(`${title} ×`, () => unchoose(id), { ariaLabel: `Leave out ${title}` }))
  )));
  for (const box of document.querySelectorAll("[data-chunk]")) box.checked = chosen.has(box.dataset.chunk);
}

/** Return a box by which a chunk is chosen for the next question. */
export function chooser(cache, words) {
  const box = make("input", { type: "checkbox", checked: chosen.has(cache.id), disabled: cache.usable === false });
  box.dataset.chunk = cache.id;
  box.addEventListener("change", () => (box.checked ? choose(chunkOf(cache)) : unchoose(cache.id)));
  return make("label", {}, box, " ", words, make("small"));
}

const hitsOf = async (query, limit) => (await post(`${CACHES}/search`, { query, limit })).data;

/** Return the chunks that match a text best, the best first, as a conversation keeps them. */
export const found = async (query, limit) => (await hitsOf(query, limit)).map(chunkOf);

export function startSearch() {
  by("search").addEventListener("submit", event => { event.preventDefault(); showHits() });
  by("query").addEventListener("input", () => { if (!by("query").value.trim()) by("hits").replaceChildren() });
}

async function showHits() {
  const query = by("query").value.trim();
  if (!query) return by("hits").replaceChildren();
  const shown = await hitsOf(query, 10).then(
    hits => hits.map(hit => make("li", { className: "chunk" }, chooser(hit, titleOf(hit)), make("p", { className: "clipped", tabIndex: 0 }, hit.text))),
    error => [make("li", { className: "wrong" }, error.message)],
  );
  by("hits").replaceChildren(...(shown.length ? shown : [make("li", { className: "faint" }, "No chunk has any of these words.")]));
}
