/** The first minute: what this is, documents to try, and questions about them; and once, what the colours mean. */

import { by, button, make } from "../base/dom.js";
import { cacheAll } from "../documents/uploads.js";
import { ask } from "./asking.js";
import { current, listed } from "./conversations.js";

const DOCUMENTS = {
  "bakery.md": "Mira Holt lives in Varna. She works as a baker.\n\nLeo Novak lives in Rome. He works as a painter.\n",
  "harbour.md": "Tom Reyes lives in Oslo. He works as a pilot.\n\nIda Okoye lives in Turku. She works as a teacher.\n",
  "clinic.md": "Ana Petrov lives in Lima. She works as a nurse.\n\nJon Berg lives in Quito. He works as a lawyer.\n",
};
const QUESTIONS = ["Where does Tom Reyes live?", "What does Ana Petrov work as?", "Where does Mira Holt live?"];

let sources = []; // the names of the documents that there are

const missing = () => Object.entries(DOCUMENTS).filter(([name]) => !sources.includes(name));
const add = () => cacheAll(missing().map(([name, text]) => [name, new File([text], name)]));

export function startWelcome() {
  by("example-documents").replaceChildren(...Object.entries(DOCUMENTS).map(([name, text]) => (
    make("li", {}, make("strong", {}, name), make("small", {}, text))
  )));
  by("example-questions").querySelector("ul").replaceChildren(...QUESTIONS.map(question => make("li", {}, button(question, async () => {
    if (missing().length) await add();
    await ask(question);
  }))));
  by("add-examples").addEventListener("click", add);
  by("hide-hint").addEventListener("click", () => { by("hint").hidden = true; by("tokens").focus() });
  addEventListener("conversation", show);
  addEventListener("asking", show);
  addEventListener("answered", hint);
  addEventListener("documents", ({ detail }) => { sources = detail; show() });
}

/** A conversation that has not begun shows what can be done; with documents of one's own, no examples. */
function show() {
  by("welcome").hidden = current.turns.length > 0;
  by("examples").hidden = sources.length > 0;
  by("example-questions").hidden = sources.length > 0 && missing().length > 0;
  by("hint").hidden = true;
}

/** Say what the colours mean, below the first answer that there is. */
async function hint() {
  const conversations = await listed().catch(() => []);
  by("hint").hidden = conversations.length > 1 || current.turns.length !== 1;
}
