/** Starts the page: the key, all parts, and shortcuts. */

import { storedKey, storeKey } from "./base/api.js";
import { by } from "./base/dom.js";
import { startNarrow } from "./base/narrow.js";
import { startTheme } from "./base/theme.js";
import { startTabs } from "./base/tabs.js";
import { ask, askAgain, busy, goOn, stop } from "./conversation/asking.js";
import { showCode, startCode } from "./conversation/code.js";
import { current, startConversations } from "./conversation/conversations.js";
import { startExports } from "./conversation/exports.js";
import { startHistory } from "./conversation/history.js";
import { startPolicies } from "./conversation/policies.js";
import { bodyOf, numbered } from "./conversation/requests.js";
import { startSettings } from "./conversation/settings.js";
import { failed, showTurns, startTurns } from "./conversation/turns.js";
import { startWelcome } from "./conversation/welcome.js";
import { startSearch } from "./documents/chosen.js";
import { startDropping } from "./documents/dropping.js";
import { clearLibrary, showLibrary, startLibrary } from "./documents/library.js";
import { cacheAll, resume } from "./documents/uploads.js";
import { startPassage } from "./documents/passage.js";
import { compare } from "./prompt/comparison.js";
import { explanations, showPrompt, startPrompt } from "./prompt/prompt.js";
import { startModels } from "./server/models.js";
import { refresh, startStatus } from "./server/status.js";

const notice = words => { by("notice").textContent = words };
const read = () => Promise.all([startPolicies(), showLibrary()]).then(() => notice(""), error => notice(error.status === 401 ? "" : error.message));

/** Ask for the key where the server wants one, and offer to forget the one that there is. */
function startKey() {
  const showKey = asked => {
    by("key-form").hidden = !asked;
    by("forget-key").hidden = asked || !storedKey();
  };
  showKey(false);
  addEventListener("key-needed", () => {
    if (by("key-form").hidden) by("key").value = "";
    by("key-words").textContent = storedKey() ? "The server does not take this key." : "The server asks for an API key.";
    showKey(true);
  });
  const use = async key => {
    storeKey(key);
    showKey(false);
    clearLibrary();
    await Promise.all([read(), refresh(notice)]);
  };
  by("key-form").addEventListener("submit", event => { event.preventDefault(); use(by("key").value.trim()) });
  by("forget-key").addEventListener("click", () => use(""));
}

const before = turn => current.turns.slice(0, current.turns.indexOf(turn));
const requestOf = turn => bodyOf(before(turn), turn);
const prompt = turn => showPrompt(turn, requestOf(turn), numbered([...before(turn), turn])).catch(error => failed(error.message));
const comparison = async turn => { await prompt(turn); await compare(turn, requestOf(turn)) };
const last = () => current.turns.at(-1);

function startConversation() {
  startTurns({ again: askAgain, goOn, code: showCode, prompt, compare: comparison });
  addEventListener("conversation", () => {
    showTurns();
    by("prompt").hidden = !explanations.has(last());
  });
  addEventListener("answered", () => {
    if (explanations.has(last()) || last()?.answer.usage) prompt(last());
    refresh(notice);
  });
  by("ask").addEventListener("submit", event => {
    event.preventDefault();
    const question = by("question").value.trim();
    if (question) ask(question);
  });
  by("question").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    by("ask").requestSubmit();
  });
  by("stop").addEventListener("click", stop);
}

const TYPING = "input:not([type=checkbox], [type=range]), textarea, select";
const SHORTCUTS = {
  "/": () => by("query").focus(),
  q: () => by("question").focus(),
  p: () => by("tokens").focus(),
  l: () => by("layer").focus(),
  c: () => { if (last()?.answer.usage) comparison(last()) },
  "?": () => by("shortcuts").showModal(),
};

function startShortcuts(showTab) {
  addEventListener("keydown", event => {
    if (event.key === "Escape") return stop();
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches(TYPING) || document.querySelector("dialog[open]")) return;
    const shortcut = SHORTCUTS[event.key];
    if (!shortcut) return;
    event.preventDefault();
    showTab(by("tab-ask"));
    shortcut();
  });
  by("show-shortcuts").addEventListener("click", () => by("shortcuts").showModal());
  by("skip").addEventListener("click", event => { event.preventDefault(); showTab(by("tab-ask")); by("question").focus() });
}

startTheme();
startKey();
startNarrow();
startConversation();
startShortcuts(startTabs(by("tabs")));
startHistory();
startExports();
startWelcome();
startSettings();
startCode();
startPrompt();
startPassage();
startSearch();
startLibrary(resume);
startDropping(cacheAll);
startModels(() => Promise.all([read(), refresh(notice)]));
startStatus(notice);
await read();
await startConversations(busy);
document.body.dataset.ready = "true";
