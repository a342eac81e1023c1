/** A conversation with its sources as one HTML file, which loads nothing and runs nothing. */

import { get } from "../base/api.js";
import { make } from "../base/dom.js";
import { CACHES } from "../documents/chosen.js";
import { numbered } from "./requests.js";

const POLICY = "default-src 'none'; style-src 'unsafe-inline'";
const STYLE = `
:root { color-scheme: light dark; --line: light-dark(#dfe3e8, #323843); --faint: light-dark(#5b6470, #9aa4b2) }
body { font: 16px/1.6 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; background: light-dark(#fff, #14171c) }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.5rem } small, .about { color: var(--faint) } a { color: light-dark(#2f5fc4, #8fb0ff) }
pre, .wide { overflow-x: auto } pre { border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem } code { font-family: ui-monospace, monospace; font-size: .9em }
table { border-collapse: collapse } th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--line) }
blockquote { margin: .4rem 0; padding-left: 1rem; border-left: 3px solid var(--line) } .passage { white-space: pre-wrap }
.code-keyword, .code-built_in { color: light-dark(#8250a8, #c9a0ef) } .code-string { color: light-dark(#1b7048, #7fd1a6) } .code-number, .code-literal { color: light-dark(#9a5b00, #f0b968) } .code-title { color: light-dark(#2f5fc4, #8fb0ff) } .code-comment { color: var(--faint); font-style: italic }
`;

/** Return the text of the file. `answers` are the elements that show the answers of the conversation's turns. */
export async function asPage({ title, turns }, answers) {
  const page = document.implementation.createHTMLDocument(title);
  const policy = make("meta", { httpEquiv: "Content-Security-Policy", content: POLICY });
  page.head.prepend(make("meta", { name: "viewport", content: "width=device-width, initial-scale=1" }), policy);
  policy.before(encoding());
  page.body.append(
    make("h1", {}, title),
    make("p", { className: "about" }, `A conversation of ${new Date().toLocaleDateString("en-GB", { dateStyle: "long" })}, kept by kvlinker.`),
    ...turns.flatMap((turn, index) => [make("h2", {}, turn.question), answer(answers[index])]),
    ...await sources(numbered(turns)),
  );
  const text = new XMLSerializer().serializeToString(page.documentElement);
  return `<!DOCTYPE html>\n${text.replace("</head>", () => `<style>${STYLE}</style>\n</head>`)}\n`; // this page's own policy lets no element have styles
}

function encoding() {
  const made = make("meta");
  made.setAttribute("charset", "utf-8");
  return made;
}

/** Return a copy of an answer in which marks lead to the sources, and there is nothing to press. */
function answer(shown) {
  const copy = shown.cloneNode(true);
  for (const mark of copy.querySelectorAll(".mark")) mark.replaceWith(make("a", { href: `#source-${mark.textContent.slice(1, -1)}` }, mark.textContent));
  for (const control of copy.querySelectorAll("button")) control.remove();
  for (const element of copy.querySelectorAll("[tabindex]")) element.removeAttribute("tabindex");
  return copy;
}

async function sources(chunks) {
  if (!chunks.length) return [];
  const entries = await Promise.all(chunks.map(async ({ id, title }, index) => {
    const text = await get(`${CACHES}/${id}/content`).then(told => told.text, () => "This passage is not there any more.");
    return make("div", { id: `source-${index + 1}` }, make("p", {}, `[${index + 1}] `, make("strong", {}, title)), make("blockquote", { className: "passage" }, text));
  }));
  return [make("h2", {}, "Sources"), ...entries];
}
