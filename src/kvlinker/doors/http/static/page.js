/** Starts the page: the key, all parts, and shortcuts. */

import { storedKey, storeKey } from "./api.js";
import { compareLast, startChat, stop } from "./chat.js";
import { showLibrary, startDocuments } from "./documents.js";
import { by } from "./dom.js";
import { startPolicies } from "./policies.js";
import { startPrompt } from "./prompt.js";
import { refresh, startStatus } from "./status.js";

const notice = words => { by("notice").textContent = words };
const read = () => Promise.all([startPolicies(), showLibrary()]).catch(error => notice(error.message));

by("key").value = storedKey();
by("key-form").addEventListener("submit", async event => {
  event.preventDefault();
  storeKey(by("key").value.trim());
  await refresh(notice);
  await read();
});
addEventListener("answered", () => refresh(notice));
addEventListener("key-needed", () => notice("The server asks for an API key."));

const TYPING = "input:not([type=checkbox], [type=range]), textarea, select";
const SHORTCUTS = {
  "/": () => by("query").focus(),
  q: () => by("question").focus(),
  p: () => by("tokens").focus(),
  l: () => by("layer").focus(),
  c: () => compareLast(),
  "?": () => by("shortcuts").showModal(),
};
addEventListener("keydown", event => {
  if (event.key === "Escape") return stop();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches(TYPING) || by("shortcuts").open) return;
  const shortcut = SHORTCUTS[event.key];
  if (!shortcut) return;
  event.preventDefault();
  shortcut();
});
by("show-shortcuts").addEventListener("click", () => by("shortcuts").showModal());

startDocuments();
startChat();
startPrompt();
startStatus(notice);
read();
