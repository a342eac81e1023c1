/** The requests that are being answered, and the last ones that were: whose, how their prompts were computed, and how fast. */

import { by, duration, make, milliseconds, number } from "../base/dom.js";

const SHORT = 10; // characters of a tenant's name, which is a key's hash

/** Show the running and the recent requests of a server's status. */
export function showRequests({ running, recent }) {
  const now = Date.now() / 1000;
  by("requests-none").hidden = running.length + recent.length > 0;
  by("requests").hidden = !by("requests-none").hidden;
  by("requests").tBodies[0].replaceChildren(
    ...running.map(each => row(each.tenant, [
      `for ${duration(each.seconds)}`, each.policy, number(each.prompt_tokens), "", "", "", "", "", number(each.output_tokens), "",
    ], "running")),
    ...recent.map(each => row(each.tenant, [
      `${duration(Math.max(1, now - each.at))} ago`, each.policy, number(each.cached + each.recomputed + each.fresh),
      number(each.cached), number(each.recomputed), number(each.fresh), number(each.reusable),
      each.ttft_ms === null ? "–" : milliseconds(each.ttft_ms), number(each.output_tokens),
      each.tokens_per_second === null ? "–" : number(Math.round(each.tokens_per_second)),
    ])),
  );
}

function row(tenant, cells, className = "") {
  return make("tr", { className }, make("td", { title: tenant }, tenant.slice(0, SHORT)), ...cells.map(cell => make("td", {}, cell)));
}
