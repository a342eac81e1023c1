"""Signs transfer plans, and reads those that are signed: otherwise, clients that may send requests
to vLLM could name chunks of others."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from kvlinker.base.errors import InvalidRequestError
from kvlinker.store.format.durability import create_file
from kvlinker_vllm.protocol.transfer_plan import PARAM, TransferPlan

SIGNATURE = "kvlinker_signature"
"""The signature's name among a request's ``kv_transfer_params``."""

KEY_FILE = "signing.key"
KEY_BYTES = 32
"""The bytes of a key: those of a SHA-256 digest."""


class PlanSigner:
    """Signs transfer plans, each for one prompt, and verifies them; all processes that share a
    state directory agree."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of(cls, state_dir: Path) -> PlanSigner:
        """Return the signer with the key in ``state_dir``, which is created if it is missing.
        Raises OSError."""
        place = state_dir / KEY_FILE
        if not place.exists():
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_file(place, secrets.token_bytes(KEY_BYTES))  # unless another process is quicker
        return cls(place.read_bytes())

    def params(self, plan: TransferPlan, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` that carry the plan, for a prompt of these tokens."""
        return {PARAM: plan.model_dump(mode="json"), SIGNATURE: self._signature(plan, tokens)}

    def verify(
        self, params: Mapping[str, Any] | None, tokens: Sequence[int]
    ) -> TransferPlan | None:
        """Return the transfer plan that a request for this prompt carries; None if it carries none.

        Raises InvalidRequestError for one that is not valid, or that was not signed for this
        prompt.
        """
        if params is None or params.get(PARAM) is None:
            return None
        try:
            plan = TransferPlan.model_validate(params[PARAM])
        except ValidationError as error:
            raise InvalidRequestError(
                f"kv_transfer_params.{PARAM} is not a transfer plan: {error}", param=PARAM
            ) from error
        if plan.linked >= len(tokens):
            raise InvalidRequestError(
                f"kv_transfer_params.{PARAM} links {plan.linked} tokens of a prompt of"
                f" {len(tokens)}; the last one is always vLLM's to compute.",
                param=PARAM,
            )
        signature = str(params.get(SIGNATURE)).encode(errors="replace")
        if not hmac.compare_digest(signature, self._signature(plan, tokens).encode()):
            raise InvalidRequestError(
                f"kv_transfer_params.{PARAM} is not kvlinker's own: its signature is missing or for"
                " another prompt. Use kvlinker's routes.",
                param=PARAM,
            )
        return plan

    def _signature(self, plan: TransferPlan, tokens: Sequence[int]) -> str:
        content = (
            plan.model_dump_json().encode() + b"\0" + np.asarray(tokens, dtype="<u4").tobytes()
        )
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()
