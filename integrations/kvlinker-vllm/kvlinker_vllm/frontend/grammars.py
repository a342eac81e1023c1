"""Gives grammars to vLLM, in the notation that its backend for structured outputs takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.engines.contract.grammars import as_lark, check_enforceable, unenforceable

GUIDANCE = "guidance"
"""vLLM's backend that is llguidance, as in the embedded engine: the only one that takes all of
kvlinker's grammars."""

MOST_CHECKED = 32
"""The number of grammars that are known to be valid, for requests that bring the same one again."""


class VLLMGrammars:
    """Checks grammars when their requests come, and writes them as vLLM takes them. Any thread may
    use it."""

    def __init__(self, client: Any) -> None:
        """``client`` is vLLM's engine client, which knows the tokenizer and the backend."""
        self._client = client
        self._preparing = threading.Lock()
        self._checked = lru_cache(MOST_CHECKED)(self._check)

    @property
    def _backend(self) -> str:
        """The name of the backend that vLLM was started with."""
        return str(self._client.vllm_config.structured_outputs_config.backend)

    def prepare(self, grammar: AnswerGrammar) -> dict[str, Any]:
        """Return the fields of vLLM's ``StructuredOutputsParams``.

        Raises InvalidRequestError, which names the cause, for a grammar that is invalid or cannot
        be enforced. Takes up to a second when called first, and some milliseconds for a grammar
        that is new.
        """
        if self._backend == GUIDANCE:
            return {"grammar": self._checked(grammar)}
        if grammar.kind == "lark" or grammar.frame:
            raise InvalidRequestError(
                f"vLLM was started with the backend {self._backend!r} for structured outputs, which"
                " cannot enforce "
                "calls of tools, nor forms of answers with calls or after reasoning. Start it"
                " with "
                f'{{"backend": "{GUIDANCE}"}} as its structured_outputs_config.',
                param="tool_choice" if grammar.kind == "lark" else grammar.param,
            )
        check_enforceable(grammar)
        return {
            grammar.kind: json.loads(grammar.source) if grammar.kind == "choice" else grammar.source
        }

    def is_complete(self, grammar: AnswerGrammar, tokens: Sequence[int]) -> bool:
        """Return whether an answer of these tokens ends as its grammar does, so that nothing may
        follow it. Backends other than ``guidance`` do not report it."""
        if self._backend != GUIDANCE:
            return False
        lark = LLMatcher.grammar_from_lark(self._checked(grammar))
        matcher = LLMatcher(self._tokenizer, lark)
        return bool(matcher.consume_tokens(list(tokens)) and matcher.is_stopped())

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, which takes up to a second to make."""
        tokenizer = self._client.get_tokenizer()
        return from_tokenizer(
            tokenizer, max(self._client.vllm_config.model_config.get_vocab_size(), len(tokenizer))
        )

    def _check(self, grammar: AnswerGrammar) -> str:
        check_enforceable(grammar)
        with self._preparing:
            tokenizer = self._tokenizer
        try:
            lark = as_lark(grammar)
            error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark), tokenizer)
        except ValueError as cause:
            raise unenforceable(grammar, str(cause)) from cause
        except RecursionError as cause:
            raise unenforceable(grammar, "it is nested too deeply") from cause
        if error:
            raise unenforceable(grammar, error)
        return lark
