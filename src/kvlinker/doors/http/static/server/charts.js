/** Charts of the last ten minutes, drawn from samples of the server's counters. */

import { by, make, milliseconds, number } from "../base/dom.js";

const SPAN = 600_000; // milliseconds
const KEPT = "samples";
const [WIDTH, HEIGHT] = [300, 80];
const STYLES = ["one", "two", "three", "four"];

let samples = JSON.parse(sessionStorage.getItem(KEPT) || "[]");

/** Add what the server's counters say now: {time, first: [seconds, count], output, prompt, hits: {tier: count}}. */
export function sample(counters) {
  if (samples.length && counters.output < samples.at(-1).output) samples = []; // the server began anew
  samples = [...samples.filter(({ time }) => time > counters.time - SPAN), counters];
  sessionStorage.setItem(KEPT, JSON.stringify(samples));
  draw();
}

const steps = of => samples.slice(1).map((after, index) => {
  const before = samples[index];
  return [after.time, of(before, after, (after.time - before.time) / 1000)];
});

function draw() {
  const tiers = Array.from(new Set(samples.flatMap(({ hits }) => Object.keys(hits))));
  const perSecond = value => `${value < 10 ? value.toFixed(1) : number(Math.round(value))}/s`;
  const rate = read => steps((before, after, seconds) => ((read(after) || 0) - (read(before) || 0)) / seconds);
  show("chart-first", "First token", milliseconds, {
    "mean of those that came": steps(({ first: [before, had] }, { first: [after, has] }) => (has > had ? (1000 * (after - before)) / (has - had) : null)),
  });
  show("chart-throughput", "Throughput", perSecond, { "prompt tokens": rate(({ prompt }) => prompt), "output tokens": rate(({ output }) => output) });
  show("chart-hits", "Chunks found, by tier", perSecond, Object.fromEntries(tiers.map(tier => [tier, rate(({ hits }) => hits[tier])])));
}

const svg = (tag, attributes, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

/** Show series of [time, value or null] by their names, with the largest and the last value in words. */
function show(id, title, words, series) {
  const values = Object.values(series).flat().map(([, value]) => value).filter(value => value !== null);
  const most = Math.max(...values, 0);
  const now = samples.at(-1).time;
  const x = time => WIDTH * (1 - (now - time) / SPAN);
  const y = value => HEIGHT - 2 - (HEIGHT - 6) * (most ? value / most : 0);
  const lines = Object.values(series).flatMap((points, index) => parted(points).map(part => svg("polyline", {
    class: `${STYLES[index % STYLES.length]}${part[0] === part.at(-1) ? " alone" : ""}`, points: part.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`).join(" "),
  })));
  const last = points => points.findLast(([, value]) => value !== null)?.[1];
  const told = Object.entries(series).map(([name, points]) => [name, last(points) === undefined ? "–" : words(last(points))]);
  by(id).replaceChildren(
    make("h3", {}, title),
    svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}: ${told.map(([name, value]) => `${name} ${value}`).join(", ") || "nothing yet"}; at most ${words(most)} in ten minutes`,
    }, svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }), ...lines),
    make("p", { className: "axis" }, make("span", {}, "10 min ago"), make("span", {}, values.length ? `at most ${words(most)}` : ""), make("span", {}, "now")),
    make("ul", { className: "legend" }, ...told.map(([name, value], index) => (
      make("li", {}, make("i", { className: `key ${STYLES[index % STYLES.length]}` }), `${name} ${value}`)
    ))),
  );
}

/** Return the parts of a series between its gaps; a point alone is there twice, for a line has two ends. */
function parted(points) {
  const parts = [[]];
  for (const point of points) {
    if (point[1] === null) parts.push([]); else parts.at(-1).push(point);
  }
  return parts.filter(part => part.length).map(part => (part.length > 1 ? part : [part[0], part[0]]));
}
