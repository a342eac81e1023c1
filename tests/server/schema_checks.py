"""Hooks for schemathesis: which requests a server may refuse although the OpenAPI document allows them."""

from __future__ import annotations

import re

import schemathesis

BEYOND_SCHEMAS = re.compile(
    r"Input should be a valid integer|The prompt is empty|has no word to search for|names no context cache"
    r"|is in the past|is the id of no call|asks for a call, but there are no|stands in messages of role"
    r"|Unknown policy|needs '|may have only one|is (not )?a valid (schema|regular expression)|does not compile"
    r"|Token ids are integers|more are asked for|Give exactly one of|is a list of|goes with '"
    r"|applies to|must be one prompt|Unknown token id|context window|same name|unsupported"
)
"""What a JSON schema cannot say: how fields go together, names of policies, ids, what texts mean, and that 1.0 is no
integer."""


@schemathesis.check
def accepts_what_the_document_allows(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Refuse a 400 to a valid request, unless a schema could not have said why."""
    mode = case.meta.generation.mode if case.meta else None
    if response.status_code == 400 and mode is schemathesis.GenerationMode.POSITIVE:
        assert BEYOND_SCHEMAS.search(response.text), response.text
