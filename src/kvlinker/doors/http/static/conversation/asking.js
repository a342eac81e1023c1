/** Asks questions about chunks: finds the chunks, streams the answer, and keeps both in the conversation. */

import { get, isAbort, stream } from "../base/api.js";
import { by, make } from "../base/dom.js";
import { choose, chosen, found, unchoose } from "../documents/chosen.js";
import { attentionByChunk, explanations } from "../prompt/prompt.js";
import { current, store } from "./conversations.js";
import { bodyOf } from "./requests.js";
import { settings } from "./settings.js";
import { failed, showTurns, tellAnswer, tellSources } from "./turns.js";

const CHAT = "v1/chat/completions";

let running = null;
let explains = true; // false once the engine has said that it does not explain answers

export const busy = () => running !== null;
export const stop = () => running?.abort();

/** Ask a new question, about the ticked chunks or those that are found for it. */
export function ask(question) {
  const picked = Array.from(chosen.values());
  return answer(current.turns, { question, picked: picked.length > 0, chunks: picked, settings: settings() });
}

/** Ask a turn's question again, or another one in its place; what came behind it goes. */
export function askAgain(turn, question = turn.question) {
  const before = current.turns.slice(0, current.turns.indexOf(turn));
  const chunks = turn.picked || question === turn.question ? turn.chunks : [];
  return answer(before, { question, picked: turn.picked, chunks, settings: settings() });
}

async function answer(before, turn) {
  if (busy()) return;
  const conversation = current;
  const { turns } = conversation;
  turn.answer = { text: "" };
  conversation.turns = [...before, turn];
  showTurns();
  await run(async () => {
    if (!turn.chunks.length) turn.chunks = await chunksFor(turn, before);
    tellSources(turn);
    by("question").value = "";
    for (const { id } of turn.chunks) unchoose(id);
    await generate(bodyOf(before, turn), turn);
    await finish(conversation);
  }, async error => {
    if (isAbort(error) && turn.answer.text) {
      await finish(conversation);
    } else {
      conversation.turns = turns;
      showTurns();
      by("question").value ||= turn.question;
      if (turn.picked) for (const chunk of turn.chunks) choose(chunk);
      await tellFailure(error, turn);
    }
  });
}

/** Go on with an answer that was cut or stopped. */
export async function goOn(turn) {
  if (busy()) return;
  const conversation = current;
  const { messages, ...body } = bodyOf(current.turns.slice(0, current.turns.indexOf(turn)), turn);
  const continued = {
    ...body, messages: [...messages, { role: "assistant", content: turn.answer.text }],
    add_generation_prompt: false, continue_final_message: true,
  };
  await run(async () => {
    await generate(continued, turn);
    await finish(conversation);
  }, async error => {
    await finish(conversation);
    if (!isAbort(error)) failed(error.message);
  });
}

/** Do what asks the server, until it is stopped; `fail` gets what keeps it from being done. */
async function run(work, fail) {
  running = new AbortController();
  showBusy(true);
  dispatchEvent(new Event("asking"));
  try {
    await work().catch(fail);
  } finally {
    running = null;
    showBusy(false);
    dispatchEvent(new Event("answered"));
  }
}

async function finish(conversation) {
  await store(conversation).catch(error => failed(error.message));
}

function showBusy(on) {
  by("send").disabled = on;
  by("stop").hidden = !on;
  by("turns").ariaBusy = String(on);
}

/** Return the chunks that match the question, without those that the conversation has; the best one is last, next to the question. */
async function chunksFor({ question, settings: { limit } }, before) {
  if (!limit) return [];
  const known = new Set(before.flatMap(({ chunks }) => chunks.map(({ id }) => id)));
  const hits = await found(question, limit).catch(error => {
    if (error.code === "search_off" || error.param === "query") return [];
    throw error;
  });
  return hits.filter(({ id }) => !known.has(id)).reverse();
}

/** Stream a turn's answer into it, behind what there is of it, and its explanation where the engine gives one. */
async function generate(body, turn) {
  const { answer } = turn;
  const link = { ...body.link, ...(explains && !answer.text ? { explain: true, attention: true } : {}) };
  const asked = { ...body, link, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const { text, tokens = 0, whole = 0 } = answer;
  const begin = performance.now();
  Object.assign(answer, { whole: undefined, stopped: false, cut: false });
  try {
    for await (const chunk of stream(CHAT, asked, running.signal)) {
      const [choice] = chunk.choices;
      const { content, reasoning_content: reasoning } = choice?.delta || {};
      if (content || reasoning) answer.first ??= performance.now() - begin;
      if (content) answer.text += content;
      if (choice?.finish_reason === "length") answer.cut = true;
      if (chunk.link?.explanation && !text) explain(turn, chunk.link.explanation);
      if (chunk.link) turn.policy = chunk.link.policy;
      if (chunk.usage) answer.tokens = tokens + chunk.usage.completion_tokens;
      if (chunk.usage && !choice) answer.usage ??= chunk.usage;
      if (content) tellAnswer(turn);
    }
  } catch (error) {
    if (error.param !== "link.explain") {
      Object.assign(answer, { whole: whole + performance.now() - begin, stopped: true });
      tellAnswer(turn);
      throw error;
    }
    explains = false; // this engine explains prompts apart from answers
    answer.whole = whole;
    return generate(body, turn);
  }
  answer.whole = whole + performance.now() - begin;
  answer.first ??= answer.whole;
  tellAnswer(turn);
}

function explain(turn, explanation) {
  explanations.set(turn, explanation);
  if (explanation.attention) turn.answer.read = attentionByChunk(explanation);
}

/** Say why there is no answer; where documents are gone, say which, and offer to go on without them. */
async function tellFailure(error, turn) {
  if (isAbort(error)) return failed("Stopped before the answer began.");
  if (!/^context_cache/.test(error.code)) return failed(error.message);
  const chunks = [...current.turns, turn].flatMap(each => each.chunks).filter(({ gone }) => !gone);
  const missing = new Set();
  for (const id of new Set(chunks.map(chunk => chunk.id))) {
    const cache = await get(`v1/context_caches/${id}`).catch(({ status }) => (status === 404 ? null : { usable: true }));
    if (!cache?.usable) missing.add(id);
  }
  const lost = chunks.filter(({ id }) => missing.has(id));
  const names = Array.from(new Set(lost.map(each => `“${each.document}”`)));
  if (!names.length) return failed(error.message);
  const why = error.status === 404 ? "deleted, or belonging to another key" : "made with another model than the one that is served now";
  return failed(`${names.join(", ")} cannot be used any more: ${why}.`, make("button", {
    type: "button", className: "without",
    onclick: () => {
      for (const chunk of lost) { chunk.gone = true; unchoose(chunk.id) }
      by("question").value = "";
      answer(current.turns, { ...turn, picked: false, chunks: turn.chunks.filter(({ gone }) => !gone) });
    },
  }, names.length === 1 ? "Go on without it" : "Go on without them"));
}
