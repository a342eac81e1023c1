/** The model that is served, and others on the server's machine that can be loaded in its place. */

import { get, post } from "../base/api.js";
import { confirmed } from "../base/dialogs.js";
import { button, by, bytes, make, number } from "../base/dom.js";

const EVERY = 1000; // milliseconds between two looks at a model that is being loaded
const UNITS = [[1e9, "billion"], [1e6, "million"]];

let status = null; // the server's, as it was told last
let known = null; // what the server told of this machine's models; null where it tells nobody, or not this key

/** `reload` reads all that depends on the model. */
export function startModels(reload) {
  addEventListener("status", ({ detail }) => { status = detail; showFacts() });
  by("models").addEventListener("toggle", async () => {
    if (!by("models").open) return;
    known = await get("v1/models/known").catch(() => null);
    if (status) showFacts();
    showKnown(reload);
  });
  by("models").addEventListener("keydown", ({ key }) => { if (key === "Escape") { by("models").open = false; by("models").firstElementChild.focus() } });
  document.body.addEventListener("click", ({ target }) => { if (!target.closest("#models, dialog")) by("models").open = false });
}

function showFacts() {
  const { model, parameters, memory_bytes: memory, max_model_len: window, policy } = status;
  by("model").textContent = model;
  const loaded = known?.data.find(each => each.is_loaded);
  const [size, unit] = UNITS.find(([least]) => parameters >= least) || [1, ""];
  const facts = [
    ["weights", parameters ? `${number(Number((parameters / size).toPrecision(2)))} ${unit}` : "–"],
    ["format", loaded ? `${loaded.weights}, ${bytes(loaded.nbytes)}` : "–"],
    ["window", `${number(window)} tokens`],
    ["memory of the server", memory ? bytes(memory) : "–"],
    ["policy", policy],
  ];
  by("model-facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function showKnown(reload) {
  const others = known?.data.filter(each => !each.is_loaded) || [];
  by("other-models").hidden = !others.length;
  by("model-state").textContent = known?.failure || "";
  by("model-list").replaceChildren(...others.map(({ name, nbytes, weights, window }) => make(
    "li", {},
    make("span", { title: name }, name.split("/").slice(-2).join("/"), make("small", {}, [bytes(nbytes), weights, window && `${number(window)} tokens`].filter(Boolean).join(", "))),
    button("Load", () => load(name, reload), { ariaLabel: `Load ${name}` }),
  )));
}

/** Have another model loaded, and tell how far that is until it, or the one before, answers. */
async function load(name, reload) {
  if (!await confirmed(`Load ${name}? Answers that are under way are finished first; nobody is answered while it is loaded.`, "Load")) return;
  const tell = words => { by("model-state").textContent = words };
  try {
    await post("v1/models/load", { model: name });
    tell(`${name} is being loaded …`);
    for (let isReady = false; !isReady;) {
      await new Promise(done => setTimeout(done, EVERY));
      isReady = await get("v1/models/known").then(told => { known = told; return told.data.some(each => each.is_loaded && (each.name === name || told.failure)) }, error => {
        if (error.code === "model_loading") tell(error.message);
        return false;
      });
    }
    showKnown(reload);
    await reload();
    if (!known.failure) tell(`${name} is loaded. Documents that it has not read are to be added again.`);
  } catch (error) {
    tell(error.message);
  }
}
