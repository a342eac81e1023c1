"""vLLM's entry point ``vllm.general_plugins``, which makes the connector known by name in every process."""

from __future__ import annotations

NAME = "KVLinkerConnector"


def register() -> None:
    """Register the connector with vLLM. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvlinker.vllm.connector", NAME)
