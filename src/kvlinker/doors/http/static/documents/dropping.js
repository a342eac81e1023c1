/** Files that are dropped on the page or chosen, folders read to their ends. */

import { by } from "../base/dom.js";

/** Give [path, file] of all that is dropped or chosen to `take`. */
export function startDropping(take) {
  const drop = by("drop");
  for (const kind of ["dragenter", "dragover"]) addEventListener(kind, event => { event.preventDefault(); drop.classList.add("over") });
  for (const kind of ["dragleave", "drop"]) addEventListener(kind, event => { event.preventDefault(); drop.classList.remove("over") });
  addEventListener("drop", async event => take(await droppedFiles(event.dataTransfer)));
  for (const id of ["files", "folder"]) {
    by(id).addEventListener("change", ({ target }) => {
      take(Array.from(target.files, file => [file.webkitRelativePath || file.name, file]));
      target.value = "";
    });
  }
}

/** Return [path, file] of everything that was dropped. */
async function droppedFiles(transfer) {
  const entries = Array.from(transfer.items, item => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return Array.from(transfer.files, file => [file.name, file]);
  const found = [];
  for (const entry of entries) await readEntry(entry, found);
  return found;
}

async function readEntry(entry, found) {
  if (entry.isFile) {
    found.push([entry.fullPath.replace(/^\//, ""), await new Promise((resolve, reject) => entry.file(resolve, reject))]);
    return;
  }
  const reader = entry.createReader();
  for (;;) { // a call tells some of a folder's entries, and none at its end
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return;
    for (const each of some) await readEntry(each, found);
  }
}

/** Let the reader choose one file; null for none. */
export function chosenFile() {
  const input = by("one-file");
  input.value = "";
  input.click();
  return new Promise(resolve => {
    input.onchange = () => resolve(input.files[0] || null);
    input.oncancel = () => resolve(null);
  });
}
