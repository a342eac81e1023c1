/** Asks the reader: whether something is to be done, or what something is to be called. */

import { by } from "./dom.js";

/** Return whether the reader wants to do what `words` ask; `action` names it on the button. */
export async function confirmed(words, action) {
  return (await answered({ words, action })) !== null;
}

/** Return what the reader writes in the place of `value`; null for nothing. */
export async function written(words, action, value) {
  return answered({ words, action, value });
}

function answered({ words, action, value }) {
  const dialog = by("question-dialog");
  by("question-words").textContent = words;
  by("question-yes").textContent = action;
  by("question-yes").className = value === undefined ? "danger" : "main";
  by("question-field").hidden = value === undefined;
  by("question-input").value = value ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  if (value !== undefined) by("question-input").select();
  return new Promise(resolve => dialog.addEventListener("close", () => {
    const text = by("question-input").value.trim();
    resolve(dialog.returnValue === "yes" && (value === undefined || text) ? text : null);
  }, { once: true }));
}

/** Close a dialog by a press beside it, as one expects. */
export function closeBeside(dialog) {
  dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close() });
}
