"""A linked prompt for vLLM's own handlers: what a request to them carries, and what its answer tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlinker.types.answers import Usage
from kvlinker.vllm.frontend.linker import LinkedPrompt
from kvlinker.vllm.protocol.transfer_plan import PARAM, TransferOutcome


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A linked prompt, signed for vLLM's scheduler."""

    linked: LinkedPrompt

    params: Mapping[str, Any]
    """The ``kv_transfer_params`` that carry its transfer plan."""

    salt: str
    """The salt of its KV in vLLM's prefix cache."""

    outcome: TransferOutcome | None = None
    """The outcome of its transfer plan where the plan has been carried out already, so that vLLM's handlers find all of
    its KV; None where it is theirs to carry out."""

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids."""
        ids: list[int] = self.linked.plan.prompt.tokens.tolist()
        return ids

    def usage(self, told: Mapping[str, Any] | None, output_tokens: int) -> Usage:
        """Count the prompt's tokens by how they were computed. ``told`` are the ``kv_transfer_params`` of vLLM's
        answer, which has the plan's outcome; None where vLLM does not tell, and all counts as planned."""
        outcome = self.outcome
        if outcome is None:
            outcome = TransferOutcome.model_validate((told or {}).get(PARAM) or {"linked": True})
        return self.linked.usage(output_tokens, linked=outcome.linked, found=outcome.found)
