/** Where two texts differ, word by word. */

const MOST_WORDS = 600; // beyond, only the common beginning is looked for

export const wordsOf = text => text.split(/(?<=\s)(?=\S)/);

/** Return the words of both texts, each with whether it is one's own alone, and the first word that differs, or -1. */
export function differences(one, other) {
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
