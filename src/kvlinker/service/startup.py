"""Starts the parts of an LLM, by its settings: the catalog, the chunk store, the engine, and what
works with them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvlinker.base.events import ChunkNamed, Events
from kvlinker.base.loading import Report, unreported
from kvlinker.base.types.messages import Implicit
from kvlinker.engines.contract.contract import Engine, engine_closed
from kvlinker.engines.contract.gguf_unpacking import with_folder
from kvlinker.engines.contract.joining import joining_engine
from kvlinker.engines.embedded.chunks.variants import VariantLibrary
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model_loading import load_model
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.service.agents import Agents
from kvlinker.service.audit.policy_manager import PolicyManager
from kvlinker.service.context_caches import ChunkTexts, ContextCaches
from kvlinker.service.context_caches.kept_answers import AnswerKeeper
from kvlinker.service.embedding import Embedder
from kvlinker.service.implicit.ahead import PassagesAhead
from kvlinker.service.implicit.caches import ImplicitCaches, Recognizer
from kvlinker.service.reading import ContentReader
from kvlinker.service.residency import Residency
from kvlinker.service.state import open_state
from kvlinker.settings import Settings
from kvlinker.store import Catalog, ChunkStore, Speeds, load_cipher
from kvlinker.store.speeds import FILE_NAME

if TYPE_CHECKING:
    from kvlinker.service.builders import BuilderClient, Building

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
            from kvlinker.service.builders import Builders

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


def engine_source(
    settings: Settings, builders: BuilderClient | None = None, report: Report = unreported
) -> EngineSource:
    """Return the source of the engine that ``settings.engine`` names, on ``settings.model``; the
    embedded engine asks ``builders`` for chunks that it lacks. ``report`` takes the progress.

    Raises ModelLoadError and UnsupportedModelError, InvalidRequestError if the engine is not
    installed, and, before a model is loaded for nothing, StoreError if the catalog cannot be used.
    """
    Catalog(settings.catalog_place, load_cipher(settings.encryption_key)).close()
    if settings.engine == "vllm":
        source: EngineSource = joining_engine(settings.engine).make_source(
            with_folder(settings, report)
        )
        return source
    began = time.monotonic()
    loaded = load_model(settings, report)
    logger.info("The model is loaded and checked (%.1f s).", time.monotonic() - began)
    return EmbeddedSource(loaded, builders)


class Parts:
    """The parts of an ``LLM``, with which its calls work: they start, and are closed, together."""

    _agents: Agents | None
    _building: Building | None
    _making: threading.Lock
    """Guards the two parts that the first access makes, and ``_is_closed``."""

    _is_closed: bool

    def _start(self, source: EngineSource, settings: Settings) -> None:
        with ExitStack() as started:
            self._start_parts(source, settings, started)
            self._closing = started.pop_all()

    def close(self) -> None:
        """Stop the engine and finish pending writes. Idempotent."""
        with self._making:
            self._is_closed = True
        self._closing.close()

    def settle(self) -> None:
        """Wait until what is computed in idle time for later prompts is there, or given up: the
        passages of prompts, and chunks at later places in a row."""
        if self._ahead is not None:
            self._ahead.settle()
        self.engine.settle().result()

    @property
    def agents(self) -> Agents:
        """The parts for agents, which the first access builds. Raises EngineClosedError after
        ``close``."""
        with self._making:
            if self._agents is None:
                self._check_open()
                self._agents = Agents(
                    self.engine,
                    self.catalog,
                    self.store,
                    self.caches,
                    self.events,
                    longest_wait=self.settings.tool_wait,
                )
                self._closing.callback(self._agents.close)
            return self._agents

    @property
    def preloading_chunks(self) -> int:
        """The number of chunks that are still to be brought to memory."""
        return 0 if self._agents is None else self._agents.preloading.pending

    @property
    def building(self) -> Building:
        """Computes chunks for other servers; the first access makes it. Raises EngineClosedError
        after ``close``."""
        from kvlinker.service.builders import Building

        with self._making:
            if self._building is None:
                self._check_open()
                self._building = Building(self.engine, self.catalog, self.store)
                self._closing.callback(self._building.close)
            return self._building

    def _check_open(self) -> None:
        if self._is_closed:
            raise engine_closed()

    def _start_parts(self, source: EngineSource, settings: Settings, started: ExitStack) -> None:
        """Make the parts, each of which ``started`` closes."""
        self.settings = settings
        self.events = Events()
        self.model_name = settings.served_name
        self.created_at = time.time()
        self.tokenizer = source.tokenizer
        self.sampling_defaults = (
            source.sampling_defaults if settings.generation_config == "auto" else {}
        )
        self.speeds = Speeds(settings.state_dir / FILE_NAME)
        started.callback(self.speeds.close)
        self.embedder = Embedder(settings) if settings.embedding_model else None
        if self.embedder is not None:
            started.callback(self.embedder.close)
        self.catalog, self.store = open_state(
            settings,
            self.events,
            host_bytes=settings.host_memory if source.uses_host_memory else 0,
            device=source.device,
            speeds=self.speeds,
        )
        started.callback(self.catalog.close)
        started.callback(self.store.close)
        self.engine: Engine = source.make(
            self.catalog, self.store, self.events, settings, self.speeds
        )
        started.callback(self.engine.close)
        self.builder = PromptBuilder(
            self.tokenizer,
            context=settings.generation_context,
            system_prompt=settings.system_prompt,
            chat_template=settings.chat_template,
            max_tokens=self.engine.max_model_len,
        )
        if self.builder.template.source is None:
            logger.warning(
                "%s has no chat template, so chats are refused; completions are answered. Give one"
                " by --chat-template (Jinja), or serve the model's chat variant.",
                self.model_name,
            )
        self.caches = ContextCaches(
            model=self.model_name,
            builder=self.builder,
            engine=self.engine,
            catalog=self.catalog,
            store=self.store,
            texts=ChunkTexts(
                self.catalog,
                self.builder.encoder,
                fingerprint=self.engine.fingerprint,
                searchable=settings.searchable,
                embedder=self.embedder,
            ),
            events=self.events,
            quotas=settings.quotas,
            implicit_caches=settings.implicit_caches,
            builds=settings.role == "build",
        )
        started.callback(self.caches.close)
        self._keeper = AnswerKeeper(
            self.builder.encoder, self.caches, self.events, ttl=settings.implicit_ttl
        )
        started.callback(self._keeper.close)
        self._agents = None
        self._building = None
        self._making = threading.Lock()
        self._is_closed = False
        self.residency = Residency(
            self.store,
            kv_bytes=self.engine.kv_bytes,
            resident_keys=self.engine.resident_keys,
        )
        self.events.subscribe(self.residency.listen, ChunkNamed)
        self.policy_manager = PolicyManager(
            settings,
            self.engine,
            self.events,
            model=self.model_name,
            decode=lambda ids: self.tokenizer.decode(list(ids)),
        )
        started.callback(self.policy_manager.close)
        implicit = ImplicitCaches(
            self.builder,
            self.engine,
            self.caches.creation,
            self.catalog,
            self.events,
            ttl=settings.implicit_ttl,
        )
        ahead = None
        if settings.implicit_ahead == "on" and settings.engine == "embedded":
            ahead = PassagesAhead(
                implicit,
                self.engine,
                self.catalog,
                self.store,
                most_caches=settings.implicit_caches,
                quotas=settings.quotas,
            )
            started.callback(ahead.close)
        self._ahead = ahead
        self._reader = ContentReader(
            self.builder,
            self.caches,
            implicit,
            Recognizer(
                self.catalog,
                self.builder.encoder,
                self.events,
                fingerprint=self.engine.fingerprint,
            ),
            self.policy_manager,
            Implicit(settings.implicit),
            ahead,
        )
        started.callback(self.engine.close)  # before all others, so that what they wait for ends
