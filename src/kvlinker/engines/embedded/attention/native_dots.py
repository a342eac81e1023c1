"""Products of few queries with keys by ``native/attention.cpp``, for observers of attention."""

from __future__ import annotations

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
        query, key = (
            torch.randn(*shape, 72, generator=generator).bfloat16() for shape in ((4, 3), (2, 37))
        )
        expected = query.float() @ key.float().repeat_interleave(2, dim=0).mT
        native.require_close(self.multiply(query, key), expected, "the product of queries and keys")

    def multiply(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the products of ``query`` [heads, queries, dim] and ``key`` [kv_heads, keys, dim],
        both bf16 on the CPU: [heads, queries, keys], fp32. Query heads share key heads in equal
        groups, neighbours first."""
        products = torch.empty(*query.shape[:2], key.shape[1], dtype=torch.float32)
        self._compute(
            Dots(
                query=Heads(*heads(query)),
                key=Heads(*heads(key)),
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


def dot_products(query: Tensor, key: Tensor) -> Tensor | None:
    """Return what ``NativeDots.multiply`` returns; None if native code cannot compute it, or not
    faster than PyTorch."""
    fits = (
        query.is_cpu
        and query.dtype == key.dtype == torch.bfloat16
        and query.shape[1] <= MOST_QUERIES
    )
    dots = native_dots() if fits else None
    return None if dots is None else dots.multiply(query, key)
