/** What can be taken away of the shown conversation: its text, and its last request. */

import { by, save } from "../base/dom.js";
import { current } from "./conversations.js";
import { asPage } from "./page_export.js";
import { bodyOf } from "./requests.js";

export function startExports() {
  const menu = { "export-page": exportPage, "export-markdown": exportMarkdown, "export-json": exportRequest };
  for (const [id, action] of Object.entries(menu)) {
    by(id).addEventListener("click", () => { by("conversation-menu").open = false; action() });
  }
  by("conversation-menu").addEventListener("keydown", ({ key }) => { if (key === "Escape") by("conversation-menu").open = false });
}

const fileName = end => `${current.title.replace(/[^\p{L}\p{N} -]/gu, "").trim() || "conversation"}.${end}`;

async function exportPage() {
  save(fileName("html"), await asPage(current, document.querySelectorAll(".turn > .answered")), "text/html");
}

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
