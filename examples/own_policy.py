"""A linking policy of one's own: recompute the tokens at the end of each chunk, and see what that
costs."""

import numpy as np
from numpy.typing import NDArray

from kvlinker import LLM
from kvlinker.linking import Evidence, Policy, number, register
from kvlinker.prompting.segments import Prompt


@register
class ChunkEnds(Policy):
    """The last k tokens of every chunk that does not stand where it was computed."""

    family = "chunk-ends"

    tokens: int = number("tokens", 1, 1024)

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for span in prompt.spans:
            if not span.exact:
                selected[max(span.end - self.tokens, span.start) : span.end] = True
        return selected


def main() -> None:
    with LLM() as llm:
        chunks = llm.generate_context_cache(
            ["Mira Holt lives in Varna.\n\n", "Tom Reyes lives in Oslo.\n\n"]
        )
        messages = [{"role": "user", "content": [*chunks, "Question: Where does Tom Reyes live?"]}]
        for policy in ("naive", "chunk-ends-4", "legolink-4+chunk-ends-4", "full"):
            answer = llm.chat_completion(messages, policy=policy, max_tokens=8, temperature=0)
            print(
                f"{policy:24} {answer.usage.recomputed_tokens:3} tokens recomputed: {answer.text}"
            )


if __name__ == "__main__":
    main()
