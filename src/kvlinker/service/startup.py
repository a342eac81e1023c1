"""Opens the parts of an LLM, by its settings: the catalog, the chunk store, and the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from kvlinker.base.events import Events
from kvlinker.engines.contract.contract import Engine
from kvlinker.engines.embedded.chunks.variants import VariantLibrary
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model_loading import load_model
from kvlinker.service.builders import BuilderClient, Builders
from kvlinker.settings import Settings
from kvlinker.store import Catalog, ChunkStore, Speeds, load_cipher, open_store

logger = logging.getLogger(__name__)


class EngineSource(Protocol):
    """Starts an engine, once, on a model that is loaded or known."""

    uses_host_memory: bool
    """True if the engine computes in this process, and takes chunks from the store's memory."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The sampling parameters that the model's authors recommend, by name."""

    @property
    def device(self) -> torch.device | None:
        """The device on which the engine takes copies from the store; None if it takes none."""

    def make(
        self,
        catalog: Catalog,
        store: ChunkStore,
        events: Events,
        settings: Settings,
        speeds: Speeds,
    ) -> Engine:
        """Make the engine, which belongs to the caller."""


class EmbeddedSource:
    """Starts the embedded engine on a model in memory."""

    uses_host_memory = True

    def __init__(self, loaded: LoadedModel, builders: BuilderClient | None = None) -> None:
        """``builders`` are asked for chunks that the engine lacks, by an engine that is made."""
        self._loaded = loaded
        self._builders = builders
        self.tokenizer = loaded.tokenizer
        self.sampling_defaults = loaded.sampling_defaults
        self.device: torch.device | None = loaded.device

    def make(
        self,
        catalog: Catalog,
        store: ChunkStore,
        events: Events,
        settings: Settings,
        speeds: Speeds,
    ) -> Engine:
        variants = None
        if settings.max_variants:
            variants = VariantLibrary(
                catalog.variants,
                store,
                fingerprint=self._loaded.fingerprint,
                limit=settings.max_variants,
            )
        elsewhere = None
        if self._builders is not None:
            elsewhere = Builders(
                self._builders,
                store,
                kv_bytes=self._loaded.kv_bytes,
                least_tokens=settings.build_tokens,
            )
        return EmbeddedEngine(
            self._loaded,
            store=store,
            events=events,
            settings=settings,
            variants=variants,
            speeds=speeds,
            elsewhere=elsewhere,
        )


def engine_source(settings: Settings, builders: BuilderClient | None = None) -> EngineSource:
    """Return the source of the engine that ``settings.engine`` names, on ``settings.model``; the
    embedded engine asks ``builders`` for chunks that it lacks.

    Raises ModelLoadError and UnsupportedModelError, InvalidRequestError if the engine is not
    installed, and, before a model is loaded for nothing, StoreError if the catalog cannot be used.
    """
    Catalog(settings.catalog_place, load_cipher(settings.encryption_key)).close()
    if settings.engine == "vllm":
        from kvlinker.engines.vllm.frontend.source import own_vllm

        return own_vllm(settings)
    began = time.monotonic()
    loaded = load_model(settings)
    logger.info("The model is loaded and checked (%.1f s).", time.monotonic() - began)
    return EmbeddedSource(loaded, builders)


class StateDirectory(NamedTuple):
    """A state directory's catalog and store. The owner closes the store first: it may still write
    chunks of the catalog."""

    catalog: Catalog
    store: ChunkStore


def open_state(
    settings: Settings,
    events: Events,
    *,
    host_bytes: int,
    device: torch.device | None = None,
    speeds: Speeds | None = None,
) -> StateDirectory:
    """Open the catalog and the store that the settings name, the store with ``host_bytes`` in
    memory.

    ``device`` is where a model runs that takes chunks from the store; ``speeds`` keeps what is
    measured of its tiers. Raises StoreError if one of them cannot be used, and InvalidRequestError
    for settings that a tier does not take.
    """
    cipher = load_cipher(settings.encryption_key)
    catalog = Catalog(settings.catalog_place, cipher)
    try:
        store = open_store(
            settings,
            events,
            host_bytes=host_bytes,
            device=device,
            cipher=cipher,
            pinned=catalog.pinned(),
            speeds=speeds,
        )
    except BaseException:
        catalog.close()
        raise
    return StateDirectory(catalog, store)
