"""Link orders carry a seal: whoever may send requests to vLLM could otherwise name chunks that are not theirs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlinker.errors import InvalidRequestError
from kvlinker.store.format.durability import create_file
from kvlinker.vllm.protocol.transfer_plan import PARAM, LinkOrder, order_of_params

SEAL = "kvlinker_seal"
KEY_FILE = "orders.key"
KEY_BYTES = 32


class OrderSeal:
    """Seals orders, each for one prompt, and opens them; for all processes that share a state directory."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of(cls, state_dir: Path) -> OrderSeal:
        """With the key in ``state_dir``, which is made if it is missing. Raises OSError."""
        place = state_dir / KEY_FILE
        if not place.exists():
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_file(place, secrets.token_bytes(KEY_BYTES))  # unless another process is quicker
        return cls(place.read_bytes())

    def params(self, order: LinkOrder, tokens: Sequence[int]) -> dict[str, Any]:
        """``kv_transfer_params`` that carry the order, for a prompt of these tokens."""
        return {PARAM: order.model_dump(mode="json"), SEAL: self._seal(order, tokens)}

    def order(self, params: Mapping[str, Any] | None, tokens: Sequence[int]) -> LinkOrder | None:
        """The order that a request for this prompt carries; None where it carries none.

        Raises InvalidRequestError for one that is not sound, or that ``params`` did not make for this prompt.
        """
        order = order_of_params(params, prompt_tokens=len(tokens))
        if order is None or params is None:
            return None
        seal = str(params.get(SEAL)).encode(errors="replace")
        if not hmac.compare_digest(seal, self._seal(order, tokens).encode()):
            raise InvalidRequestError(
                f"kv_transfer_params.{PARAM} is not kvlinker's own: its seal is missing or for another prompt. Use "
                "kvlinker's routes.",
                param=PARAM,
            )
        return order

    def _seal(self, order: LinkOrder, tokens: Sequence[int]) -> str:
        content = order.model_dump_json().encode() + b"\0" + np.asarray(tokens, dtype="<u4").tobytes()
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()
