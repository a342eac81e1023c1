/** Shows the turns of the conversation: questions, answers, what each reused, and what can be done with it. */

import { by, button, copy, counted, fillBar, make, milliseconds, number, usedTokens } from "../base/dom.js";
import { current } from "./conversations.js";

/** What can be done with a turn, by the words on its buttons; set once, by the part that knows how. */
let actions = {};
export const startTurns = given => { actions = given };

const views = new WeakMap();

/** Show all turns anew. */
export function showTurns() {
  by("turns").replaceChildren(...current.turns.map(turn => viewOf(turn).root));
  by("conversation-title").textContent = current.title || "Ask about your documents";
  by("conversation-menu").hidden = !current.id;
  by("failure").replaceChildren();
}

/** Show why there is no answer, and what can be done. */
export function failed(words, ...buttons) {
  by("failure").replaceChildren(make("p", { className: "wrong" }, words), ...buttons);
}

function viewOf(turn) {
  const view = {
    asked: make("div", { className: "asked" }, make("p", {}, turn.question)),
    sources: make("small"), answered: make("p", { className: "answered" }), figures: make("p", { className: "figures faint" }),
    bar: make("div", { className: "bar", hidden: true }), buttons: make("p", { className: "row quiet" }),
  };
  view.root = make("li", { className: "turn" }, view.asked, view.sources, view.answered, view.bar, view.figures, view.buttons);
  views.set(turn, view);
  tellSources(turn);
  tellAnswer(turn);
  return view;
}

/** Tell which chunks a turn is about. */
export function tellSources(turn) {
  const names = turn.chunks.map(({ title, gone }) => (gone ? `${title} (left out)` : title));
  views.get(turn).sources.textContent = turn.chunks.length ? `about ${names.join(", ")}` : "";
}

/** Tell as much of an answer as there is; its figures and buttons once it is complete. */
export function tellAnswer(turn) {
  const { answered, figures, bar, buttons } = views.get(turn);
  const { text, usage, first, whole, stopped } = turn.answer;
  answered.textContent = text;
  if (!whole && !stopped) return;
  figures.textContent = stopped ? "Stopped." : figuresOf(turn, usage, first, whole);
  if (usage) fillBar(bar, usedTokens(usage));
  bar.hidden = !usage;
  buttons.replaceChildren(
    button("Copy", ({ target }) => copy(text, target)),
    ...(turn === current.turns.at(-1) ? [button("Regenerate", () => actions.again(turn))] : []),
    button("Edit", () => edit(turn)),
    button("As code", () => actions.code(turn)),
    ...(stopped ? [] : [
      button("Show the prompt", () => actions.prompt(turn)),
      button("Compare with the full computation", () => actions.compare(turn), { className: "compare" }),
    ]),
  );
}

function figuresOf({ policy }, usage, first, whole) {
  const tokens = usedTokens(usage);
  return [
    policy, `first token after ${milliseconds(first)}`, `all after ${milliseconds(whole)}`,
    `${counted(usage.prompt_tokens, "prompt token")}: ${number(tokens.cached)} cached, ${number(tokens.recomputed)} recomputed, ${number(tokens.fresh)} fresh`,
  ].filter(Boolean).join(" · ");
}

/** Let the reader change a question; asking it takes away what came behind it. */
function edit(turn) {
  const { asked } = views.get(turn);
  const field = make("textarea", { value: turn.question, ariaLabel: "The question, changed", rows: 2 });
  const done = () => { asked.replaceChildren(make("p", {}, turn.question)) };
  const form = make(
    "form", {}, field,
    make("p", { className: "row" }, make("button", { className: "main" }, "Ask this instead"), button("Cancel", done)),
  );
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (field.value.trim()) actions.again(turn, field.value.trim());
  });
  field.addEventListener("keydown", event => {
    if (event.key === "Escape") { event.stopPropagation(); done() }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  asked.replaceChildren(form);
  field.focus();
}
