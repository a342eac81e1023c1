"""Grammars for both engines: checks before they are compiled, and one notation for all kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from kvlinker.base.errors import InvalidRequestError, shortened
from kvlinker.base.types.grammars import AnswerGrammar, json_style
from kvlinker.base.types.limits import (
    MOST_EMPTY_LINES,
    MOST_GRAMMAR_CHARACTERS,
    MOST_PATTERN_CHARACTERS,
    MOST_RULES,
    MOST_SCHEMA_CHARACTERS,
    MOST_SCHEMA_NODES,
)
from kvlinker.base.types.schema_size import SchemaSize, schema_fields
from kvlinker.base.types.schema_values import has_finite_value

_MOST_CHARACTERS = {
    "json": MOST_SCHEMA_CHARACTERS,
    "lark": MOST_SCHEMA_CHARACTERS,  # with the schemas of all tools in it
    "choice": MOST_SCHEMA_CHARACTERS,
    "grammar": MOST_GRAMMAR_CHARACTERS,
    "regex": MOST_PATTERN_CHARACTERS,
}

_RULE = re.compile(r"^[^\S\n]*[?!]?[\w-][^:\n\"/]*:", re.MULTILINE)
"""Matches where a rule of Lark or GBNF begins."""

_EMPTY_LINE = re.compile(r"^[^\S\n]*\n", re.MULTILINE)
"""Matches a line without anything: llguidance takes a quadratic time for many."""

_CAUSE_CHARACTERS = 300
"""The most characters of a compiler's message in an error's message."""

_MEANINGS = {
    "NoExtensionBias": "no text satisfies it.",
    r"(?i)too many items|row has \d+ items": (
        "it never ends or is too large. Ask for a simpler form."
    ),
    "(?i)too many (states|expressions)|TooComplex": (
        "it takes too many states to follow. Ask for a simpler form."
    ),
}
"""The meanings of the parser's messages, by a pattern that they match."""

_NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def check_enforceable(grammar: AnswerGrammar) -> None:
    """Check the limits that compilers of grammars do not check. Raises InvalidRequestError, which
    names the cause."""
    _check_size(grammar, "characters", len(grammar.source), _MOST_CHARACTERS[grammar.kind])
    if grammar.kind == "grammar":
        empty = len(_EMPTY_LINE.findall(grammar.source))
        _check_size(grammar, "empty lines", empty, MOST_EMPTY_LINES)
        _check_size(grammar, "rules", len(_RULE.findall(grammar.source)), MOST_RULES)
    try:
        schemas = list(_schemas(grammar))
        size = SchemaSize.of(schemas)
    except ValueError as error:
        raise unenforceable(grammar, str(error)) from error
    except RecursionError as error:
        raise unenforceable(grammar, "it is nested too deeply") from error
    _check_size(grammar, "fields, list entries and objects", size.nodes, MOST_SCHEMA_NODES)
    _check_size(grammar, "references", size.references, MOST_RULES)
    _check_size(grammar, "characters of patterns", size.pattern_characters, MOST_PATTERN_CHARACTERS)
    if not all(has_finite_value(schema) for schema in schemas):
        raise unenforceable(grammar, "no finite value is valid, since a required part needs itself")
    if any(
        name == "minProperties" and isinstance(least, int | float) and least > 1
        for schema in schemas
        if not _is_lenient(schema)
        for name, least in schema_fields(schema)
    ):
        raise unenforceable(
            grammar, "minProperties above 1 is not supported, since names may be repeated"
        )


def unenforceable(grammar: AnswerGrammar, cause: str) -> InvalidRequestError:
    """Return the error of a grammar that answers cannot be made to follow."""
    name = _NAMES.get(grammar.kind, grammar.kind)
    reason = shortened(cause, _CAUSE_CHARACTERS)
    return InvalidRequestError(f"This {name} cannot be enforced: {reason}", param=grammar.param)


def unfollowable(grammar: AnswerGrammar, cause: str) -> InvalidRequestError:
    """Return the error of a grammar that an answer cannot follow any further. What is told of the
    parser's state behind the ``cause`` is left out."""
    name = _NAMES.get(grammar.kind, grammar.kind)
    cause = cause.partition("<state>")[0].strip()
    reason = next(
        (meaning for pattern, meaning in _MEANINGS.items() if re.search(pattern, cause)),
        shortened(cause, _CAUSE_CHARACTERS),
    )
    return InvalidRequestError(f"This {name} cannot be followed: {reason}", param=grammar.param)


def _check_size(grammar: AnswerGrammar, what: str, count: int, most: int) -> None:
    if count > most:
        name = _NAMES.get(grammar.kind, grammar.kind)
        raise InvalidRequestError(
            f"The {name} has {count:,} {what}; at most {most:,} are taken. Ask for a simpler form.",
            param=grammar.param,
        )


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
    escaped = re.sub(
        r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", pattern, flags=re.DOTALL
    )
    return escaped.replace("\\\n", r"\n").replace("\n", r"\n")


def _schemas(grammar: AnswerGrammar) -> Iterator[Any]:
    """Yield the JSON schemas in a grammar: the one that it is, or those of calls of tools, which
    stand in it after ``%json``. Raises ValueError for one that is no JSON."""
    if grammar.kind == "json":
        yield json.loads(grammar.source)
    for text in (grammar.frame, grammar.source if grammar.kind in ("lark", "grammar") else ""):
        for found in re.finditer(r"%json\s*", text):
            with suppress(ValueError):  # the compiler says what is wrong there
                yield json.JSONDecoder().raw_decode(text, found.end())[0]


def _is_lenient(schema: Any) -> bool:
    """Return whether a schema is followed only as far as it can be."""
    return isinstance(schema, dict) and schema.get("x-guidance") == json_style(lenient=True)
