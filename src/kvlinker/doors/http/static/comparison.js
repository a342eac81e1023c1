/** The full computation beside a linked answer: both texts, both times, and where they differ. */

import { by, counted, make, milliseconds, number, usedTokens } from "./dom.js";

const MOST_WORDS = 600; // beyond, only the common beginning is looked for

/** Show an answer beside the full one, which is a promise. */
export async function compare(linked, full, policy) {
  by("comparison").replaceChildren(make("p", { className: "faint" }, "Computing everything …"));
  let whole;
  try {
    whole = await full;
  } catch (error) {
    by("comparison").replaceChildren(make("p", { className: "wrong" }, error.message));
    return;
  }
  const [ours, theirs, at] = differences(wordsOf(linked.text), wordsOf(whole.text));
  const verdict = at < 0 ? "Both answers are the same, word for word." : `The answers differ from word ${at + 1} on.`;
  const ratio = whole.first / linked.first;
  const faster = ratio >= 1 ? `The linked one began ${ratio.toFixed(1)}× sooner.` : `The full one began ${(1 / ratio).toFixed(1)}× sooner.`;
  by("comparison").replaceChildren(
    make("h3", {}, "Beside the full computation"),
    make("p", { className: "verdict" }, `${verdict} ${faster}`),
    make("div", { className: "columns" }, side(policy || "linked", linked, ours), side("full", whole, theirs)),
  );
  by("comparison").scrollIntoView({ block: "nearest" });
}

function side(name, answer, words) {
  const tokens = usedTokens(answer.usage);
  const computed = tokens.recomputed + tokens.fresh;
  return make(
    "div", { className: "side" }, make("h3", {}, name),
    make("p", { className: "answered" }, ...words.map(([word, differs]) => (differs ? make("mark", {}, word) : word))),
    make("p", { className: "figures faint" }, `first token after ${milliseconds(answer.first)}, all after ${milliseconds(answer.whole)}; computed ${number(computed)} of ${counted(answer.usage.prompt_tokens, "prompt token")}`),
  );
}

const wordsOf = text => text.split(/(?<=\s)(?=\S)/);

/** Return the words of both texts, each with whether it is one's own alone, and the first word that differs, or -1. */
function differences(one, other) {
  let at = one.findIndex((word, index) => word !== other[index]);
  if (at < 0 && one.length !== other.length) at = one.length;
  const common = at < 0 ? one.map((_, index) => [index, index]) : commonWords(one, other, at);
  const [kept, keptToo] = [0, 1].map(side => new Set(common.map(pair => pair[side])));
  return [one.map((word, index) => [word, !kept.has(index)]), other.map((word, index) => [word, !keptToo.has(index)]), at];
}

/** Return the pairs of indices of the longest common subsequence; the texts are alike up to `at`. */
function commonWords(one, other, at) {
  const pairs = Array.from({ length: at }, (_, index) => [index, index]);
  const [rows, columns] = [one.length - at, other.length - at];
  if (Math.max(rows, columns) > MOST_WORDS) return pairs;
  const longest = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
  for (let row = rows - 1; row >= 0; row--) {
    for (let column = columns - 1; column >= 0; column--) {
      const alike = one[at + row] === other[at + column];
      longest[row][column] = alike ? longest[row + 1][column + 1] + 1 : Math.max(longest[row + 1][column], longest[row][column + 1]);
    }
  }
  for (let row = 0, column = 0; row < rows && column < columns;) {
    if (one[at + row] === other[at + column]) pairs.push([at + row++, at + column++]);
    else if (longest[row + 1][column] >= longest[row][column + 1]) row++;
    else column++;
  }
  return pairs;
}
