/** The server's figures, renewed every few seconds: load, tiers, audit, metrics. */

import { get, text } from "../base/api.js";
import { by, bytes, counted, fillBar, legendOf, make, milliseconds, number, percent } from "../base/dom.js";
import { sample } from "./charts.js";
import { showRequests } from "./requests.js";

const EVERY = 3000;

let unreachable = false; // until it answers again, the notice says so

export function startStatus(tell) {
  by("metrics").addEventListener("toggle", () => { if (by("metrics").open) refresh(tell) });
  const renew = async () => {
    if (!document.hidden) await refresh(tell);
    setTimeout(renew, EVERY);
  };
  renew();
}

/** Read all figures once; `tell` gets what keeps the server from telling them, or nothing. */
export async function refresh(tell) {
  try {
    const status = await get("status");
    dispatchEvent(new CustomEvent("status", { detail: status }));
    showStatus(status);
    showAudit(await get("v1/audit"));
    await refreshMetrics(status);
    if (unreachable) tell("");
    unreachable = false;
  } catch (error) {
    unreachable = error.status === 0;
    if (error.status !== 401) tell(error.message);
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
    "tr", {}, make("td", {}, each.id), make("td", { className: each.state === "dead" ? "wrong" : "", title: each.reason || "" },
      each.role === "build" ? `${each.state}, builds` : each.state),
    make("td", {}, number(each.running)), make("td", {}, number(each.waiting)), make("td", {}, number(each.resident_chunks)),
  )));
  dispatchEvent(new CustomEvent("replicas", { detail: replicas.length }));
}

function showStatus(status) {
  showReplicas(status.replicas);
  showRequests(status);
  by("load").replaceChildren(...lines(
    ["running", number(status.requests.running)], ["waiting", number(status.requests.waiting)],
    ["answered", number(status.requests.finished)], ["output tokens", number(status.output_tokens)],
    ["KV slots in use", `${number(status.kv_slots.used)} of ${number(status.kv_slots.total)}`],
  ));
  filled(by("slots"), status.kv_slots.used, status.kv_slots.total);
  by("reusable").hidden = !status.reusable_tokens;
  by("reusable").textContent = `${counted(status.reusable_tokens, "fresh token")} stood in earlier prompts at another place: --implicit auto finds them.`;
  fillBar(by("reuse"), status.prompt_tokens);
  by("reuse-legend").replaceChildren(...legendOf(status.prompt_tokens));
  by("tiers").replaceChildren(...status.tiers.map(tier => make(
    "div", { className: "tier" },
    make("dl", {}, ...lines([`${tier.name}: ${counted(tier.chunks, "chunk")}`, `${bytes(tier.used_bytes)} of ${bytes(tier.budget_bytes)}`])),
    filled(make("div", { className: "bar" }), tier.used_bytes, tier.budget_bytes),
  )));
}

/** Say in a sentence what the audit found of the policy that answered most. */
function verdictOf({ share, pending, policies, setting }) {
  if (!share) return "The audit is off: nobody compares answers with the full computation. Start the server with --audit 1% to have one answer in a hundred compared.";
  const waiting = pending ? ` ${number(pending)} more wait to be compared.` : "";
  const target = setting.target === null ? "" : ` The target is ${percent(setting.target)}; to keep it, the default is ${setting.policy} now.`;
  if (!policies.length) return `${percent(share)} of the answers are compared with the full computation; none has been yet.${waiting}${target}`;
  const most = policies.reduce((one, other) => (other.samples > one.samples ? other : one));
  const { policy, samples, agreement, ci_low: low, ci_high: high } = most;
  return `Under ${policy}, ${percent(agreement)} of ${counted(samples, "compared answer")} begin as the full computation would (between ${percent(low)} and ${percent(high)} of all, most likely).${waiting}${target}`;
}

function showAudit(audit) {
  const { policies } = audit;
  by("audit-state").textContent = verdictOf(audit);
  by("audit").hidden = !policies.length;
  by("audit").tBodies[0].replaceChildren(...policies.map(row => make(
    "tr", {}, make("td", {}, row.policy), make("td", {}, number(row.samples)),
    make("td", {}, `${percent(row.agreement)} (${percent(row.ci_low)}–${percent(row.ci_high)})`), make("td", {}, percent(row.alike)),
  )));
}

/** Read the metrics for what they alone tell; all of them are shown where they are open. */
async function refreshMetrics(status) {
  const told = await text("metrics");
  const lines_ = told.split("\n").filter(line => line && !line.startsWith("#"));
  const of = name => lines_.filter(line => line.startsWith(name) && " {".includes(line[name.length]));
  const value = line => Number(line.split(" ").at(-1));
  const sum = name => of(name).reduce((total, line) => total + value(line), 0);
  const [seconds, count] = ["sum", "count"].map(part => sum(`kvlinker:time_to_first_token_seconds_${part}`));
  const hits = {};
  for (const line of of("kvlinker:chunk_lookups_total")) {
    const tier = line.match(/tier="(\w+)"/)?.[1];
    if (tier && tier !== "none" && line.includes('result="hit"')) hits[tier] = (hits[tier] || 0) + value(line);
  }
  const { cached, recomputed, fresh } = status.prompt_tokens;
  sample({ time: Date.now(), first: [seconds, count], output: status.output_tokens, prompt: cached + recomputed + fresh, hits });
  by("store").replaceChildren(...lines(
    ["first token, on average", count ? milliseconds((1000 * seconds) / count) : "–"],
    ["evicted chunks", number(sum("kvlinker:evictions_total"))],
  ));
  if (by("metrics").open) by("metrics").querySelector("pre").textContent = told;
}
