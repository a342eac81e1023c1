/** Policies side by side on one prompt: answer, quality, time and work, each measured when it is asked for. */

import { isAbort } from "../base/api.js";
import { by, button, counted, make, milliseconds, number, percent, usedTokens } from "../base/dom.js";
import { ladder, usePolicy } from "../conversation/policies.js";
import { differences, wordsOf } from "./differences.js";
import { answerUnder, divergence } from "./quality.js";

const FULL = "full";

let shown = null; // {turn, body, measured: Map of policies to results, next: the slider's policy, abort}

/** Measure the policy of a turn, whose request is `body`, and the full computation, and show both. */
export async function compare(turn, body) {
  shown?.abort.abort();
  shown = { turn, body, measured: new Map(), next: turn.policy, abort: new AbortController() };
  by("comparison").replaceChildren(make("p", { className: "faint" }, "Computing everything …"));
  by("comparison").scrollIntoView({ block: "nearest" });
  await measure(FULL, turn.policy);
}

async function measure(...policies) {
  const { measured, body, abort: { signal } } = shown;
  try {
    for (const policy of policies.filter(each => !measured.has(each))) {
      const answer = await answerUnder(policy, body, signal);
      const full = measured.get(FULL) || answer;
      const untold = error => { if (error.status !== 400) throw error; return null }; // vLLM does not score linked prompts
      measured.set(policy, { ...answer, kl: await divergence(answer, body, full, signal).catch(untold) });
    }
    show();
  } catch (error) {
    if (!isAbort(error)) by("comparison").append(make("p", { className: "wrong" }, error.message));
  }
}

function show() {
  const { turn, measured } = shown;
  const full = measured.get(FULL);
  const order = Array.from(measured.values()).sort((one, other) => (one.policy === FULL) - (other.policy === FULL) || computed(one) - computed(other));
  by("comparison").replaceChildren(
    make("h3", {}, "Beside the full computation"),
    make("p", { className: "verdict" }, verdictOf(measured.get(turn.policy), full)),
    make("div", { className: "columns" }, ...order.map(each => card(each, full))),
    slider(),
  );
}

const computed = ({ usage }) => usage.prompt_tokens - usedTokens(usage).cached;

function verdictOf(linked, full) {
  if (linked === full) return "This answer was computed in full: there is nothing to compare it with.";
  const [, , at] = differences(wordsOf(linked.text), wordsOf(full.text));
  const ratio = full.first / linked.first;
  const faster = ratio >= 1 ? `The linked one began ${ratio.toFixed(1)}× sooner.` : `The full one began ${(1 / ratio).toFixed(1)}× sooner.`;
  return `${at < 0 ? "Both answers are the same, word for word." : `The answers differ from word ${at + 1} on.`} ${faster}`;
}

function card({ policy, text, kl, first, whole, usage }, full) {
  const [words] = differences(wordsOf(text), wordsOf(full.text));
  const { recomputed, cached } = usedTokens(usage);
  const reusable = recomputed + cached;
  const lines = [
    ["KL to full, in nats", kl === null ? "–" : policy === FULL ? "0" : kl < 0.0005 ? "< 0.0005" : kl.toFixed(3)],
    ["first token", milliseconds(first)], ["all", milliseconds(whole)],
    ["recomputed", reusable ? percent(recomputed / reusable) : "–"],
    ["computed", `${number(computed({ usage }))} of ${counted(usage.prompt_tokens, "token")}`],
  ];
  return make(
    "div", { className: "side" }, make("h3", {}, policy),
    make("p", { className: "answered" }, ...words.map(([word, differs]) => (differs ? make("mark", {}, word) : word))),
    make("dl", { className: "figures" }, ...lines.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
  );
}

/** Return a slider over policies, from the cheapest to the full one. */
function slider() {
  const names = ladder();
  const range = make("input", { id: "try-policy", type: "range", min: 0, max: names.length - 1, value: Math.max(0, names.indexOf(shown.next)) });
  const name = make("output", {});
  const tell = () => {
    shown.next = name.textContent = names[range.valueAsNumber];
    range.setAttribute("aria-valuetext", shown.next);
  };
  range.addEventListener("input", tell);
  tell();
  const run = button("Measure", () => { run.disabled = true; measure(shown.next) });
  const label = make("label", { htmlFor: "try-policy" }, "Recompute more or less");
  return make("div", { className: "row" }, label, range, name, run, button("Use from now on", () => usePolicy(shown.next)));
}
