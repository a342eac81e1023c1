/** The list of conversations: searched, opened, renamed, deleted. */

import { confirmed, written } from "../base/dialogs.js";
import { by, button, make } from "../base/dom.js";
import { current, discard, listed, open, rename } from "./conversations.js";

const FEW = 5; // conversations that need no search

export function startHistory() {
  for (const name of ["conversations", "conversation"]) addEventListener(name, showHistory);
  by("history-search").addEventListener("input", showHistory);
  by("anew").addEventListener("click", async () => { await open(null); by("question").focus() });
}

const textOf = ({ title, turns }) => [title, ...turns.flatMap(({ question, answer }) => [question, answer.text])].join("\n").toLowerCase();

async function showHistory() {
  const conversations = await listed().catch(error => { by("history-note").textContent = error.message; return [] });
  const words = by("history-search").value.trim().toLowerCase();
  const found = conversations.filter(each => textOf(each).includes(words));
  by("history").replaceChildren(...(found.length || !words ? found.map(entry) : [make("li", { className: "faint" }, "No conversation has these words.")]));
  by("history-search").hidden = conversations.length < FEW && !words;
  by("history-part").hidden = !conversations.length && !by("history-note").textContent;
}

function entry({ id, title, changed }) {
  const opener = button(title, async () => { await open(id); by("question").focus() }, { className: "title", title: `${title}\n${new Date(changed).toLocaleString()}` });
  if (id === current.id) opener.setAttribute("aria-current", "true");
  return make(
    "li", {}, opener,
    button("✎", () => renamed(id, title), { ariaLabel: `Rename ${title}`, title: "Rename" }),
    button("×", () => dropped(id, title), { ariaLabel: `Delete ${title}`, title: "Delete" }),
  );
}

async function renamed(id, title) {
  const other = await written("What the conversation is to be called", "Rename", title);
  if (other !== null) await rename(id, other);
}

async function dropped(id, title) {
  if (await confirmed(`Delete “${title}”? Its documents stay.`, "Delete")) await discard(id);
}
