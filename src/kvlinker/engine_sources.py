"""Where an ``LLM`` has its engine from: each kind loads its model, then starts once there are a store and a catalog."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvlinker.config import Settings
from kvlinker.engine.base import Engine
from kvlinker.engine.embedded import EmbeddedEngine
from kvlinker.engine.loading import LoadedModel, load_model
from kvlinker.engine.variant_library import VariantLibrary
from kvlinker.events import Events
from kvlinker.store import Catalog, ChunkStore, Speeds


class EngineSource(Protocol):
    """A model that is loaded, or known, and can be started once."""

    uses_host_memory: bool
    """Whether the engine computes in this process, and takes chunks from the store's memory."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def device(self) -> torch.device | None:
        """Where the engine takes chunks from the store's copies on the device; None where it takes none."""
        ...

    def make(self, catalog: Catalog, store: ChunkStore, events: Events, settings: Settings, speeds: Speeds) -> Engine:
        """The engine, which belongs to the caller."""
        ...


class EmbeddedSource:
    """The embedded engine on a model in memory."""

    uses_host_memory = True

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.device: torch.device | None = loaded.device

    def make(self, catalog: Catalog, store: ChunkStore, events: Events, settings: Settings, speeds: Speeds) -> Engine:
        variants = VariantLibrary(
            catalog.variants, store, fingerprint=self._loaded.fingerprint, limit=settings.max_variants
        )
        return EmbeddedEngine(
            self._loaded, store=store, events=events, settings=settings, variants=variants, speeds=speeds
        )


def engine_source(settings: Settings) -> EngineSource:
    """What ``settings.engine`` names, on ``settings.model``.

    Raises ModelLoadError and UnsupportedModelError, and InvalidRequestError where the engine is not installed.
    """
    if settings.engine == "vllm":
        from kvlinker.vllm.frontend.source import own_vllm

        return own_vllm(settings)
    return EmbeddedSource(load_model(settings))
