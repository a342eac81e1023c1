"""The source of an ``LLM``'s vLLM: an engine of its own, or the one of the vLLM server that it runs
in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.events import Events
from kvlinker.base.installing import install_command
from kvlinker.engines.contract.contract import Engine
from kvlinker.settings import Settings
from kvlinker.store import Catalog, ChunkStore, Speeds
from kvlinker_vllm.frontend.client import OwnClient, VLLMClient
from kvlinker_vllm.frontend.configuration import configure
from kvlinker_vllm.frontend.engine import VLLMEngine
from kvlinker_vllm.frontend.model_facts import (
    read_facts,
    sampling_defaults_of,
    tokenizer_of,
)

logger = logging.getLogger("kvlinker.vllm.frontend.source")


class VLLMSource:
    """An ``EngineSource`` for vLLM: its configuration is known, and ``start`` starts or finds vLLM
    once there is a store."""

    uses_host_memory = False
    device = None

    def __init__(
        self, vllm_config: Any, settings: Settings, start: Callable[[], VLLMClient]
    ) -> None:
        """Read the tokenizer of the model of ``vllm_config``. Raises ModelLoadError."""
        self._config = vllm_config
        self._start = start
        self.tokenizer = tokenizer_of(vllm_config, settings)
        self.sampling_defaults = sampling_defaults_of(vllm_config)

    def make(
        self,
        catalog: Catalog,
        store: ChunkStore,
        events: Events,
        settings: Settings,
        speeds: Speeds,
    ) -> Engine:
        """Make the engine.

        Raises InvalidRequestError for a store without a disk, and for answers to keep,
        ModelLoadError if the model's files are not found, and the errors of ``start``.
        """
        if not settings.disk_space:
            raise InvalidRequestError(
                "disk_space is 0, but vLLM's processes take chunks from the disk. Give it some.",
                param="disk_space",
            )
        if settings.keep_answers != "off":
            raise InvalidRequestError(
                f"keep_answers is {settings.keep_answers}, but the KV of answers stays in vLLM:"
                " leave keep_answers off with this engine.",
                param="keep_answers",
            )
        client = self._start()
        try:
            facts = read_facts(self._config, settings, self.tokenizer)
        except BaseException:
            client.close()
            raise
        return VLLMEngine(client, facts, store=store, events=events, settings=settings)


def own_vllm(settings: Settings) -> VLLMSource:
    """Make a source with vLLM in processes of its own.

    Raises InvalidRequestError if it is not installed or does not take its options, and
    ModelLoadError.
    """
    if find_spec("vllm") is None:
        raise InvalidRequestError(
            f"vLLM is not installed here. Run {install_command('vllm')}, or see docs/vllm.md for"
            " CPUs.",
            param="engine",
        )
    began = time.monotonic()
    vllm_config = configure(settings)
    logger.info("vLLM is configured for %s (%.1f s).", settings.model, time.monotonic() - began)
    return VLLMSource(vllm_config, settings, lambda: OwnClient(settings, vllm_config))
