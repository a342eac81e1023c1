"""Products of few queries with keys by ``native/attention.cpp``, for observers of attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvlinker.engines import native
from kvlinker.engines.embedded.attention.native_call import Dots, Heads, heads

MOST_QUERIES = 8
"""The most queries whose products with keys native code computes faster than PyTorch, which widens
all keys first."""


class NativeDots:
    """Multiplies queries by keys in bf16, with sums in fp32. Keys are read where they lie."""

    def __init__(self) -> None:
        """Load the function, and compare it with PyTorch. Raises NativeUnavailableError."""
        self._compute = native.functions("attention.cpp", {"kvlinker_dots": Dots})["kvlinker_dots"]
        generator = torch.Generator().manual_seed(0)
        query, *keys = (
            torch.randn(*shape, 72, generator=generator).bfloat16()
            for shape in ((4, 6), (2, 37), (2, 16))
        )
        asked = torch.split(query.float(), 3, dim=1)
        expected = [
            each @ key.float().repeat_interleave(2, dim=0).mT
            for each, key in zip(asked, keys, strict=True)
        ]
        native.require_close(
            self.multiply(query, keys),
            torch.cat(expected, dim=2),
            "the product of queries and keys",
        )

    def multiply(self, query: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """Return the products of queries with the keys of several parts of a sequence: [heads,
        queries, keys of all parts], fp32.

        ``query`` [heads, parts · queries, dim] is each part's in turn; ``keys`` are [kv_heads,
        keys, dim], all bf16 on the CPU. Query heads share key heads in equal groups, neighbours
        first.
        """
        columns = sum(key.shape[1] for key in keys)
        products = torch.empty(
            len(query), query.shape[1] // len(keys), columns, dtype=torch.float32
        )
        parts = (Heads * len(keys))(*(Heads(*heads(key)) for key in keys))
        self._compute(
            Dots(
                query=Heads(*heads(query)),
                keys=parts,
                parts=len(keys),
                products=products.data_ptr(),
                threads=torch.get_num_threads(),
            )
        )
        return products


@cache
def native_dots() -> NativeDots | None:
    """Return the native products, compiled when first asked for; None if there are none, and the
    log says why."""
    return native.or_fall_back(NativeDots, "Observed attention takes PyTorch's products")


def dot_products(query: Tensor, keys: Sequence[Tensor]) -> Tensor | None:
    """Return what ``NativeDots.multiply`` returns; None if native code cannot compute it, or not
    faster than PyTorch."""
    fits = (
        query.is_cpu
        and query.dtype == torch.bfloat16
        and all(key.dtype == torch.bfloat16 for key in keys)
        and query.shape[1] <= MOST_QUERIES * len(keys)
    )
    dots = native_dots() if fits else None
    return None if dots is None else dots.multiply(query, keys)
