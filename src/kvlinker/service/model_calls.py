"""The calls of an LLM about its model and about texts: window, load, tiers, policies; splitting,
encoding and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.base.types.texts import Piece
from kvlinker.engines.contract.contract import EngineLoad
from kvlinker.linking import Policy, describe_policies
from kvlinker.prompting.segments import Prompt
from kvlinker.prompting.splitting import split_text
from kvlinker.service.embedding import EmbeddingInput, embedder_of
from kvlinker.service.startup import Parts
from kvlinker.store import TierUsage

PREFILL_TOKENS = 1024
"""The length of the prompt whose rate ``LLM.prefill_rate`` returns."""

FINGERPRINT_CHARACTERS = 12
"""The characters of the model's fingerprint that answers have."""


class ModelCalls(Parts):
    """The calls of ``LLM`` that start no request."""

    @cached_property
    def system_fingerprint(self) -> str:
        """A name for the source of the server's answers: kvlinker's version, and the beginning of
        the model's fingerprint."""
        return f"kvlinker-{version('kvlinker')}-{self.engine.fingerprint[:FINGERPRINT_CHARACTERS]}"

    @property
    def max_model_len(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return self.engine.max_model_len

    @property
    def healthy(self) -> bool:
        """False once the engine was closed or has failed for good."""
        return self.engine.healthy

    def current_load(self) -> EngineLoad:
        """Return the engine's load."""
        return self.engine.current_load()

    def prefill_rate(self) -> float | None:
        """Return the tokens per second of a prompt of ``PREFILL_TOKENS``; None if nothing was
        computed yet."""
        seconds = self.engine.prefill_seconds(PREFILL_TOKENS)
        return PREFILL_TOKENS / seconds if seconds else None

    def tiers(self) -> tuple[TierUsage, ...]:
        """Return the fill level of each tier of the store, from the fastest to the slowest; a
        remote one may answer slowly."""
        return self.store.usage()

    def bandwidths(self) -> dict[str, float]:
        """Return the bytes per second that tiers deliver, by name, for those that were measured."""
        return self.store.bandwidths.known()

    def spilled_bytes(self) -> int:
        """Return the bytes of prefixes that the engine keeps on disk, in addition to those of
        chunks."""
        return self.store.spilled_bytes

    def held_bytes(self) -> int:
        """Return the bytes of the chunks that requests hold in memory until they end."""
        return self.store.held_bytes

    def default_policy(self, tenant: str = DEFAULT_TENANT) -> Policy:
        """Return the policy of the tenant's requests that name none: the settings', or the one that
        keeps their quality target."""
        return self.policy_manager.default_policy(tenant)

    def policies(self) -> tuple[dict[str, Any], ...]:
        """Describe all linking policies, sorted by name, as JSON, and which ones this engine
        supports."""
        return describe_policies(self.engine.unsupported)

    def split(
        self, text: str, *, method: str = "passage", max_tokens: int = 512
    ) -> tuple[str, ...]:
        """Cut a text into chunks (EPIC's KVSplit); joined, they are the text again."""
        return tuple(
            piece.text for piece in self.split_pieces(text, method=method, max_tokens=max_tokens)
        )

    def split_pieces(
        self,
        text: str,
        *,
        method: str = "passage",
        max_tokens: int = 512,
        most_pieces: int | None = None,
    ) -> tuple[Piece, ...]:
        """Cut a text into chunks as ``split`` does, with the beginning of each and the number of
        its tokens. Raises InvalidRequestError for one that makes more than ``most_pieces``."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"'text' is {text!r}, but must be a text.", param="text")
        return split_text(
            text,
            tokenizer=self.builder.encoder,
            method=method,
            max_tokens=max_tokens,
            most_pieces=most_pieces,
        )

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Encode a text as a chunk's: no special tokens are added, and those that it spells are
        plain text.

        Raises InvalidRequestError if the tokenizer cannot write such a text, and ContextLengthError
        for one that is far too long for the model.
        """
        return self.builder.token_ids(text, param="text")

    def embed(
        self, texts: EmbeddingInput | Sequence[EmbeddingInput], *, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """Return the vectors [texts, dimensions] of texts, or of token ids of the embedding model,
        each of length 1: all dimensions, or the first ones. A text alone is one of a list.

        Raises ModelNotFoundError without the setting ``embedding_model``, and InvalidRequestError.
        """
        alone = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        inputs = cast(Sequence[EmbeddingInput], [texts] if alone else texts)
        return embedder_of(self.embedder).embed(inputs, dimensions=dimensions)

    def token_text(self, token_id: int) -> str:
        """Decode a token alone."""
        text: str = self.tokenizer.decode([token_id])
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token alone, which may be a part of a character's."""
        return self.builder.encoder.token_bytes(token_id)

    def decode_ids(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, special tokens included. Raises InvalidRequestError (``tokens``) for
        ids outside the vocabulary."""
        ids = self.builder.checked_ids(token_ids, param="tokens") if token_ids else ()
        text: str = self.tokenizer.decode(list(ids))
        return text

    def text_of(self, prompt: Prompt) -> str:
        """Decode a prompt, without special tokens."""
        text: str = self.tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=True)
        return text
