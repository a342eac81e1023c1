/** Measures what a policy does to an answer: its time, and how far its distributions are from the full computation's. */

import { post, stream } from "../base/api.js";

const CHAT = "v1/chat/completions";
const TOP = 20; // likeliest tokens of each distribution that are compared; all others count as one

const salt = () => Array.from(crypto.getRandomValues(new Uint32Array(4))).join("-");

/**
 * Answer a request greedily under a policy, without what earlier requests left behind.
 *
 * Returns {policy, text, first, whole, usage, salt, tokens}: times in milliseconds, and each token's id with
 * the likeliest ones in its place, {id, top: Map of ids to log probabilities}.
 */
export async function answerUnder(policy, body, signal) {
  const result = { policy, text: "", tokens: [], salt: salt() };
  const asked = {
    ...body, temperature: 0, link: { policy }, cache_salt: result.salt, logprobs: true, top_logprobs: TOP,
    return_tokens_as_token_ids: true, stream: true, stream_options: { include_usage: true },
  };
  const begin = performance.now();
  for await (const chunk of stream(CHAT, asked, signal)) {
    const [choice] = chunk.choices;
    if (choice?.delta?.content) {
      result.first ??= performance.now() - begin;
      result.text += choice.delta.content;
    }
    for (const { token, top_logprobs: top } of choice?.logprobs?.content || []) {
      result.tokens.push({ id: idOf(token), top: new Map(top.map(each => [idOf(each.token), each.logprob])) });
    }
    if (chunk.usage) result.usage = chunk.usage;
  }
  result.whole = performance.now() - begin;
  result.first ??= result.whole;
  return result;
}

const idOf = token => token.replace("token_id:", "");

/**
 * Return the mean divergence (KL, in nats per token) of an answer's distributions from the full computation's
 * of the same tokens; null where there is nothing to compare. `full` is the full computation's own answer.
 */
export async function divergence(answer, body, full, signal) {
  if (answer === full) return 0;
  if (!answer.text) return null;
  const scored = await post(CHAT, {
    ...body, temperature: 0, link: { policy: "full" }, cache_salt: full.salt, max_tokens: 1, prompt_logprobs: TOP,
    messages: [...body.messages, { role: "assistant", content: answer.text }], add_generation_prompt: false, continue_final_message: true,
  }, signal);
  const begin = answer.usage.prompt_tokens;
  const told = [];
  for (const [index, { id, top }] of answer.tokens.entries()) {
    const whole = scored.prompt_logprobs[begin + index];
    if (!whole?.[id]) break; // the text is other tokens from here on
    told.push(divergenceOf(new Map(Object.entries(whole).map(([each, { logprob }]) => [each, logprob])), top));
  }
  return told.length ? told.reduce((sum, each) => sum + each) / told.length : null;
}

/** Return KL(one ‖ other), where tokens that are not in both count as one: no more than it is over all tokens. */
function divergenceOf(one, other) {
  let sum = 0, rest = 1, otherRest = 1;
  for (const [id, logprob] of one) {
    if (!other.has(id)) continue;
    sum += Math.exp(logprob) * (logprob - other.get(id));
    rest -= Math.exp(logprob);
    otherRest -= Math.exp(other.get(id));
  }
  if (rest > 1e-9 && otherRest > 1e-9) sum += rest * Math.log(rest / otherRest);
  return Math.max(0, sum);
}
