/** The chunks of a document: their texts, where they lie, and boxes that choose them. */

import { get } from "../base/api.js";
import { button, counted, make } from "../base/dom.js";
import { CACHES, chooser, titleOf } from "./chosen.js";

const AT_ONCE = 20;
const MOST_NAMES = 100;

let replicas = 0;
addEventListener("replicas", ({ detail }) => {
  replicas = detail;
  for (const chunks of document.querySelectorAll("details[open] > .chunks")) showHolders(chunks);
});

/** Fill an element with a document's first chunks; more come when they are asked for. */
export function showChunks(place, caches) {
  place.replaceChildren();
  const show = begin => {
    const some = caches.slice(begin, begin + AT_ONCE).map(chunkOf);
    place.append(...some);
    showHolders(place);
    const left = caches.length - begin - AT_ONCE;
    if (left <= 0) return;
    const more = button(`Show ${Math.min(left, AT_ONCE)} more of ${left}`, () => { more.remove(); show(begin + AT_ONCE) });
    place.append(more);
  };
  show(0);
}

function chunkOf(cache) {
  const words = make("p", { className: "clipped", tabIndex: 0 });
  const where = cache.tier ? `in ${cache.tier}` : "evicted";
  get(`${CACHES}/${cache.id}/content`).then(({ text }) => { words.textContent = cache.text = text }).catch(error => { words.textContent = error.message });
  return make("div", { className: "chunk" }, chooser(cache, `${titleOf(cache)}, ${counted(cache.tokens, "token")}, ${where}`), words);
}

/** Tell for each chunk in an element which replicas of a fleet have it in memory; a key that is no admin's learns nothing. */
async function showHolders(chunks) {
  const places = new Map(Array.from(chunks.querySelectorAll("[data-chunk]"), box => [box.dataset.chunk, box.parentElement.querySelector("small")]));
  const ids = Array.from(places.keys());
  for (let begin = 0; replicas && begin < ids.length; begin += MOST_NAMES) {
    const names = ids.slice(begin, begin + MOST_NAMES).map(id => `name=${id}`).join("&");
    const told = await get(`v1/residency/replicas?${names}`).catch(() => null);
    if (!told) return;
    for (const [id, holders] of Object.entries(told.replicas)) places.get(id).textContent = holders.length ? `, in memory of ${holders.join(", ")}` : ", in no memory";
  }
}
