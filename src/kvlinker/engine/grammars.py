"""Grammars as both engines take them: what is refused before any is compiled, and one notation for all kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from kvlinker.errors import InvalidRequestError
from kvlinker.types.grammars import AnswerGrammar, json_style

MOST_CHARACTERS = 1_000_000
"""The most characters of a grammar."""

_NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def check_enforceable(grammar: AnswerGrammar) -> None:
    """Check what compilers of grammars do not. Raises InvalidRequestError, which names the cause."""
    if len(grammar.source) > MOST_CHARACTERS:
        raise InvalidRequestError(
            f"The grammar has {len(grammar.source):,} characters; at most {MOST_CHARACTERS:,} are taken.",
            param=grammar.param,
        )
    try:
        repeats = any(map(_counts_names, _schemas(grammar)))
    except ValueError as error:
        raise unenforceable(grammar, str(error)) from error
    except RecursionError as error:
        raise unenforceable(grammar, "it is nested too deeply") from error
    if repeats:
        raise unenforceable(grammar, "minProperties above 1 cannot be, since names may come twice")


def unenforceable(grammar: AnswerGrammar, cause: str) -> InvalidRequestError:
    """Return the error of a grammar that answers cannot be made to follow."""
    name = _NAMES.get(grammar.kind, grammar.kind)
    return InvalidRequestError(f"This {name} cannot be enforced: {cause}", param=grammar.param)


def as_lark(grammar: AnswerGrammar) -> str:
    """Return the grammar, and the frame around it, as one text in llguidance's dialect of Lark.

    Raises InvalidRequestError for one in GBNF that cannot be read.
    """
    if grammar.kind == "lark":
        return grammar.source
    start = grammar.frame.replace("@answer", "answer", 1) or "start: answer\n"
    return start + _answer_rule(grammar)


def _answer_rule(grammar: AnswerGrammar) -> str:
    """Return the rule ``answer``, and the terminal that it may need."""
    source = grammar.source
    match grammar.kind:
        case "json":
            schema = json.loads(source)
            styled = {**schema, "x-guidance": json_style()} if isinstance(schema, dict) else schema
            return f"answer: %json {json.dumps(styled)}\n"
        case "choice":
            return f"answer: {' | '.join(map(json.dumps, json.loads(source)))}\n"
        case "regex":
            return f"answer: ANSWER\nANSWER: /(?:{_between_slashes(source)})/\n"
    try:
        nested = any_to_lark(source)
    except Exception as error:  # the converter raises plain exceptions
        raise unenforceable(grammar, str(error)) from error
    return f"answer: %lark {{\n{nested}\n}}\n"


def _between_slashes(pattern: str) -> str:
    """Return a regular expression as it is written between slashes, on one line."""
    escaped = re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\\\n", r"\n").replace("\n", r"\n")


def _schemas(grammar: AnswerGrammar) -> Iterator[Any]:
    """Yield the JSON schemas in a grammar: the one that it is, or those of calls of tools, which stand in it behind
    ``%json``. Raises ValueError for one that is no JSON."""
    if grammar.kind == "json":
        yield json.loads(grammar.source)
    for text in (grammar.frame, grammar.source if grammar.kind in ("lark", "grammar") else ""):
        for found in re.finditer(r"%json\s*", text):
            with suppress(ValueError):  # the compiler says what is wrong there
                yield json.JSONDecoder().raw_decode(text, found.end())[0]


def _counts_names(schema: Any) -> bool:
    """Return whether a schema asks for several properties, whichever: grammars do not keep two from having one
    name."""
    if isinstance(schema, dict):
        least = schema.get("minProperties")
        return (isinstance(least, int | float) and least > 1) or any(map(_counts_names, schema.values()))
    return isinstance(schema, list) and any(map(_counts_names, schema))
