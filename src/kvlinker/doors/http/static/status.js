/** The server's figures, renewed every few seconds: load, tiers, audit, metrics. */

import { get, text } from "./api.js";
import { by, bytes, counted, fillBar, legendOf, make, milliseconds, number, percent } from "./dom.js";

const EVERY = 3000;

export function startStatus(tell) {
  by("metrics").addEventListener("toggle", () => { if (by("metrics").open) refreshMetrics(true) });
  const renew = async () => {
    if (!document.hidden) await refresh(tell);
    setTimeout(renew, EVERY);
  };
  renew();
}

/** Read all figures once; `tell` gets what keeps the server from telling them, or nothing. */
export async function refresh(tell) {
  try {
    showStatus(await get("status"));
    showAudit(await get("v1/audit"));
    await refreshMetrics(by("metrics").open);
    tell("");
  } catch (error) {
    tell(error.status === 401 ? "The server asks for an API key." : error.status ? error.message : "The server does not answer.");
  }
}

const lines = (...entries) => entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);

function filled(bar, used, total) {
  const part = make("i");
  part.style.width = `${total ? (100 * used) / total : 0}%`;
  bar.replaceChildren(part);
  return bar;
}

/** The replicas of a fleet, which its router tells; a server tells none. */
function showReplicas(replicas = []) {
  by("replicas").hidden = !replicas.length;
  by("replicas").tBodies[0].replaceChildren(...replicas.map(each => make(
    "tr", {}, make("td", {}, each.id), make("td", { className: each.state === "dead" ? "wrong" : "", title: each.reason || "" }, each.state),
    make("td", {}, number(each.running)), make("td", {}, number(each.waiting)), make("td", {}, number(each.resident_chunks)),
  )));
  dispatchEvent(new CustomEvent("replicas", { detail: replicas.length }));
}

function showStatus(status) {
  showReplicas(status.replicas);
  by("model").textContent = `${status.model}, ${number(status.max_model_len)} tokens of context, policy ${status.policy}`;
  by("load").replaceChildren(...lines(
    ["running", number(status.requests.running)], ["waiting", number(status.requests.waiting)],
    ["answered", number(status.requests.finished)], ["output tokens", number(status.output_tokens)],
    ["KV slots in use", `${number(status.kv_slots.used)} of ${number(status.kv_slots.total)}`],
  ));
  filled(by("slots"), status.kv_slots.used, status.kv_slots.total);
  fillBar(by("reuse"), status.prompt_tokens);
  by("reuse-legend").replaceChildren(...legendOf(status.prompt_tokens));
  by("tiers").replaceChildren(...status.tiers.map(tier => make(
    "div", { className: "tier" },
    make("dl", {}, ...lines([`${tier.name}: ${counted(tier.chunks, "chunk")}`, `${bytes(tier.used_bytes)} of ${bytes(tier.budget_bytes)}`])),
    filled(make("div", { className: "bar" }), tier.used_bytes, tier.budget_bytes),
  )));
}

function showAudit({ share, pending, policies, setting }) {
  const target = setting.target === null ? "" : ` It keeps ${percent(setting.target)} agreement; the default is ${setting.policy} now.`;
  by("audit-state").textContent = share
    ? `${percent(share)} of the answers are compared with the full computation; ${number(pending)} wait.${target}`
    : "Off. `kvlinker serve --audit 1%` compares one answer in a hundred with the full computation.";
  by("audit").hidden = !policies.length;
  by("audit").tBodies[0].replaceChildren(...policies.map(row => make(
    "tr", {}, make("td", {}, row.policy), make("td", {}, number(row.samples)),
    make("td", {}, `${percent(row.agreement)} (${percent(row.ci_low)}–${percent(row.ci_high)})`), make("td", {}, percent(row.alike)),
  )));
}

/** Read the metrics for what they alone tell; with `all`, show them as they are. */
async function refreshMetrics(all) {
  const told = await text("metrics");
  const sum = name => told.split("\n").reduce((total, line) => (line.startsWith(name) && " {".includes(line[name.length]) ? total + Number(line.split(" ").at(-1)) : total), 0);
  const [seconds, count] = ["sum", "count"].map(part => sum(`kvlinker:time_to_first_token_seconds_${part}`));
  by("store").replaceChildren(...lines(
    ["first token, on average", count ? milliseconds((1000 * seconds) / count) : "–"],
    ["evicted chunks", number(sum("kvlinker:evictions_total"))],
  ));
  if (all) by("metrics").querySelector("pre").textContent = told;
}
