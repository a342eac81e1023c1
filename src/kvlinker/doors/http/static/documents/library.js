/** The documents that are cached: seen, filtered, chosen and deleted; hundreds of them stay usable. */

import { get, isAbort, remove } from "../base/api.js";
import { forget } from "../base/database.js";
import { confirmed } from "../base/dialogs.js";
import { button, by, counted, make, number } from "../base/dom.js";
import { CACHES, choose, chunkOf, documentOf, unchoose } from "./chosen.js";
import { showChunks } from "./chunks.js";

export const ORIGIN = "page";
const PAGE = 100;
const IMPLICIT = "texts that prompts brought";

/** The names of documents of which chunks are being cached. */
export const arriving = new Set();

/** The documents by their keys: {key, source, origin, caches, row, selected}. */
const documents = new Map();

let resumed = null; // what goes on with an upload; set at the start
let loading = 0; // counts the readings of the whole list, so that an old one ends

const tabs = new BroadcastChannel("kvlinker documents");

export function startLibrary(resume) {
  resumed = resume;
  by("filter").addEventListener("input", filter);
  by("select-all").addEventListener("change", ({ target: { checked } }) => {
    for (const document of shownOnes()) select(document, checked);
  });
  by("use-selected").addEventListener("click", use);
  by("delete-selected").addEventListener("click", () => drop(selectedOnes()));
  tabs.addEventListener("message", ({ data }) => (data ? readDocument(data) : showLibrary()).catch(() => {}));
}

const pairs = metadata => Object.entries(metadata).map(([key, value]) => `&metadata[${encodeURIComponent(key)}]=${encodeURIComponent(value)}`).join("");

async function* pages(metadata = {}) {
  for (let after = "", more = true; more;) {
    const page = await get(`${CACHES}?limit=${PAGE}${after}${pairs(metadata)}`);
    yield page.data;
    after = `&after=${page.last_id}`;
    more = page.has_more;
  }
}

/** Return all context caches with these pairs of metadata. */
export async function listed(metadata) {
  const found = [];
  for await (const page of pages(metadata)) found.push(...page);
  return found;
}

/** Read the whole list anew, and show each page of it as it comes. */
export async function showLibrary() {
  const mine = ++loading;
  let first = true;
  for await (const page of pages()) {
    if (mine !== loading) return;
    if (first) clearLibrary();
    first = false;
    place(page);
  }
}

/** Show nothing, as long as nothing is known. */
export function clearLibrary() {
  documents.clear();
  by("library").replaceChildren();
  for (const id of ["library-tools", "library-empty", "search"]) by(id).hidden = true;
}

/** Read one of the page's documents anew, here and in other tabs. */
export async function refreshDocument(source) {
  await readDocument(source);
  tabs.postMessage(source);
}

/** Show chunks that were cached just now, above what there was; they can be asked about at once. */
export function showArrived(caches) {
  place(caches, true);
}

async function readDocument(source) {
  const caches = await listed({ origin: ORIGIN, source });
  const key = keyOf(ORIGIN, source);
  documents.get(key)?.row.remove();
  documents.delete(key);
  place(caches);
  if (documents.has(key)) by("library").prepend(documents.get(key).row);
}

const keyOf = (origin, source) => `${origin} ${source}`;

function place(caches, isNew = false) {
  const changed = new Set();
  for (const cache of caches) {
    const source = cache.implicit ? IMPLICIT : documentOf(cache);
    const origin = cache.metadata.origin || "";
    const key = keyOf(origin, source);
    if (!documents.has(key)) {
      documents.set(key, newDocument(key, source, origin));
      if (isNew) by("library").prepend(documents.get(key).row);
    }
    documents.get(key).caches.push(cache);
    changed.add(documents.get(key));
  }
  for (const document of changed) showDocument(document);
  filter();
}

function newDocument(key, source, origin) {
  const made = { key, source, origin, caches: [], selected: false };
  const box = make("input", { type: "checkbox", ariaLabel: `Select ${source}` });
  made.figures = make("small");
  made.state = make("p", { className: "row warning", hidden: true });
  made.chunks = make("div", { className: "chunks" });
  made.details = make("details", {}, make("summary", {}, source, " ", made.figures), made.chunks);
  made.row = make("li", { className: "document" }, box, make("div", {}, made.details, made.state));
  box.addEventListener("change", () => select(made, box.checked));
  made.details.addEventListener("toggle", () => { if (made.details.open) showChunks(made.chunks, made.caches) });
  made.tick = on => { box.checked = on };
  by("library").append(made.row);
  return made;
}

function showDocument(document) {
  const { caches, figures, details, chunks, state, source, origin } = document;
  caches.sort((one, other) => Number(one.metadata.index ?? 0) - Number(other.metadata.index ?? 0));
  figures.textContent = `${counted(caches.length, "chunk")}, ${counted(caches.reduce((sum, each) => sum + each.tokens, 0), "token")}`;
  if (details.open) showChunks(chunks, caches);
  const [have, all] = completeness(caches);
  state.hidden = have === all || arriving.has(source);
  if (state.hidden) return;
  state.replaceChildren(
    `Only ${number(have)} of ${counted(all, "chunk")}`,
    ...(origin === ORIGIN ? [button("Resume", () => resumed(source), { ariaLabel: `Resume ${source}` })] : []),
    button("Remove", () => drop([document]), { ariaLabel: `Remove ${source}` }),
  );
}

/** Return how many chunks of the latest version of a document there are, and how many it should have. */
function completeness(caches) {
  const latest = caches.reduce((one, other) => (other.created_at > one.created_at ? other : one));
  const { version, chunks } = latest.metadata;
  const own = new Set(caches.filter(({ metadata }) => metadata.version === version).map(({ metadata }) => metadata.index));
  return chunks && own.size < Number(chunks) ? [own.size, Number(chunks)] : [0, 0];
}

const shownOnes = () => Array.from(documents.values()).filter(({ row }) => !row.hidden);
const selectedOnes = () => Array.from(documents.values()).filter(({ selected }) => selected);

function filter() {
  const words = by("filter").value.trim().toLowerCase();
  for (const { row, source } of documents.values()) row.hidden = !source.toLowerCase().includes(words);
  const shown = shownOnes().length;
  by("library-tools").hidden = !documents.size;
  by("library-count").textContent = words ? `${number(shown)} of ${counted(documents.size, "document")}` : counted(documents.size, "document");
  by("library-empty").hidden = documents.size > 0;
  by("search").hidden = !documents.size;
  dispatchEvent(new CustomEvent("documents", { detail: Array.from(documents.values(), ({ source }) => source) }));
  showSelection();
}

function select(document, on) {
  document.selected = on;
  document.tick(on);
  showSelection();
}

function showSelection() {
  const count = selectedOnes().length;
  by("selection").hidden = !count;
  by("selected-count").textContent = `${number(count)} selected`;
  by("select-all").checked = count > 0 && shownOnes().every(({ selected }) => selected);
}

function use() {
  for (const document of selectedOnes()) {
    for (const cache of document.caches) if (cache.usable) choose(chunkOf(cache));
    select(document, false);
  }
  by("question").focus();
}

async function drop(doomed) {
  const what = doomed.length === 1 ? `“${doomed[0].source}”` : counted(doomed.length, "document");
  const count = doomed.reduce((sum, { caches }) => sum + caches.length, 0);
  if (!await confirmed(`Delete ${what}, ${counted(count, "chunk")}? Conversations about it will have to go on without it.`, "Delete")) return;
  try {
    for (const { key, row, caches, origin, source } of doomed) {
      for (const { id } of caches) {
        await remove(`${CACHES}/${id}`).catch(error => { if (error.status !== 404) throw error });
        unchoose(id);
      }
      if (origin === ORIGIN) await forget("uploads", source).catch(() => {});
      documents.delete(key);
      row.remove();
    }
  } catch (error) {
    if (!isAbort(error)) by("notice").textContent = error.message;
  }
  filter();
  tabs.postMessage(null); // that is not one document
}
