/** What the browser keeps of this page: conversations, and texts of uploads that are under way. Nothing of it is on the server. */

const STORES = { conversations: "id", uploads: "source" };

const KEEPS_NOTHING = "This browser keeps nothing for this page, so conversations end with it.";

const opened = new Promise((resolve, reject) => {
  if (!globalThis.indexedDB) return reject(new Error(KEEPS_NOTHING));
  const request = indexedDB.open("kvlinker", 1);
  request.onupgradeneeded = () => {
    for (const [name, keyPath] of Object.entries(STORES)) request.result.createObjectStore(name, { keyPath });
  };
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(new Error(KEEPS_NOTHING));
});
opened.catch(() => {}); // told by whoever asks

async function asked(store, mode, ask) {
  const transaction = (await opened).transaction(store, mode);
  const request = ask(transaction.objectStore(store));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(new Error("The browser has no room for more conversations: delete some."));
  });
}

export const readAll = store => asked(store, "readonly", each => each.getAll());
export const read = (store, key) => asked(store, "readonly", each => each.get(key));
export const keep = (store, value) => asked(store, "readwrite", each => each.put(value));
export const forget = (store, key) => asked(store, "readwrite", each => each.delete(key));
