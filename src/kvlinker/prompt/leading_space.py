"""A tokenizer without the space that SentencePiece-style tokenizers put before a text; for ``encoding``.

Llama-2 and its kin encode ``word`` as ``▁word``. That is right for a text that begins a prompt, and wrong for one that
goes on after a cached chunk, where it would be a space that nobody wrote.
"""

from __future__ import annotations

import copy
import json
from typing import Any, cast

from tokenizers import Tokenizer, models


def without_leading_space(tokenizer: Tokenizer) -> Tokenizer | None:
    """A copy of ``tokenizer`` that puts nothing before a text; None if ``tokenizer`` is such a one already."""
    parts = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    bare = {name: _without_space(state) for name, state in parts.items()}
    if bare == parts:
        return None
    shell = json.loads(Tokenizer(models.BPE()).to_str())
    donor = Tokenizer.from_str(json.dumps(shell | bare))
    result = copy.deepcopy(tokenizer)
    result.normalizer = donor.normalizer
    result.pre_tokenizer = donor.pre_tokenizer
    return result


def _state(component: Any) -> dict[str, Any] | None:
    """What ``tokenizer.json`` says of a normalizer or pre-tokenizer."""
    return None if component is None else cast(dict[str, Any], json.loads(component.__getstate__()))


def _without_space(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    match state:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return state | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return state | {"add_prefix_space": False}
        case {"normalizers": list(steps)}:
            return state | {"normalizers": _each(steps)}
        case {"pretokenizers": list(steps)}:
            return state | {"pretokenizers": _each(steps)}
        case _:
            return state


def _each(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kept for step in steps if (kept := _without_space(step)) is not None]
