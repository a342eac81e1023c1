"""Grammars that answers have to follow, as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar that an answer follows from its first token to its last."""

    kind: Literal["json", "regex", "choice", "grammar"]
    """The notation of ``source``, by vLLM's names."""

    source: str
    """The JSON schema, the regular expression that the whole answer matches, the JSON list of texts of which it is one,
    or the grammar in the notation of Lark or of GBNF."""

    param: str = "grammar"
    """The field of the request that it comes from, which errors name."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, param: str = "grammar") -> Self:
        """Make the grammar of the JSON texts that are valid under ``schema``."""
        return cls("json", json.dumps(schema), param)

    @classmethod
    def json_object(cls, *, param: str = "grammar") -> Self:
        """Make the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"}, param=param)

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "grammar") -> Self:
        """Make the grammar whose answers are ``texts``."""
        return cls("choice", json.dumps(list(texts)), param)
