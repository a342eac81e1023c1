/** The conversations: the one that is shown, and those that the browser keeps; other tabs learn of changes. */

import { forget, keep, read, readAll } from "../base/database.js";
import { useSettings } from "./settings.js";

const STORE = "conversations";
const LONGEST_TITLE = 80;

const tabs = new BroadcastChannel("kvlinker conversations");

const blank = () => ({ id: null, title: "", changed: 0, turns: [] });

/**
 * The conversation that is shown: {id, title, changed, settings, turns}.
 *
 * A turn is {question, picked, chunks, policy, settings, answer}; `chunks` are {id, title, document, endsLine, gone},
 * and `answer` is {text, usage, first, whole, stopped}, times in milliseconds.
 */
export let current = blank();

const changed = () => dispatchEvent(new Event("conversation"));
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), byte => byte.toString(16).padStart(2, "0")).join("");
const addressOf = id => (id ? `#c=${id}` : location.pathname);
const idInAddress = () => location.hash.match(/^#c=(\w+)$/)?.[1];

/** Show the conversation that the address names, or else the latest one; `busy` says whether an answer is under way. */
export async function startConversations(busy) {
  addEventListener("popstate", showAddressed);
  tabs.addEventListener("message", async ({ data }) => {
    dispatchEvent(new Event("conversations"));
    if (data === current.id && !busy()) await showAddressed();
  });
  const latest = idInAddress() ? null : (await listed().catch(() => []))[0];
  if (latest) history.replaceState(null, "", addressOf(latest.id));
  await showAddressed();
}

async function showAddressed() {
  const id = idInAddress();
  const found = id && await read(STORE, id).catch(() => null); // told where all are listed
  current = found || blank();
  if (found) useSettings(found.settings);
  changed();
}

/** Show a conversation, a new one for null; the browser's “back” leads to the one before. */
export async function open(id) {
  if (id !== (idInAddress() ?? null)) history.pushState(null, "", addressOf(id));
  await showAddressed();
}

/** Return what there is of conversations, the latest first. */
export const listed = async () => (await readAll(STORE)).sort((one, other) => other.changed - one.changed);

/** Keep a conversation as it is now, unless it was deleted meanwhile. */
export async function store(conversation) {
  if (conversation.deleted) return;
  const begins = !conversation.id;
  conversation.id ??= newId();
  conversation.title ||= conversation.turns[0].question.slice(0, LONGEST_TITLE);
  conversation.changed = Date.now();
  conversation.settings = conversation.turns.at(-1).settings;
  await keep(STORE, conversation);
  if (begins && conversation === current) history.pushState(null, "", addressOf(conversation.id));
  tell(conversation.id);
  if (conversation.id === current.id && conversation !== current) return showAddressed();
  changed();
}

/** Call a conversation something else. */
export async function rename(id, title) {
  const conversation = id === current.id ? current : await read(STORE, id);
  if (!conversation) return; // another tab has deleted it
  conversation.title = title;
  await keep(STORE, conversation);
  tell(id);
  if (conversation === current) changed();
}

/** Delete a conversation; in the place of the one that is shown, show a new one. */
export async function discard(id) {
  const isShown = id === current.id;
  if (isShown) current.deleted = true;
  await forget(STORE, id);
  tell(id);
  if (!isShown) return;
  history.replaceState(null, "", addressOf(null));
  await showAddressed();
}

function tell(id) {
  tabs.postMessage(id);
  dispatchEvent(new Event("conversations"));
}
