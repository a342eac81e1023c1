/** How questions are asked: system prompt, temperature, length, policy, and chunks to find; in one drawer. */

import { by, counted } from "../base/dom.js";
import { closeBeside } from "../base/dialogs.js";
import { chosenPolicy, policyInForce, usePolicy } from "./policies.js";

const within = (id, usual) => {
  const { value, valueAsNumber, min, max } = by(id);
  return value === "" ? usual : Math.min(Number(max || Infinity), Math.max(Number(min), valueAsNumber));
};

/** Return what the drawer says: {system, temperature, maxTokens, policy, limit}; no policy means the server's. */
export const settings = () => ({
  system: by("system").value.trim(),
  temperature: within("temperature", 0),
  maxTokens: Math.round(within("answer-tokens", 128)),
  policy: chosenPolicy(),
  limit: by("retrieve").checked ? Math.round(within("limit", 4)) : 0,
});

/** Put into the drawer what an earlier conversation was asked with. */
export function useSettings({ system, temperature, maxTokens, policy, limit }) {
  by("system").value = system;
  by("temperature").value = temperature;
  by("answer-tokens").value = maxTokens;
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
  addEventListener("policies", summarize);
}

function summarize() {
  const { system, temperature, maxTokens, limit } = settings();
  by("settings-summary").textContent = [
    policyInForce(), `temperature ${temperature}`, `up to ${counted(maxTokens, "token")}`,
    limit ? `finds up to ${counted(limit, "chunk")}` : "only ticked chunks", ...(system ? ["a system prompt"] : []),
  ].join(" · ");
}
