"""The usage object: prompt tokens by what became of them, and output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.types.answers import Usage


def usage_body(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """Usage of an answer's choices, ``n`` to a prompt: each prompt counts once, by its first choice.

    What is neither cached nor recomputed in the prompt is fresh.
    """
    prompts = usages[::n]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    output_tokens = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in prompts),
            "recomputed_tokens": sum(usage.recomputed_tokens for usage in prompts),
        },
    }
