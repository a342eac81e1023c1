/** The choice of a linking policy: its family, and fields for its parameters. */

import { get } from "./api.js";
import { by, make } from "./dom.js";

const OTHER = "other";
const STARTS = { percent: 15, tokens: 16 };

let policies = [];

export async function startPolicies() {
  const told = await get("v1/policies");
  policies = told.data.filter(policy => policy.supported);
  const before = by("policy").value;
  by("policy").replaceChildren(
    make("option", { value: "" }, `the server's (${told.default})`),
    ...policies.map(({ name }) => make("option", { value: name }, name)),
    make("option", { value: OTHER }, "another, by name"),
  );
  by("policy").value = before;
  by("policy").onchange = showParameters;
  showParameters();
}

function showParameters() {
  const name = by("policy").value;
  const policy = policies.find(each => each.name === name);
  by("policy-meaning").textContent = policy ? policy.description : "";
  by("parameters").replaceChildren(...(name === OTHER ? [nameField()] : (policy?.parameters || []).map(field)));
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
