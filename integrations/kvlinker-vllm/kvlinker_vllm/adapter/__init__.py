"""All uses of vLLM's internal names, and the versions of vLLM that they were tested with.

To move to a new version: add it to ``TESTED``, run ``make test-vllm``, and adapt this package.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.renderers.chat_utils import load_chat_template
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvlinker_vllm.adapter.attention_layers import AttentionLayer
from kvlinker_vllm.adapter.block_pool import BlockPool, forget_prefix
from kvlinker_vllm.adapter.bound_model import BoundModel, VirtualSequences, bind_caller
from kvlinker_vllm.adapter.cache_groups import CacheGroup, cache_groups
from kvlinker_vllm.adapter.configurations import (
    TESTED,
    require_linkable,
    require_tested_version,
)
from kvlinker_vllm.adapter.rotary import rotate, watch_attention

__all__ = [
    "TESTED",
    "AttentionLayer",
    "BlockPool",
    "BoundModel",
    "CacheGroup",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "VirtualSequences",
    "bind_caller",
    "cache_groups",
    "forget_prefix",
    "load_chat_template",
    "require_linkable",
    "require_tested_version",
    "rotate",
    "watch_attention",
]
