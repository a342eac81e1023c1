/** The requests that turns become. */

const MARKS = "\nEnd each sentence of the answer with the number of the passage that it is from, as in [1].";

/** Return the chunks that the turns up to one are about, in the order of their numbers, which begin at 1. */
export const numbered = turns => turns.flatMap(({ chunks }) => chunks);

const said = (turn, known) => [asked(turn, known), { role: "assistant", content: turn.answer.text }];

/** Return the message that asks a turn's question; `known` is how many chunks come before its own. */
function asked({ chunks, question, settings: { cites } }, known) {
  const parts = chunks.flatMap(({ id, document, endsLine, gone }, index) => {
    if (gone) return [];
    const text = { type: "text", text: `[${known + index + 1}] ${document}\n` };
    return [...(cites ? [text] : []), { type: "context_cache", id }, ...(endsLine ? [] : [{ type: "text", text: "\n" }])];
  });
  if (!parts.length) return { role: "user", content: question };
  return { role: "user", content: [...parts, { type: "text", text: `Question: ${question}${cites ? MARKS : ""}` }] };
}

/** Return the body of the request for a turn behind others; those without an answer are left out. */
export function bodyOf(before, turn) {
  const { system, temperature, maxTokens, policy } = turn.settings;
  let known = 0;
  const messages = [...before, turn].flatMap(each => {
    const begin = known;
    known += each.chunks.length;
    if (each === turn) return [asked(each, begin)];
    return each.answer.text ? said(each, begin) : [];
  });
  return {
    model: "default",
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    max_tokens: maxTokens,
    temperature,
    ...(policy ? { link: { policy } } : {}),
  };
}
