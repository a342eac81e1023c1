/** The choice of a linking policy: its family, and fields for its parameters. */

import { get } from "../base/api.js";
import { by, make } from "../base/dom.js";

const OTHER = "other";
const LADDER = ["naive", "row", "row+query-2-sensitive", "row+query-5-sensitive", "row+query-15-sensitive", "row+query-40-sensitive", "full"];
const LADDER_ALONE = ["naive", "legolink-16", "query-2-sensitive", "query-5-sensitive", "query-15-sensitive", "query-40-sensitive", "full"];
const STARTS = { percent: 15, tokens: 16 };

let policies = [];
let usual = ""; // the name of the server's own
let auto = null; // how that is chosen, where it is

export async function startPolicies() {
  const told = await get("v1/policies");
  policies = told.data.filter(policy => policy.supported);
  usual = told.default;
  auto = told.auto;
  const before = by("policy").value;
  by("policy").replaceChildren(
    make("option", { value: "" }, `the server's (${told.default})`),
    ...policies.map(({ name }) => make("option", { value: name }, name)),
    make("option", { value: OTHER }, "another, by name"),
  );
  by("policy").value = before;
  by("policy").oninput = showParameters; // before the drawer sums up
  showParameters();
  dispatchEvent(new Event("policies"));
}

/** Return the names of policies that the slider goes through, from the cheapest to the full computation. */
export const ladder = () => (policies.some(({ name }) => name === "row") ? LADDER : LADDER_ALONE).filter(name => name.split("+").every(isOffered));

const isOffered = part => policies.some(({ name }) => part === name || part.startsWith(`${name}-`));

/** Return the name of the policy that the next question is linked under. */
export const policyInForce = () => chosenPolicy() || usual;

/** Choose a policy by its name; the server's own without one. */
export function usePolicy(name) {
  const value = name || "";
  const known = !value || policies.some(policy => policy.name === value && !policy.parameters.length);
  by("policy").value = known ? value : OTHER;
  showParameters();
  if (!known) by("policy-name").value = value;
  dispatchEvent(new Event("policies"));
}

function showParameters() {
  const name = by("policy").value;
  const policy = policies.find(each => each.name === name);
  by("policy-meaning").textContent = policy ? policy.description : name ? "" : choiceOfServer();
  by("parameters").replaceChildren(...(name === OTHER ? [nameField()] : (policy?.parameters || []).map(field)));
}

/** Say in a sentence why the server's own policy is the one that it is. */
function choiceOfServer() {
  if (!auto) return "";
  if (!auto.measured.length) return "Once the server has been idle for a while, it measures the policies with this model, and chooses the cheapest that is near enough to the full computation.";
  const figures = auto.measured.map(({ policy, answer_kl: kl }) => `${kl.toFixed(3)} with ${policy}`).join(", ");
  return `Measured with this model, answers differ from the full computation's by ${figures} (mean KL of a token). The cheapest policy that differs by at most ${auto.target} is chosen, or else full.`;
}

function nameField() {
  return make("label", {}, "Name ", make("input", { id: "policy-name", required: true, placeholder: "query-5+legolink-2" }));
}

function field(parameter) {
  const { name, meaning, type } = parameter;
  if (type === "choice") {
    const values = parameter.default === null ? ["", ...parameter.values] : parameter.values;
    const select = make("select", { name }, ...values.map(value => make("option", { value }, value || "–")));
    select.value = select.dataset.usual = parameter.default ?? "";
    return make("label", { title: meaning }, `${name} `, select);
  }
  const given = parameter.default === null && !parameter.prefix;
  const input = make("input", {
    name, type: "number", min: parameter.minimum, max: parameter.maximum, step: type === "integer" ? 1 : "any",
    required: given, value: given ? STARTS[meaning] || parameter.minimum || 1 : "",
  });
  input.dataset.prefix = parameter.prefix;
  return make("label", { title: meaning }, `${name} `, input);
}

/** Return the name of the chosen policy; undefined for the server's own. */
export function chosenPolicy() {
  const name = by("policy").value;
  if (name === OTHER) return by("policy-name").value.trim() || undefined;
  const fields = Array.from(by("parameters").querySelectorAll("input, select"));
  const given = fields.filter(({ value, dataset }) => value && value !== dataset.usual);
  return name ? [name, ...given.map(({ value, dataset }) => (dataset.prefix || "") + value)].join("-") : undefined;
}
