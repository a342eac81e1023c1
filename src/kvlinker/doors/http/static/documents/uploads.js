/** Documents on their way to the server: read, weighed, cached in batches, small ones first, and taken up again where they broke off. */

import { get, isAbort, post, postFile, remove } from "../base/api.js";
import { forget, keep, read } from "../base/database.js";
import { confirmed } from "../base/dialogs.js";
import { button, by, bytes, counted, duration, make, number } from "../base/dom.js";
import { CACHES } from "./chosen.js";
import { chosenFile } from "./dropping.js";
import { arriving, listed, ORIGIN, refreshDocument, showArrived } from "./library.js";

const STORE = "uploads";
const MOST_CHARACTERS = 4_194_304;
const BATCH_TOKENS = 2048; // so that progress is seen, and a long document holds up nobody
const LONGEST_SOURCE = 512;
const LONGEST_NAME = 64;

let queue = Promise.resolve();
let batches = 0;

/** Cache files, [path, file] each, behind those that are on their way. */
export function cacheAll(files) {
  return enqueue(files.map(([path, file]) => ({ source: path.slice(-LONGEST_SOURCE), file, split: splitting() })));
}

/** Go on with a document of which some chunks are missing: with the text that was kept, or with the file, chosen again. */
export async function resume(source) {
  const kept = await read(STORE, source).catch(() => null);
  const file = kept ? null : await chosenFile();
  if (kept || file) await enqueue([kept || { source, file, split: splitting() }]);
}

const splitting = () => ({ method: by("split-method").value, max_tokens: Number(by("split-tokens").value) || 512 });

function enqueue(uploads) {
  by("uploads").ariaBusy = "true";
  const lines = uploads.map(lineOf);
  queue = queue.then(() => run(lines)).finally(() => {
    by("uploads").ariaBusy = "false";
    by("uploads").dataset.batches = ++batches;
  });
  return queue;
}

/** Return an upload with its line on the page; pressing “Cancel” aborts its `signal`. */
function lineOf(upload) {
  const abort = new AbortController();
  const bar = make("progress", { max: 1, value: 0, ariaLabel: upload.source });
  const state = make("small", {}, "waiting");
  const stop = button("Cancel", () => abort.abort(), { ariaLabel: `Cancel ${upload.source}` });
  const root = make("li", {}, make("div", { className: "spread" }, make("span", {}, upload.source, " ", state), stop), bar);
  by("uploads").append(root);
  const tell = (share, words) => { bar.value = share; state.textContent = words };
  const fail = words => {
    bar.remove();
    state.className = "wrong";
    state.textContent = words;
    stop.replaceWith(button("×", () => root.remove(), { ariaLabel: `Hide ${upload.source}` }));
  };
  return { upload, root, tell, fail, signal: abort.signal };
}

async function run(lines) {
  const planned = [];
  for (const line of lines) await attempt(line, async () => planned.push(await plan(line)));
  const total = planned.reduce((sum, { missing }) => sum + tokensOf(missing), 0);
  const wanted = await weighed(planned, total).catch(error => { for (const { line } of planned) line.fail(error.message) });
  if (!wanted) {
    if (wanted === false) for (const { line } of planned) line.root.remove();
    by("uploaded").textContent = "";
    return;
  }
  planned.sort((one, other) => tokensOf(one.missing) - tokensOf(other.missing));
  const progress = progressOf(planned.length, total);
  const cached = [];
  for (const each of planned) await attempt(each.line, async () => { await cache(each, progress); cached.push(each) });
  by("upload-all").hidden = true;
  by("uploaded").textContent = cached.length ? summaryOf(cached) : "";
}

/** Return what tells how far all files are: `add` some tokens, or that a file is done. */
function progressOf(files, total) {
  const begin = performance.now();
  const [bar, words] = by("upload-all").children;
  let [done, ended] = [0, 0];
  const add = (tokens, ends = 0) => {
    done += tokens;
    ended += ends;
    const rate = (1000 * done) / (performance.now() - begin);
    bar.value = total ? done / total : 1;
    words.textContent = [
      `${number(ended)} of ${counted(files, "file")}`, `${number(done)} of ${counted(total, "token")}`,
      ...(done ? [`${number(Math.round(rate))} tokens/s`, `${duration((total - done) / rate)} left`] : []),
    ].join(" · ");
  };
  add(0);
  by("upload-all").hidden = false;
  return add;
}

async function attempt(line, work) {
  try {
    line.signal.throwIfAborted();
    await work();
  } catch (error) {
    if (isAbort(error)) line.root.remove(); else line.fail(error.message);
  }
}

const tokensOf = pieces => pieces.reduce((sum, piece) => sum + piece.tokens, 0);

/** Read a file and cut it into pieces; those that are cached in this version already are not missing. */
async function plan(line) {
  const { upload, tell, signal } = line;
  tell(0, "reading");
  if (upload.file) {
    Object.assign(upload, await postFile(`${CACHES}/extract?name=${encodeURIComponent(upload.file.name)}`, upload.file, signal));
    delete upload.file;
  }
  const { source, text, split } = upload;
  const characters = Array.from(text); // the server counts code points
  if (characters.length > MOST_CHARACTERS) throw new Error(`has more than ${MOST_CHARACTERS.toLocaleString("en")} characters. Split it into several files`);
  const { data: pieces } = await post(`${CACHES}/split`, { input: text, split }, signal);
  const version = `${upload.digest.slice(0, 32)} ${split.method} ${split.max_tokens}`;
  const earlier = await listed({ origin: ORIGIN, source });
  const current = earlier.filter(cache => cache.metadata.version === version && cache.usable);
  const have = new Set(current.map(({ metadata }) => Number(metadata.index)));
  const missing = pieces.flatMap((piece, index) => (have.has(index) ? [] : [{ ...piece, index, text: characters.slice(piece.start, piece.end).join("") }]));
  tell(0, `${counted(tokensOf(missing), "token")} to read`);
  return { line, version, missing, count: pieces.length, stale: earlier.filter(cache => !current.includes(cache)) };
}

/** Tell what caching will take, and return whether it is to be done; asked only where there is no room for all of it. */
async function weighed(planned, tokens) {
  if (!tokens) return true;
  const status = await get("status");
  const chunks = planned.reduce((sum, { missing }) => sum + missing.length, 0);
  const size = tokens * status.kv_bytes_per_token + chunks * status.kv_bytes_per_chunk;
  const letters = planned.reduce((sum, { missing }) => sum + missing.reduce((all, { text }) => all + new Blob([text]).size, 0), 0);
  const rate = status.prefill_tokens_per_second;
  const cost = `${bytes(size)} of KV for ${bytes(letters)} of text`;
  by("uploaded").textContent = `${cost}${rate ? `, about ${duration(tokens / rate)}` : ""}`;
  const disk = status.tiers.at(-1);
  const free = disk.budget_bytes - disk.used_bytes;
  if (status.disk_codec !== "raw" || size <= free) return true;
  return confirmed(
    `This takes ${cost}, but the server has room for ${bytes(Math.max(0, free))} more. Chunks that are used least will be given up, and computed again when they are used.`,
    "Cache it anyway",
  );
}

/** Cache what is missing of a document, and remove what was cached of it before. */
async function cache({ line, version, missing, count, stale }, progress) {
  const { upload, tell, signal, root } = line;
  const { source, text, digest, split } = upload;
  await keep(STORE, { source, text, digest, split }).catch(() => {}); // without it, the file is asked for again
  const all = tokensOf(missing);
  let done = 0;
  arriving.add(source);
  try {
    for (let begin = 0; begin < missing.length;) {
      let end = begin, tokens = 0;
      do tokens += missing[end++].tokens; while (end < missing.length && tokens + missing[end].tokens <= BATCH_TOKENS);
      const batch = missing.slice(begin, end);
      const { data } = await post(CACHES, {
        chunks: batch.map(piece => piece.text),
        name: source.slice(-LONGEST_NAME),
        metadata: batch.map(piece => ({
          origin: ORIGIN, source, version, chunks: `${count}`, index: `${piece.index}`, start: `${piece.start}`, end: `${piece.end}`,
        })),
      }, signal);
      begin = end;
      done += tokens;
      progress(tokens);
      tell(done / all, `${number(done)} of ${counted(all, "token")}`);
      showArrived(data);
    }
    for (const { id } of stale) await remove(`${CACHES}/${id}`).catch(error => { if (error.status !== 404) throw error });
    await forget(STORE, source).catch(() => {});
    progress(0, 1);
  } finally {
    arriving.delete(source);
    await refreshDocument(source).catch(() => {}); // what failed before is told
  }
  root.remove();
}

function summaryOf(cached) {
  const count = cached.reduce((sum, each) => sum + each.count, 0);
  const guesses = cached.filter(({ line }) => line.upload.encoding).map(({ line: { upload } }) => `${upload.source} was read as ${upload.encoding}`);
  const what = cached.length === 1 ? cached[0].line.upload.source : counted(cached.length, "file");
  return [`Cached ${what}: ${counted(count, "chunk")}.`, ...guesses.map(words => `${words}.`)].join(" ");
}
