/** Talks to the server that the page comes from, with the key that the reader gave. */

const KEY = "apiKey";

export const storedKey = () => sessionStorage.getItem(KEY) || "";
export const storeKey = key => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** What kept a request from being fulfilled; `status` is 0 where the server did not answer at all. */
export class ServerError extends Error {
  constructor(status, { message, code, param }) {
    super(message.replaceAll("`", ""));
    Object.assign(this, { status, code, param });
  }
}

export const isAbort = error => error.name === "AbortError";

/** Return the error to show for one that the browser threw, in whose words the reader finds no way out. */
function worded(error, begun) {
  if (isAbort(error) || error instanceof ServerError) return error;
  const message = begun
    ? "The connection broke off before the answer was complete. Ask again."
    : `The server at ${location.host} does not answer. Start it again, or check the network; nothing here is lost.`;
  return new ServerError(0, { message, code: "no_answer" });
}

async function send(method, path, { body, signal, type = "application/json" } = {}) {
  const headers = storedKey() ? { Authorization: `Bearer ${storedKey()}` } : {};
  if (body !== undefined) headers["Content-Type"] = type;
  const answer = await fetch(path, { method, headers, signal, body }).catch(error => { throw worded(error) });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  if (answer.status === 401) dispatchEvent(new CustomEvent("key-needed"));
  throw new ServerError(answer.status, told.error || { message: `The server answers ${answer.status}, without a reason.` });
}

export const get = async path => (await send("GET", path)).json();
export const text = async path => (await send("GET", path)).text();
export const post = async (path, body, signal) => (await send("POST", path, { body: JSON.stringify(body), signal })).json();
export const postFile = async (path, file, signal) => (await send("POST", path, { body: file, signal, type: "application/octet-stream" })).json();
export const remove = async path => (await send("DELETE", path)).json();

/** Yield the chunks of a streamed answer. Throws the error that one ends with, also one that ends too early. */
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, { body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(error => { throw worded(error, true) });
    if (done) throw worded(new Error(), true); // as where a proxy in between gave up
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ServerError(500, chunk.error);
      yield chunk;
    }
  }
}
