/** Shows what /openapi.json says. */

const element = (tag, ...content) => { const made = document.createElement(tag); made.append(...content); return made };
const named = (name, made) => Object.assign(made, { className: name });
let schemas = {};

const nameOf = schema => schema.$ref && schema.$ref.split("/").pop();
const resolve = schema => schema.$ref ? schemas[nameOf(schema)] : schema;
const variants = schema => schema.anyOf || schema.oneOf;

/** Return what a schema takes, in a few words. */
function words(schema) {
  if (schema.$ref) return nameOf(schema);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" | ");
  if (variants(schema)) return variants(schema).map(words).join(" | ");
  if (schema.type === "array") return `[${words(schema.items || {})}, …]`;
  return schema.type || "anything";
}

/** Return the names of all schemas that a schema refers to by itself. */
function referred(schema) {
  if (schema.$ref) return [nameOf(schema)];
  return [...(variants(schema) || []), ...(schema.items ? [schema.items] : [])].flatMap(referred);
}

/** Return an element that tells the fields of a schema; those of schemas inside are told once they are asked for. */
function told(schema) {
  const whole = resolve(schema);
  const fields = element("dl");
  for (const [name, field] of Object.entries(whole.properties || {})) {
    const needed = (whole.required || []).includes(name) ? " *" : "";
    const meaning = element("dd", words(field), field.description ? `. ${field.description}` : "");
    for (const inner of new Set(referred(field))) meaning.append(folded(inner, { $ref: `#/${inner}` }));
    fields.append(element("dt", element("code", name), needed), meaning);
  }
  const parts = element("div", element("p", whole.description || ""), fields);
  if (!whole.properties) for (const inner of new Set(referred(whole))) parts.append(folded(inner, { $ref: `#/${inner}` }));
  return parts;
}

function folded(title, schema) {
  const made = element("details", element("summary", element("small", title)));
  made.addEventListener("toggle", () => { if (made.children.length === 1) made.append(told(schema)) }, { once: true });
  return made;
}

function operation(method, path, described) {
  const inside = [element("p", described.description || "")];
  if (described.parameters) {
    const list = described.parameters.flatMap(({ name, in: place, schema, description }) =>
      [element("dt", element("code", name)), element("dd", `${place}: ${words(schema)}`, description ? `. ${description}` : "")]);
    inside.push(element("h3", "Parameters"), element("dl", ...list));
  }
  for (const { schema } of Object.values(described.requestBody?.content || {}))
    inside.push(element("h3", "Body"), told(schema));
  inside.push(element("h3", "Answers"));
  for (const [status, answer] of Object.entries(described.responses)) {
    inside.push(element("p", element("code", status), ` ${answer.description || ""}`));
    for (const [kind, { schema }] of Object.entries(answer.content || {}))
      if (schema) inside.push(folded(`${kind}: ${words(schema)}`, schema));
  }
  const summary = element("summary", element("b", method.toUpperCase()), element("code", path), ` ${described.summary || ""}`);
  return named("operation", element("details", summary, ...inside));
}

function show(document) {
  schemas = document.components.schemas;
  const page = window.document.getElementById("page");
  page.firstChild.textContent = `${document.info.title} ${document.info.version}`;
  window.document.getElementById("intro").firstChild.textContent = "All routes, as told by ";
  window.document.getElementById("intro").lastChild.textContent = ".";
  const byTag = {};
  for (const [path, methods] of Object.entries(document.paths))
    for (const [method, described] of Object.entries(methods))
      (byTag[described.tags?.[0] || "others"] ||= []).push(operation(method, path, described));
  for (const [tag, operations] of Object.entries(byTag)) page.append(element("h2", tag), ...operations);
}

fetch("openapi.json").then(answer => answer.json()).then(show).catch(() => {
  document.getElementById("intro").textContent = "The server does not answer.";
});
