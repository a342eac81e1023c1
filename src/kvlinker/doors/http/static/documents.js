/** Documents: dropped files become context caches; those that there are can be seen, searched, chosen and deleted. */

import { get, post, remove } from "./api.js";
import { by, counted, make } from "./dom.js";

const CACHES = "v1/context_caches";
const ORIGIN = "page";
const PAGE = 100;
const MOST_CHARACTERS = 4_194_304;
const BATCH_TOKENS = 2048; // so that progress is seen, and a long document holds up nobody
const SHOWN_TEXTS = 20;

/** The chunks that the next question is to be asked about, by id: {id, tokens, title}. */
export const chosen = new Map();

export const titleOf = ({ id, name, metadata }) => {
  const place = metadata.index === undefined ? "" : ` #${Number(metadata.index) + 1}`;
  return (metadata.source || name || id) + place;
};

export function startDocuments() {
  const drop = by("drop");
  for (const kind of ["dragenter", "dragover"]) addEventListener(kind, event => { event.preventDefault(); drop.classList.add("over") });
  for (const kind of ["dragleave", "drop"]) addEventListener(kind, event => { event.preventDefault(); drop.classList.remove("over") });
  addEventListener("drop", async event => cacheAll(await droppedFiles(event.dataTransfer)));
  for (const id of ["files", "folder"]) {
    by(id).addEventListener("change", ({ target }) => {
      cacheAll(Array.from(target.files, file => [file.webkitRelativePath || file.name, file]));
      target.value = "";
    });
  }
  by("search").addEventListener("submit", event => { event.preventDefault(); showHits() });
  by("query").addEventListener("input", () => { if (!by("query").value.trim()) by("hits").replaceChildren() });
  by("more").addEventListener("click", () => listMore());
}

/** Return [path, file] of everything that was dropped, folders read to their ends. */
async function droppedFiles(transfer) {
  const entries = Array.from(transfer.items, item => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return Array.from(transfer.files, file => [file.name, file]);
  const found = [];
  for (const entry of entries) await readEntry(entry, found);
  return found;
}

async function readEntry(entry, found) {
  if (entry.isFile) {
    found.push([entry.fullPath.replace(/^\//, ""), await new Promise((resolve, reject) => entry.file(resolve, reject))]);
    return;
  }
  const reader = entry.createReader();
  for (;;) { // a call tells some of a folder's entries, and none at its end
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return;
    for (const each of some) await readEntry(each, found);
  }
}

async function cacheAll(files) {
  const lines = files.map(([path, file]) => {
    const bar = make("progress", { max: 1, value: 0, ariaLabel: path });
    const state = make("small", {}, "waiting");
    const line = make("li", {}, make("div", {}, path, " ", state), bar);
    by("uploads").append(line);
    return { path, file, bar, state };
  });
  for (const { path, file, bar, state } of lines) {
    try {
      const count = await cacheFile(path, file, (share, words) => { bar.value = share; state.textContent = words });
      state.textContent = counted(count, "chunk");
      bar.remove();
    } catch (error) {
      state.textContent = error.message;
      state.className = "wrong";
      bar.remove();
    }
  }
  await showLibrary();
}

/** Cache a file's text in chunks, in the place of an earlier one of its path; returns how many they are. */
async function cacheFile(path, file, tell) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error("is no UTF-8 text; `kvlinker ingest` reads PDF, HTML, DOCX and EPUB");
  }
  const characters = Array.from(text); // the server counts code points
  if (!text.trim()) throw new Error("has no text");
  if (characters.length > MOST_CHARACTERS) throw new Error(`has more than ${MOST_CHARACTERS.toLocaleString("en")} characters`);
  tell(0, "splitting");
  const split = { method: by("split-method").value, max_tokens: Number(by("split-tokens").value) || 512 };
  const { data: pieces } = await post(`${CACHES}/split`, { input: text, split });
  const source = path.slice(-512);
  const earlier = await listed({ origin: ORIGIN, source });
  const total = pieces.reduce((sum, piece) => sum + piece.tokens, 0);
  const made = new Set();
  let done = 0;
  for (let begin = 0; begin < pieces.length;) {
    let end = begin, tokens = 0;
    do tokens += pieces[end++].tokens; while (end < pieces.length && tokens + pieces[end].tokens <= BATCH_TOKENS);
    const batch = pieces.slice(begin, end);
    const { data } = await post(CACHES, {
      chunks: batch.map(piece => characters.slice(piece.start, piece.end).join("")),
      name: source.slice(-64),
      metadata: batch.map((piece, offset) => ({
        origin: ORIGIN, source, chunks: `${pieces.length}`, index: `${begin + offset}`, start: `${piece.start}`, end: `${piece.end}`,
      })),
    });
    for (const cache of data) made.add(cache.id);
    done += tokens;
    tell(done / total, `${end} of ${counted(pieces.length, "chunk")}`);
    begin = end;
  }
  for (const { id } of earlier) if (!made.has(id)) await forget(id);
  return pieces.length;
}

const pairs = metadata => Object.entries(metadata).map(([key, value]) => `&metadata[${encodeURIComponent(key)}]=${encodeURIComponent(value)}`).join("");

async function listed(metadata) {
  const found = [];
  for (let after = "";;) {
    const page = await get(`${CACHES}?limit=${PAGE}${after}${pairs(metadata)}`);
    found.push(...page.data);
    if (!page.has_more) return found;
    after = `&after=${page.last_id}`;
  }
}

async function forget(id) {
  await remove(`${CACHES}/${id}`);
  chosen.delete(id);
}

let last = null;
const groups = new Map();

export async function showLibrary() {
  const open = new Set(Array.from(groups.values()).filter(group => group.open).map(group => group.dataset.source));
  groups.clear();
  last = null;
  by("library").replaceChildren();
  await listMore();
  for (const [source, group] of groups) group.open = open.has(source);
  showChosen();
}

async function listMore() {
  const page = await get(`${CACHES}?limit=${PAGE}${last ? `&after=${last}` : ""}`);
  last = page.last_id;
  by("more").hidden = !page.has_more;
  for (const cache of page.data) {
    const source = cache.implicit ? "brought by prompts" : cache.metadata.source || cache.name || "without a name";
    if (!groups.has(source)) groups.set(source, by("library").appendChild(documentOf(source)));
    groups.get(source).add(cache);
  }
  if (!groups.size) by("library").replaceChildren(make("p", { className: "faint" }, "Nothing is cached yet."));
}

/** Return an element for a document, to which its chunks are added. */
function documentOf(source) {
  const caches = [];
  const figures = make("small");
  const chunks = make("div");
  const use = make("button", { type: "button" }, "Use all");
  const drop = make("button", { type: "button" }, "Delete");
  const made = make("details", { className: "document" }, make("summary", {}, source, " ", figures), make("p", { className: "row" }, use, drop), chunks);
  made.dataset.source = source;
  made.add = cache => {
    caches.push(cache);
    caches.sort((one, other) => Number(one.metadata.index ?? 0) - Number(other.metadata.index ?? 0));
    const tokens = caches.reduce((sum, each) => sum + each.tokens, 0);
    figures.textContent = `${counted(caches.length, "chunk")}, ${counted(tokens, "token")}`;
    if (made.open) show();
  };
  const show = () => {
    chunks.replaceChildren(...caches.map((cache, index) => chunkOf(cache, index < SHOWN_TEXTS)));
    showHolders(chunks);
  };
  made.addEventListener("toggle", () => { if (made.open) show() });
  use.addEventListener("click", () => { for (const cache of caches) choose(cache) });
  drop.addEventListener("click", async () => {
    drop.disabled = true;
    for (const { id } of caches) await forget(id);
    await showLibrary();
  });
  return made;
}

function chunkOf(cache, reads) {
  const words = make("p", { className: "clipped" });
  const where = cache.tier ? `in ${cache.tier}` : "evicted";
  const made = make("div", { className: "chunk" }, chooser(cache, `${titleOf(cache)}, ${counted(cache.tokens, "token")}, ${where}`), words);
  if (reads) get(`${CACHES}/${cache.id}/content`).then(({ text }) => { words.textContent = text }).catch(() => {});
  return made;
}

let replicas = 0;
addEventListener("replicas", ({ detail }) => { replicas = detail });

/** Tell for each chunk in an element which replicas of a fleet have it in memory; a key that is no admin's learns nothing. */
async function showHolders(chunks) {
  const places = new Map(Array.from(chunks.querySelectorAll("[data-chunk]"), box => [box.dataset.chunk, box.parentElement.querySelector("small")]));
  const ids = Array.from(places.keys());
  for (let begin = 0; replicas && begin < ids.length; begin += PAGE) {
    const names = ids.slice(begin, begin + PAGE).map(id => `name=${id}`).join("&");
    const told = await get(`v1/residency/replicas?${names}`).catch(() => null);
    if (!told) return;
    for (const [id, holders] of Object.entries(told.replicas)) places.get(id).textContent = holders.length ? `, in memory of ${holders.join(", ")}` : ", in no memory";
  }
}

/** Return a box by which a chunk is chosen for the next question. */
function chooser(cache, words) {
  const box = make("input", { type: "checkbox", checked: chosen.has(cache.id), disabled: cache.usable === false });
  box.dataset.chunk = cache.id;
  box.addEventListener("change", () => {
    if (box.checked) choose(cache); else { chosen.delete(cache.id); showChosen() }
  });
  return make("label", {}, box, " ", words, make("small"));
}

function choose(cache) {
  chosen.set(cache.id, { id: cache.id, tokens: cache.tokens, title: titleOf(cache), text: cache.text });
  showChosen();
}

export function showChosen() {
  by("chosen").replaceChildren(...Array.from(chosen.values(), ({ id, title }) => {
    const button = make("button", { type: "button", ariaLabel: `Leave out ${title}` }, `${title} ×`);
    button.addEventListener("click", () => { chosen.delete(id); showChosen() });
    return make("li", {}, button);
  }));
  for (const box of document.querySelectorAll("[data-chunk]")) box.checked = chosen.has(box.dataset.chunk);
}

/** Return the chunks that match a text best, the best first. */
export async function found(query, limit) {
  return (await post(`${CACHES}/search`, { query, limit })).data;
}

async function showHits() {
  const query = by("query").value.trim();
  if (!query) return by("hits").replaceChildren();
  try {
    const hits = await found(query, 10);
    by("hits").replaceChildren(...hits.map(hit => make(
      "li", { className: "chunk" }, chooser(hit, `${titleOf(hit)}, ${counted(hit.tokens, "token")}`), make("p", { className: "clipped" }, hit.text),
    )));
    if (!hits.length) by("hits").replaceChildren(make("li", { className: "faint" }, "Nothing matches."));
  } catch (error) {
    by("hits").replaceChildren(make("li", { className: "wrong" }, error.message));
  }
}
