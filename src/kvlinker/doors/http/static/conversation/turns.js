/** Shows the turns of the conversation: questions, answers, what each reused, and what can be done with it. */

import { by, button, copy, counted, fillBar, make, milliseconds, number, usedTokens } from "../base/dom.js";
import { Markdown } from "../base/markdown.js";
import { current } from "./conversations.js";
import { markOf, sourceList } from "./sources.js";

const NEAR = 80; // pixels from the end of the answer, within which the reader follows it

/** What can be done with a turn, by the words on its buttons; set once, by the part that knows how. */
let actions = {};
export const startTurns = given => { actions = given };

const views = new WeakMap();

/** Show all turns; those whose answers are shown already are not made anew. */
export function showTurns() {
  const roots = current.turns.map(turn => {
    const view = views.get(turn);
    if (view?.answer !== turn.answer) return viewOf(turn).root;
    tellAnswer(turn);
    return view.root;
  });
  const shown = by("turns").children;
  if (roots.length !== shown.length || roots.some((root, index) => root !== shown[index])) by("turns").replaceChildren(...roots);
  by("conversation-title").textContent = by("conversation-title").title = current.title || "Ask about your documents";
  by("conversation-menu").hidden = !current.id;
  by("failure").replaceChildren();
}

/** Show why there is no answer, and what can be done. */
export function failed(words, ...buttons) {
  by("failure").replaceChildren(make("p", { className: "wrong" }, words), ...buttons);
}

function viewOf(turn) {
  const view = {
    answer: turn.answer,
    asked: make("div", { className: "asked" }, make("p", {}, turn.question)),
    answered: make("div", { className: "answered markdown" }), cut: make("p", { className: "cut", hidden: true }),
    sources: make("div"), figures: make("p", { className: "figures faint" }),
    bar: make("div", { className: "bar", hidden: true }), buttons: make("p", { className: "row quiet" }),
  };
  view.text = new Markdown(view.answered, number => markOf(turn, number));
  view.root = make("li", { className: "turn" }, view.asked, view.answered, view.cut, view.sources, view.bar, view.figures, view.buttons);
  views.set(turn, view);
  tellSources(turn);
  tellAnswer(turn);
  return view;
}

/** Tell which chunks a turn is about. */
export function tellSources(turn) {
  views.get(turn).sources.replaceChildren(...sourceList(turn));
}

/** Tell as much of an answer as there is, at most once in a frame; its figures and buttons once it is complete. */
export function tellAnswer(turn) {
  const view = views.get(turn);
  if (!isUnderWay(turn)) {
    draw(turn, view);
    tellEnd(turn, view);
  } else if (view.isDrawn) {
    view.isLate = true;
  } else {
    view.cut.hidden = true;
    draw(turn, view);
    view.isDrawn = true;
    requestAnimationFrame(() => {
      const { isLate } = view;
      view.isDrawn = view.isLate = false;
      if (isLate && isUnderWay(turn)) tellAnswer(turn);
    });
  }
}

const isUnderWay = ({ answer: { whole, stopped } }) => !whole && !stopped;

function draw(turn, { text, root }) {
  const follows = Math.abs(root.getBoundingClientRect().bottom - by("ask").getBoundingClientRect().top) < NEAR;
  text.show(turn.answer.text, !isUnderWay(turn));
  if (follows) root.scrollIntoView({ block: "nearest" });
}

function tellEnd(turn, { cut, figures, bar, buttons }) {
  const { text, usage, stopped, cut: isCut } = turn.answer;
  const isLast = turn === current.turns.at(-1);
  cut.hidden = !(isCut || stopped);
  cut.replaceChildren(
    make("span", {}, stopped ? "Stopped." : "Cut: this is as long as it may be."),
    ...(isLast ? [button("Continue", () => actions.goOn(turn))] : []),
  );
  figures.textContent = figuresOf(turn);
  if (usage) fillBar(bar, usedTokens(usage));
  bar.hidden = !usage;
  buttons.replaceChildren(
    button("Copy", ({ target }) => copy(text, target)),
    ...(isLast ? [button("Regenerate", () => actions.again(turn))] : []),
    button("Edit", () => edit(turn)),
    button("As code", () => actions.code(turn)),
    ...(usage ? [
      button("Show the prompt", () => actions.prompt(turn)),
      button("Compare with the full computation", () => actions.compare(turn), { className: "compare" }),
    ] : []),
  );
  tellSources(turn);
}

function figuresOf({ policy, answer: { usage, tokens, first, whole } }) {
  const used = usage && usedTokens(usage);
  const rate = tokens > 1 && whole > first ? (1000 * (tokens - 1)) / (whole - first) : 0;
  return [
    policy, tokens && counted(tokens, "token"), rate && `${rate < 10 ? rate.toFixed(1) : number(Math.round(rate))} tokens/s`,
    first && `first token after ${milliseconds(first)}`, whole && `all after ${milliseconds(whole)}`,
    used && `${counted(usage.prompt_tokens, "prompt token")}: ${number(used.cached)} cached, ${number(used.recomputed)} recomputed, ${number(used.fresh)} fresh`,
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
