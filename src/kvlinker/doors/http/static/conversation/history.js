/** The list of conversations, and what can be done with the one that is shown: renamed, exported, deleted. */

import { confirmed, written } from "../base/dialogs.js";
import { by, button, make, save } from "../base/dom.js";
import { current, discard, listed, open, store } from "./conversations.js";
import { bodyOf } from "./requests.js";

export function startHistory() {
  for (const name of ["conversations", "conversation"]) addEventListener(name, showHistory);
  by("anew").addEventListener("click", async () => { await open(null); by("question").focus() });
  const menu = { rename, "export-markdown": exportMarkdown, "export-json": exportRequest, "delete-conversation": drop };
  for (const [id, action] of Object.entries(menu)) {
    by(id).addEventListener("click", () => { by("conversation-menu").open = false; action() });
  }
  by("conversation-menu").addEventListener("keydown", ({ key }) => { if (key === "Escape") by("conversation-menu").open = false });
}

async function showHistory() {
  const conversations = await listed().catch(error => { by("history-note").textContent = error.message; return [] });
  by("history").replaceChildren(...conversations.map(({ id, title, changed }) => {
    const open_ = button(title, () => open(id), { title: new Date(changed).toLocaleString() });
    if (id === current.id) open_.setAttribute("aria-current", "true");
    return make("li", {}, open_);
  }));
  by("history-part").hidden = !conversations.length && !by("history-note").textContent;
}

async function rename() {
  const title = await written("What the conversation is to be called", "Rename", current.title);
  if (title === null) return;
  current.title = title;
  await store(current);
}

async function drop() {
  if (await confirmed(`Delete “${current.title}”? Its documents stay.`, "Delete")) await discard();
}

const fileName = end => `${current.title.replace(/[^\p{L}\p{N} -]/gu, "").trim() || "conversation"}.${end}`;

function exportMarkdown() {
  const turns = current.turns.map(({ question, chunks, policy, answer }) => {
    const about = chunks.length ? `\n\n*About ${chunks.map(({ title }) => title).join(", ")}; linked under ${policy}*` : "";
    return `## ${question}${about}\n\n${answer.text}\n`;
  });
  save(fileName("md"), [`# ${current.title}\n`, ...turns].join("\n"), "text/markdown");
}

function exportRequest() {
  const { turns } = current;
  save(fileName("json"), `${JSON.stringify(bodyOf(turns.slice(0, -1), turns.at(-1)), null, 2)}\n`, "application/json");
}
