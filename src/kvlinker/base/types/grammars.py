"""Grammars that answers have to follow, as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from kvlinker.base.errors import InvalidRequestError

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar that an answer follows from its first token to its last."""

    kind: GrammarKind
    """The notation of ``source``, by vLLM's names; ``lark`` is llguidance's own, with special
    tokens."""

    source: str
    """The JSON schema, the regular expression that the whole answer matches, the JSON list of texts
    of which it is one, or the grammar in the notation of Lark or of GBNF."""

    param: str = "grammar"
    """The field of the request that it comes from, which errors name."""

    frame: str = ""
    """A grammar in the notation ``lark``, where ``@answer`` stands for the text that follows this
    grammar; empty if that is the whole answer."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, param: str = "grammar") -> Self:
        """Make the grammar of the JSON texts that are valid under ``schema``."""
        return cls("json", json.dumps(schema), param)

    @classmethod
    def json_object(cls, *, param: str = "grammar") -> Self:
        """Make the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"}, param=param)

    @classmethod
    def response_format(cls, form: Mapping[str, Any]) -> Self | None:
        """Make the grammar of a ``response_format``, as OpenAI's API has it; None if any text will
        do. Raises InvalidRequestError for a form that is not known."""
        param = "response_format"
        match form:
            case {"type": "text"}:
                return None
            case {"type": "json_object", "schema": Mapping() as schema}:
                return cls.json_schema({"type": "object", **schema}, param=f"{param}.schema")
            case {"type": "json_object"}:
                return cls.json_object(param=param)
            case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
                return cls.json_schema(schema, param=f"{param}.json_schema.schema")
        raise InvalidRequestError(
            f"'response_format' is {form!r}, but must be {{'type': 'text'}}, {{'type':"
            " 'json_object'}, or {'type': 'json_schema', 'json_schema': {'schema': …}}.",
            param=param,
        )

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "grammar") -> Self:
        """Make the grammar whose answers are ``texts``."""
        return cls("choice", json.dumps(list(texts)), param)

    @classmethod
    def tokens(cls, ids: Sequence[int], *, param: str = "grammar") -> Self:
        """Make the grammar whose one answer has these token ids."""
        return cls("lark", "start: " + " ".join(f"<[{token}]>" for token in ids), param)


def check_grammar(grammar: object) -> None:
    """Raise InvalidRequestError unless this is a grammar, or None."""
    if not isinstance(grammar, AnswerGrammar | None):
        raise InvalidRequestError(
            f"grammar is {grammar!r}, but must be an AnswerGrammar, such as"
            " AnswerGrammar.choice(['yes', 'no']).",
            param="grammar",
        )


def json_style(*, lenient: bool = False) -> dict[str, Any]:
    """Return llguidance's options for JSON: a space or an indented line between tokens, so that
    answers do not ramble on. Schemas that cannot be enforced are refused, even if they ask for less
    themselves; ``lenient``: parts that cannot be enforced are left out."""
    return {
        "whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,24}",
        "lenient": lenient,
        "coerce_one_of": lenient,
    }
