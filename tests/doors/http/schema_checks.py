"""A hook for schemathesis: answers are short."""

from __future__ import annotations

from typing import Any

import schemathesis

MOST_TOKENS = 4
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""The fields that limit answers, by path: what has none may fill the context window, up to 128
times."""


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    """Ask for few tokens where the request would be answered with many."""
    field = LIMITS.get(case.operation.path)
    if field is None or not isinstance(case.body, dict):
        return
    for name in (field, "max_completion_tokens", "min_tokens"):
        limit = case.body.get(name)
        if (limit is None and name == field) or (
            type(limit) is int and MOST_TOKENS < limit < 2**31
        ):
            case.body[name] = MOST_TOKENS
