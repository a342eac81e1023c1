"""Refuses texts that cannot fit into a model's context window before they are encoded, which takes
time and memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.base.errors import ContextLengthError
from kvlinker.prompting.encoding import TextEncoder

LEAST_CHARACTERS = 32
"""The characters that a token is taken to stand for at the least: some tokenizers drop whitespace,
or write an unknown word as one token."""

SAMPLED_CHARACTERS = 16
"""The beginning of a long text that is encoded first, in characters for each token of the
window."""

SAMPLE_EXCESS = 2
"""The multiple of the window's tokens beyond which a beginning has its whole text refused: a text
has hardly fewer tokens than its beginning, but a tokenizer may merge across the cut."""


class LengthLimit:
    """Checks the texts of one prompt, or of one chunk, against a context window of ``max_tokens``
    tokens, in little time."""

    def __init__(self, encoder: TextEncoder, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.max_characters = max_tokens * max(encoder.longest_token, LEAST_CHARACTERS)
        self._encoder = encoder

    def check_texts(self, texts: Sequence[str], *, param: str) -> None:
        """Check texts that are to stand in the window together.

        Raises ContextLengthError for more characters than the window's tokens can stand for, and
        for a long text whose beginning alone has far too many tokens. Texts that pass may be too
        long all the same.
        """
        characters = sum(map(len, texts))
        if characters > self.max_characters:
            raise ContextLengthError(
                f"The text has {characters:,} characters; the context window of {self.max_tokens:,}"
                f" tokens takes at most {self.max_characters:,}. Shorten it, or split it into"
                " chunks.",
                param=param,
            ).exceeding(self.max_tokens * characters // self.max_characters + 1, self.max_tokens)
        sampled = self.max_tokens * SAMPLED_CHARACTERS
        for text in texts:
            if len(text) > sampled:
                tokens = self._encoder.count_roughly(text[:sampled])
                if tokens > self.max_tokens * SAMPLE_EXCESS:
                    raise ContextLengthError(
                        f"The text has {len(text):,} characters, of which the first {sampled:,}"
                        f" alone are {tokens:,} tokens; the context window takes"
                        f" {self.max_tokens:,}. Shorten it, or split it into chunks.",
                        param=param,
                    ).exceeding(tokens, self.max_tokens)

    def check_prompt(self, tokens: int) -> None:
        """Check the number of tokens of a whole prompt. Raises ContextLengthError."""
        if tokens > self.max_tokens:
            raise ContextLengthError(
                f"The prompt has {tokens:,} tokens; the context window takes {self.max_tokens:,}."
                " Shorten the prompt.",
                param="messages",
            ).exceeding(tokens, self.max_tokens)

    def check_ids(self, count: int, *, param: str) -> None:
        """Check the number of token ids of one prompt. Raises ContextLengthError."""
        if count > self.max_tokens:
            raise ContextLengthError(
                f"There are {count:,} token ids; the context window takes {self.max_tokens:,}. Send"
                " fewer.",
                param=param,
            )
