/** The requests that turns become. */

const said = turn => [asked(turn), { role: "assistant", content: turn.answer.text }];

function asked({ chunks, question }) {
  const present = chunks.filter(({ gone }) => !gone);
  if (!present.length) return { role: "user", content: question };
  const parts = present.flatMap(({ id, endsLine }) => {
    const chunk = { type: "context_cache", id };
    return endsLine ? [chunk] : [chunk, { type: "text", text: "\n" }];
  });
  return { role: "user", content: [...parts, { type: "text", text: `Question: ${question}` }] };
}

/** Return the body of the request for a turn behind others; those without an answer are left out. */
export function bodyOf(before, turn) {
  const { system, temperature, maxTokens, policy } = turn.settings;
  return {
    model: "default",
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.filter(({ answer }) => answer.text).flatMap(said),
      asked(turn),
    ],
    max_tokens: maxTokens,
    temperature,
    ...(policy ? { link: { policy } } : {}),
  };
}
