/** How questions are asked: system prompt, temperature, length, policy, and chunks to find; in one drawer. */

import { by, counted } from "../base/dom.js";
import { closeBeside } from "../base/dialogs.js";
import { chosenPolicy, policyInForce, usePolicy } from "./policies.js";

const within = (id, usual) => {
  const { value, valueAsNumber, min, max } = by(id);
  return value === "" ? usual : Math.min(Number(max || Infinity), Math.max(Number(min), valueAsNumber));
};

/** The least parameters of models that name their sources when they are asked to; smaller ones lose their thread over it. */
const LEAST_PARAMETERS = 1e9;

let window_ = 4096; // the model's, as soon as the server has told it
let isChosen = false; // whether the reader has said if sources are to be named

const usualTokens = () => Math.ceil(window_ / 4);

/** Return what the drawer says: {system, temperature, maxTokens, policy, limit, cites}; no policy means the server's. */
export const settings = () => ({
  system: by("system").value.trim(),
  temperature: within("temperature", 0),
  maxTokens: Math.round(within("answer-tokens", usualTokens())),
  policy: chosenPolicy(),
  limit: by("retrieve").checked ? Math.round(within("limit", 4)) : 0,
  cites: by("cites").checked,
});

/** Put into the drawer what an earlier conversation was asked with. */
export function useSettings({ system, temperature, maxTokens, policy, limit, cites = false }) {
  by("system").value = system;
  by("temperature").value = temperature;
  by("answer-tokens").value = maxTokens === usualTokens() ? "" : maxTokens;
  by("cites").checked = cites;
  isChosen = true;
  by("retrieve").checked = limit > 0;
  if (limit) by("limit").value = limit;
  usePolicy(policy);
  summarize();
}

export function startSettings() {
  by("show-settings").addEventListener("click", () => by("settings").showModal());
  closeBeside(by("settings"));
  by("settings").addEventListener("input", summarize);
  by("settings").addEventListener("close", () => { summarize(); by("question").focus() });
  by("cites").addEventListener("change", () => { isChosen = true });
  addEventListener("policies", summarize);
  addEventListener("status", ({ detail }) => useModel(detail));
}

/** Take a model's own settings: an answer takes up to a quarter of the window, so that the prompt has room. */
function useModel({ max_model_len: window, parameters }) {
  window_ = window;
  by("answer-tokens").placeholder = usualTokens();
  if (!isChosen) by("cites").checked = parameters >= LEAST_PARAMETERS;
  summarize();
}

function summarize() {
  const { system, temperature, maxTokens, limit, cites } = settings();
  by("settings-summary").textContent = [
    policyInForce(), `temperature ${temperature}`, `up to ${counted(maxTokens, "token")}`,
    limit ? `finds up to ${counted(limit, "chunk")}` : "only ticked chunks", ...(cites ? ["names sources"] : []), ...(system ? ["a system prompt"] : []),
  ].join(" · ");
}
