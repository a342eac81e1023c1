/** The conversation: questions about chunks, streamed answers, and what each of them reused. */

import { stream, post } from "./api.js";
import { chosen, found, showChosen, titleOf } from "./documents.js";
import { by, counted, fillBar, make, milliseconds, number, usedTokens } from "./dom.js";
import { compare } from "./comparison.js";
import { chosenPolicy } from "./policies.js";
import { showPrompt } from "./prompt.js";

const CHAT = "v1/chat/completions";

let turns = [];
let running = null;
let explains = true; // false once the engine has said that it does not explain answers

export function startChat() {
  by("ask").addEventListener("submit", event => { event.preventDefault(); ask() });
  by("question").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    by("ask").requestSubmit();
  });
  by("stop").addEventListener("click", stop);
  by("anew").addEventListener("click", () => {
    stop();
    turns = [];
    by("turns").replaceChildren();
    by("prompt").hidden = true;
    by("question").focus();
  });
}

export const stop = () => running?.abort();

/** Compare the last answer with the full computation. */
export const compareLast = () => turns.at(-1)?.comparable && showComparison(turns.at(-1));

async function ask() {
  const question = by("question").value.trim();
  if (!question || running) return;
  running = new AbortController();
  by("send").disabled = true;
  by("stop").hidden = false;
  const turn = { question, policy: chosenPolicy(), maxTokens: Number(by("answer-tokens").value) || 128, view: viewOf(question) };
  by("turns").append(turn.view.root);
  try {
    turn.chunks = await chunksFor(question);
    turn.messages = [...turns.flatMap(said), { role: "user", content: contentOf(turn.chunks, question) }];
    turn.view.sources.textContent = turn.chunks.length ? `about ${turn.chunks.map(titleOf).join(", ")}` : "about no chunks";
    by("question").value = "";
    chosen.clear();
    showChosen();
    turns.push(turn);
    await answer(turn);
    dispatchEvent(new Event("answered"));
  } catch (error) {
    const words = error.name === "AbortError" ? "stopped" : error.message;
    turn.view.root.append(make("p", { className: "wrong" }, words));
    turns = turns.filter(each => each !== turn);
    by("question").value ||= question;
  } finally {
    running = null;
    by("send").disabled = false;
    by("stop").hidden = true;
  }
}

const said = turn => [turn.messages.at(-1), { role: "assistant", content: turn.answer.text }];

/** Return the chunks to ask about: the chosen ones, or what matches the question and is not in the conversation yet. */
async function chunksFor(question) {
  if (chosen.size) return Array.from(chosen.values(), ({ id, title, text }) => ({ id, name: title, metadata: {}, text }));
  if (!by("retrieve").checked) return [];
  const known = new Set(turns.flatMap(turn => turn.chunks.map(({ id }) => id)));
  const hits = await found(question, Number(by("limit").value) || 4).catch(error => {
    if (error.code === "search_off" || error.param === "query") return [];
    throw error;
  });
  return hits.filter(({ id }) => !known.has(id)).reverse(); // the best one stands next to the question
}

function contentOf(chunks, question) {
  if (!chunks.length) return [{ type: "text", text: question }];
  const parts = chunks.flatMap(({ id, text }) => {
    const chunk = { type: "context_cache", id };
    return text?.endsWith("\n") ? [chunk] : [chunk, { type: "text", text: "\n" }];
  });
  return [...parts, { type: "text", text: `Question: ${question}` }];
}

function viewOf(question) {
  const sources = make("small");
  const answered = make("p", { className: "answered" });
  const figures = make("p", { className: "figures faint" });
  const bar = make("div", { className: "bar", hidden: true });
  const buttons = make("p", { className: "row", hidden: true });
  return {
    sources, answered, figures, bar, buttons,
    root: make("li", { className: "turn" }, make("p", { className: "asked" }, question), sources, answered, figures, bar, buttons),
  };
}

async function answer(turn) {
  const { view } = turn;
  const tell = text => { view.answered.textContent = text };
  turn.answer = await generate(turn, turn.policy, tell, { explain: explains, attention: explains }).catch(error => {
    if (error.param !== "link.explain") throw error;
    explains = false; // this engine explains prompts apart from answers
    return generate(turn, turn.policy, tell);
  });
  const { usage, policy } = turn.answer;
  turn.policy = policy || turn.policy;
  const tokens = usedTokens(usage);
  view.figures.textContent = [
    turn.policy, `first token after ${milliseconds(turn.answer.first)}`, `all after ${milliseconds(turn.answer.whole)}`,
    `${counted(usage.prompt_tokens, "prompt token")}: ${number(tokens.cached)} cached, ${number(tokens.recomputed)} recomputed, ${number(tokens.fresh)} fresh`,
  ].filter(Boolean).join(" · ");
  fillBar(view.bar, tokens);
  view.bar.hidden = view.buttons.hidden = false;
  turn.comparable = true;
  const see = make("button", { type: "button" }, "Show the prompt");
  const against = make("button", { type: "button", className: "compare" }, "Compare with the full computation");
  see.addEventListener("click", () => show(turn));
  against.addEventListener("click", () => showComparison(turn));
  view.buttons.append(see, against);
  await show(turn);
}

async function show(turn) {
  const link = turn.policy ? { policy: turn.policy } : {};
  turn.answer.explanation ??= await post("v1/link/explain", { messages: turn.messages, link });
  showPrompt(turn);
}

async function showComparison(turn) {
  await show(turn);
  turn.full ??= generate(turn, "full", () => {}).catch(error => { delete turn.full; throw error });
  await compare(turn.answer, turn.full, turn.policy);
}

/** Generate an answer to a turn's messages: {text, first, whole, usage, policy, explanation}; times in milliseconds. */
async function generate({ messages, maxTokens }, policy, tell, explained = {}) {
  const body = {
    messages, max_tokens: maxTokens, temperature: 0, stream: true, stream_options: { include_usage: true },
    link: { ...(policy ? { policy } : {}), ...explained },
  };
  const result = { text: "" };
  const begin = performance.now();
  for await (const chunk of stream(CHAT, body, running?.signal)) {
    const { content, reasoning_content: reasoning } = chunk.choices[0]?.delta || {};
    if (content || reasoning) result.first ??= performance.now() - begin;
    if (content) tell(result.text += content);
    if (chunk.link) Object.assign(result, { policy: chunk.link.policy, explanation: chunk.link.explanation ?? result.explanation });
    if (chunk.usage) result.usage = chunk.usage;
  }
  result.whole = performance.now() - begin;
  result.first ??= result.whole;
  return result;
}
