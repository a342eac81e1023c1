"""Intercepts attention that a model writes out, instead of calling transformers' interface.

What a rotary function returns is followed through the model: the product of queries and keys
becomes ``Scores``, which note their scale, and what those are multiplied by are the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvlinker.engines.embedded.model.interception import active_interceptor

PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
WEIGHTS = {F.softmax, torch.softmax, F.dropout, torch.dropout}


class Followed(Tensor):
    """A query or key that has been handed to a model's rotary function."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            query, key = args
            return Scores(query, key.transpose(-1, -2), scale=1.0)
        if func is torch.baddbmm:
            _, query, key = args
            scale = float(kwargs.get("alpha", 1.0))
            return Scores(query, key.transpose(-1, -2), scale=scale)
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            return Scores(query, key, scale).attended(value)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class Scores:
    """The products of queries and keys, which are not computed.

    Masks are added to no effect: what queries see is known. A model that adds anything else, such
    as position biases, does not agree with what is computed, and is refused for that.
    """

    def __init__(self, query: Tensor, key: Tensor, scale: float) -> None:
        self._query = query
        self._key = key
        self._scale = scale

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        scores = args[0]
        if isinstance(scores, Scores) and func in WEIGHTS:
            return scores
        if isinstance(scores, Scores) and func in PRODUCTS:
            return scores.attended(args[1])
        raise LookupError(f"{func} of attention's scores is not known")

    def __truediv__(self, divisor: float) -> Scores:
        return Scores(self._query, self._key, self._scale / float(divisor))

    def __mul__(self, factor: float) -> Scores:
        return Scores(self._query, self._key, self._scale * float(factor))

    def __add__(self, mask: Tensor | None) -> Scores:
        return self

    def __matmul__(self, value: Tensor) -> Tensor:
        return self.attended(value)

    def to(self, *args: Any, **kwargs: Any) -> Scores:
        """Return the scores, which take the precision of the values."""
        return self

    def view(self, *shape: int) -> Scores:
        """Return the scores, whose shape is that of queries and keys."""
        return self

    def attended(self, value: Tensor) -> Tensor:
        """Return the attention [1, heads, tokens, dim] over ``value`` [1, heads, tokens, dim]."""
        query, key = (
            part.as_subclass(Tensor).view(1, -1, *part.shape[-2:]).to(value.dtype)
            for part in (self._query, self._key)
        )
        interceptor = active_interceptor()
        assert interceptor is not None, "followed only while one is active"
        value, options = value.as_subclass(Tensor), {"scaling": self._scale}
        return interceptor.attend(None, query, key, value, options).transpose(1, 2)
