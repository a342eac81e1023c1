/** Shows a turn's request as code, which gives the same answer outside of the page. */

import { storedKey } from "../base/api.js";
import { closeBeside } from "../base/dialogs.js";
import { by, copy } from "../base/dom.js";
import { startTabs } from "../base/tabs.js";
import { current } from "./conversations.js";
import { bodyOf } from "./requests.js";

const KEY = "KVLINKER_API_KEY";

let body = null;
let showTab = null;

export function startCode() {
  showTab = startTabs(by("code-tabs"));
  by("code-tabs").addEventListener("shown", ({ detail }) => { by("code-text").textContent = WRITERS[detail](body) });
  by("copy-code").addEventListener("click", ({ target }) => copy(by("code-text").textContent, target));
  closeBeside(by("code"));
}

/** Show the code of a turn of the shown conversation. */
export function showCode(turn) {
  body = bodyOf(current.turns.slice(0, current.turns.indexOf(turn)), turn);
  by("code").showModal();
  showTab(by("code-tabs").querySelector("[role=tab]"));
}

const WRITERS = { "code-openai": asOpenAI, "code-curl": asCurl, "code-kvlinker": asKVLinker };

const address = () => location.href.replace(/[#?].*/, "").replace(/\/$/, "");

/** Return a JSON value as Python writes it. */
function python(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const entries = Array.isArray(value)
    ? value.map(each => python(each, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, inner)}`);
  const line = `${open}${entries.join(", ")}${close}`;
  return line.length + indent.length < 80 && !line.includes("\n") ? line : `${open}\n${entries.map(entry => `${inner}${entry},\n`).join("")}${indent}${close}`;
}

const call = fields => Object.entries(fields).map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("");

function asOpenAI() {
  const { link, ...fields } = body;
  const key = storedKey() ? `os.environ["${KEY}"]` : '"none"';
  return `${storedKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${address()}/v1", api_key=${key})
answer = client.chat.completions.create(
${call({ ...fields, ...(link ? { extra_body: { link } } : {}) })})
print(answer.choices[0].message.content)
`;
}

function asKVLinker() {
  const { model, link, messages, ...fields } = body;
  const key = storedKey() ? `, api_key=os.environ["${KEY}"]` : "";
  return `${storedKey() ? "import os\n\n" : ""}from kvlinker import Client

with Client("${address()}"${key}) as client:
    answer = client.chat_completion(
${call({ messages, ...link, ...fields }).replace(/^(?=.)/gm, "    ")}    )
print(answer.text)
`;
}

function asCurl() {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = storedKey() ? `  -H "Authorization: Bearer $${KEY}" \\\n` : "";
  return `curl ${address()}/v1/chat/completions \\
  -H "Content-Type: application/json" \\
${key}  -d '${text}'
`;
}
