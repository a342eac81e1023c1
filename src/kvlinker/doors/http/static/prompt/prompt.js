/** The prompt of an answer, token by token: what became of each, and how much the question attends to it. */

import { post } from "../base/api.js";
import { by, button, counted, legendOf, make, number, percent } from "../base/dom.js";
import { openPassage } from "../documents/passage.js";

/** The explanations that came with answers, by turn; of others, the server is asked for one. */
export const explanations = new WeakMap();

const ALL_LAYERS = -1;

let shown = null;

export function startPrompt() {
  by("layer").addEventListener("input", paint);
  by("shade").addEventListener("change", paint);
  by("tokens").addEventListener("click", ({ target }) => { if (target.dataset.position) select(Number(target.dataset.position)) });
  by("tokens").addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step || !shown) return;
    event.preventDefault();
    select(Math.max(0, Math.min(shown.spans.length - 1, shown.current + step)));
  });
}

/** Show the prompt of a turn, whose request is `body`, with the `chunks` that it and the turns before it are about. */
export async function showPrompt(turn, body, chunks) {
  const came = explanations.get(turn);
  const link = { policy: turn.policy, attention: true };
  const explanation = came || await post("v1/link/explain", { messages: body.messages, link });
  explanations.set(turn, explanation);
  by("prompt").hidden = false;
  by("comparison").replaceChildren();
  by("prompt-of").textContent = `Of “${turn.question}”, under ${explanation.settled_policy}${came ? "" : ", as it would be linked now"}`;
  by("meaning").textContent = meaningOf(explanation);
  const layers = explanation.layers.at(-1).last + 1;
  const known = new Map(chunks.map(chunk => [chunk.id, chunk]));
  const parts = new Array(explanation.tokens).fill(null);
  for (const part of explanation.segments) parts.fill(part, part.start, part.end);
  const chunkAt = position => known.get(parts[position]?.context_cache);
  const spans = explanation.token_texts.map((text, position) => {
    const span = make("span", { title: chunkAt(position)?.document || "" }, text || "◌");
    span.dataset.position = position;
    return span;
  });
  const begins = position => parts[position]?.start === position && chunkAt(position);
  shown = { explanation, layers, parts, chunkAt, spans, states: statesOf(explanation, layers), current: -1 };
  by("tokens").replaceChildren(...spans.flatMap((span, position) => (begins(position) ? [nameOf(chunkAt(position)), span] : [span])));
  by("token").replaceChildren();
  Object.assign(by("layer"), { max: layers - 1, value: ALL_LAYERS });
  by("shade").disabled = !explanation.attention;
  paint();
}

/** Return the document's name, which stands before a chunk's tokens and opens the passage. */
function nameOf(chunk) {
  return button(chunk.document, () => openPassage(chunk), { className: "document-name", ariaLabel: `Open ${chunk.title}` });
}

/** Return the shares of chunks in the attention that goes to chunks, by id: the mean over layers. */
export function attentionByChunk({ attention, segments }) {
  const weights = meanOf(attention);
  const sums = {};
  for (const { context_cache: id, start, end } of segments) {
    if (id) sums[id] = (sums[id] || 0) + weights.slice(start, end).reduce((sum, weight) => sum + weight, 0);
  }
  const all = Object.values(sums).reduce((sum, each) => sum + each, 0);
  return Object.fromEntries(Object.entries(sums).map(([id, sum]) => [id, all ? sum / all : 0]));
}

const meanOf = attention => attention[0].map((_, position) => attention.reduce((sum, weights) => sum + weights[position], 0) / attention.length);

/** Say in one sentence what linking did. */
function meaningOf({ tokens, cost: { cached_tokens: cached, recomputed_tokens: recomputed, fresh_tokens: fresh, flops_ratio: work } }) {
  if (cached + recomputed === 0) return `Nothing of this prompt had been read before: all ${counted(tokens, "token")} were computed.`;
  const again = recomputed ? `, ${number(recomputed)} more were computed again so that they fit in here` : "";
  return `Of this prompt's ${counted(tokens, "token")}, ${number(cached)} had been read before and were reused${again}, and ${number(fresh)} ${fresh === 1 ? "is" : "are"} new: ${percent(work)} of the work of reading all of it.`;
}

/** Return what became of each token in each layer: [layer][position]. */
function statesOf({ tokens, fresh, layers }, count) {
  const first = new Array(tokens).fill("cached");
  for (const [begin, end] of fresh) first.fill("fresh", begin, end);
  return Array.from({ length: count }, (_, layer) => {
    const states = first.slice();
    const computed = layers.find(range => range.first <= layer && layer <= range.last);
    for (const [begin, end] of computed.recomputed) states.fill("recomputed", begin, end);
    return states;
  });
}

/** Return the attention of a layer, or its mean over all, by position; null where it was not measured. */
function attentionOf(layer) {
  const { attention } = shown.explanation;
  if (!attention) return null;
  if (layer !== ALL_LAYERS) return attention[layer];
  return meanOf(attention);
}

function paint() {
  if (!shown) return;
  const layer = Number(by("layer").value);
  const states = shown.states[Math.max(layer, 0)]; // the first layer computes all that any layer does
  const weights = attentionOf(layer);
  const most = weights && by("shade").checked ? Math.max(...weights) : 0;
  shown.spans.forEach((span, position) => {
    span.classList.remove("cached", "recomputed", "fresh");
    span.classList.add(states[position]);
    span.style.setProperty("--shade", most ? Math.sqrt(weights[position] / most).toFixed(3) : 0);
  });
  const name = layer === ALL_LAYERS ? "all" : `${layer} of 0 to ${shown.layers - 1}`;
  by("layer-name").textContent = name;
  by("layer").setAttribute("aria-valuetext", layer === ALL_LAYERS ? "all layers" : `layer ${name}`);
  by("legend").replaceChildren(...legendOf(layer === ALL_LAYERS ? meanTokens() : counts(states)));
  if (shown.current >= 0) tell(shown.current);
}

function meanTokens() {
  const { cached_tokens: cached, recomputed_tokens: recomputed, fresh_tokens: fresh } = shown.explanation.cost;
  return { cached, recomputed, fresh };
}

function counts(states) {
  const found = { cached: 0, recomputed: 0, fresh: 0 };
  for (const state of states) found[state] += 1;
  return found;
}

function select(position) {
  shown.spans[shown.current]?.classList.remove("current");
  shown.current = position;
  shown.spans[position].classList.add("current");
  shown.spans[position].scrollIntoView({ block: "nearest" });
  tell(position);
}

function tell(position) {
  const layer = Number(by("layer").value);
  const part = shown.parts[position];
  const weights = attentionOf(layer);
  const { reused_tokens: reused } = shown.explanation;
  by("token").textContent = [
    `token ${position}, ${JSON.stringify(shown.explanation.token_texts[position])}`,
    shown.states[Math.max(layer, 0)][position],
    position < reused ? "from an earlier request" : "",
    part?.type === "chunk" ? `of ${shown.chunkAt(position)?.document || part.context_cache || "a chunk"}` : "",
    part?.type === "chunk" && part.exact ? "exact here" : "",
    weights ? `attention ${percent(weights[position])}` : "",
  ].filter(Boolean).join(", ");
}
