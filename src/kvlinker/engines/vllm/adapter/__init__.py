"""All uses of vLLM's internal names, and the versions of vLLM that they were tested with.

To move to a new version: add it to ``TESTED``, run ``make test-vllm``, and adapt this package.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.renderers.chat_utils import load_chat_template
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvlinker.engines.vllm.adapter.bound_model import (
    AttentionLayer,
    BoundModel,
    VirtualSequences,
    bind_caller,
)
from kvlinker.engines.vllm.adapter.configurations import (
    TESTED,
    end_with_parent,
    require_linkable,
    require_tested_version,
)
from kvlinker.engines.vllm.adapter.rotary import rotate, watched

__all__ = [
    "TESTED",
    "AttentionLayer",
    "BoundModel",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "VirtualSequences",
    "bind_caller",
    "end_with_parent",
    "forget_prefix",
    "load_chat_template",
    "require_linkable",
    "require_tested_version",
    "rotate",
    "watched",
]


def forget_prefix(manager: Any, request: Any) -> None:
    """Have vLLM's KV cache manager forget the blocks that it would reuse for the request."""
    blocks, *_ = manager.get_computed_blocks(request)
    manager.evict_blocks({block for group in blocks.get_block_ids() for block in group})
