"""How many examples property tests try."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(count: int, *, core: int | None = None, **others: Any) -> settings:
    """Settings for ``count`` examples; under the profile ``core``, for ``core`` of them, or for no
    more than the profile has."""
    if settings.get_current_profile_name() == "core":
        count = core or min(count, settings().max_examples)
    return settings(max_examples=count, **others)
