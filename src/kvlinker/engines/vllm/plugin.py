"""vLLM's entry point ``vllm.general_plugins``, which makes the connector known by name in every
process."""

from __future__ import annotations

import logging

NAME = "KVLinkerConnector"


def register() -> None:
    """Register the connector with vLLM. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvlinker.engines.vllm.connector", NAME)
    _log_as_vllm()


def _log_as_vllm() -> None:
    """Have kvlinker's messages look like vLLM's, with time and level, in processes where nobody
    else takes them."""
    own, theirs = logging.getLogger("kvlinker"), logging.getLogger("vllm")
    if not own.hasHandlers():
        own.setLevel(theirs.level)
        for handler in theirs.handlers:
            own.addHandler(handler)
