/** Talks to the server that the page comes from, with the key that the reader gave. */

const KEY = "apiKey";

export const storedKey = () => sessionStorage.getItem(KEY) || "";
export const storeKey = key => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** The server's answer to a request that it did not fulfil. */
export class ServerError extends Error {
  constructor(status, { message, code, param }) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

async function send(method, path, body, signal) {
  const headers = storedKey() ? { Authorization: `Bearer ${storedKey()}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  const error = new ServerError(answer.status, told.error || { message: `The server answers ${answer.status}.` });
  if (answer.status === 401) dispatchEvent(new CustomEvent("key-needed"));
  throw error;
}

export const get = async path => (await send("GET", path)).json();
export const text = async path => (await send("GET", path)).text();
export const post = async (path, body, signal) => (await send("POST", path, body, signal)).json();
export const remove = async path => (await send("DELETE", path)).json();

/** Yield the chunks of a streamed answer. Throws the error that one ends with. */
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ServerError(500, chunk.error);
      yield chunk;
    }
  }
}
