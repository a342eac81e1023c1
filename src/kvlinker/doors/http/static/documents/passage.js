/** A passage in its document's text, beside the conversation. */

import { get } from "../base/api.js";
import { by, button, counted, make } from "../base/dom.js";
import { CACHES } from "./chosen.js";
import { listed } from "./library.js";

const AROUND = 2; // chunks of the document that are read before and behind at once

let opener = null; // what had the focus before
let shown = 0; // counts the passages, so that an old one does not come late

export function startPassage() {
  by("close-passage").addEventListener("click", close);
  by("passage").addEventListener("keydown", event => { if (event.key === "Escape") { event.stopPropagation(); close() } });
}

function close() {
  by("passage").hidden = true;
  shown++;
  if (opener?.isConnected) opener.focus(); else by("question").focus();
}

/** Show the text of a chunk, {id, title, document}, where it stands in its document. */
export async function openPassage(chunk) {
  const mine = ++shown;
  if (!by("passage").contains(document.activeElement)) opener = document.activeElement;
  by("passage-title").textContent = by("passage-title").title = chunk.document;
  by("passage-place").textContent = "";
  by("passage-text").replaceChildren();
  by("passage").hidden = false;
  by("close-passage").focus();
  try {
    const cache = await get(`${CACHES}/${chunk.id}`);
    const passage = make("mark", {}, await textOf(cache));
    if (mine !== shown) return;
    by("passage-text").replaceChildren(passage);
    await surround(passage, cache, mine);
  } catch (error) {
    if (mine !== shown) return;
    const gone = `This passage is not there any more: “${chunk.document}” was deleted, or belongs to another key.`;
    by("passage-text").replaceChildren(make("p", { className: "wrong" }, error.status === 404 ? gone : error.message));
  }
}

const textOf = async ({ id }) => (await get(`${CACHES}/${id}/content`)).text;

/** Show what stands before and behind a passage, where its document's chunks have numbers. */
async function surround(passage, cache, mine) {
  const { source, version, index, chunks } = cache.metadata;
  passage.scrollIntoView({ block: "nearest" });
  if (index === undefined || !source) return;
  const at = Number(index), count = Number(chunks ?? at + 1);
  by("passage-place").textContent = `Chunk ${at + 1} of ${count}, ${counted(cache.tokens, "token")}`;
  const chunkAt = async place => {
    const [found] = await listed({ source, index: `${place}`, ...(version ? { version } : {}) });
    return found ? textOf(found) : "…";
  };
  const more = async (from, step, words) => {
    const places = Array.from({ length: AROUND }, (_, each) => from + step * each).filter(place => 0 <= place && place < count);
    const texts = await Promise.all(places.map(chunkAt));
    if (mine !== shown) return;
    const next = from + step * places.length;
    const rest = 0 <= next && next < count ? [button(words, async ({ target }) => { await more(next, step, words); target.remove() })] : [];
    if (step < 0) by("passage-text").prepend(...rest, ...texts.reverse()); else by("passage-text").append(...texts, ...rest);
  };
  await Promise.all([more(at - 1, -1, "Earlier text"), more(at + 1, 1, "Later text")]);
  if (mine === shown) passage.scrollIntoView({ block: "center" });
}
