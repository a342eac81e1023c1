"""The source of an ``LLM``'s vLLM: an engine of its own, or the one of the vLLM server that it runs in."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from kvlinker.config import Settings
from kvlinker.engine.contract import Engine
from kvlinker.errors import InvalidRequestError
from kvlinker.events import Events
from kvlinker.store import Catalog, ChunkStore, Speeds
from kvlinker.vllm.frontend.client import OwnClient, VLLMClient
from kvlinker.vllm.frontend.engine import VLLMEngine
from kvlinker.vllm.frontend.model_facts import ModelFacts, read_facts


class VLLMSource:
    """An ``EngineSource`` for vLLM: the model's facts are known, and ``start`` starts or finds vLLM once there is a
    store."""

    uses_host_memory = False
    device = None

    def __init__(self, facts: ModelFacts, start: Callable[[], VLLMClient]) -> None:
        self._facts = facts
        self._start = start
        self.tokenizer = facts.tokenizer
        self.sampling_defaults = facts.sampling_defaults

    def make(self, catalog: Catalog, store: ChunkStore, events: Events, settings: Settings, speeds: Speeds) -> Engine:
        """Make the engine. Raises InvalidRequestError for a store without a disk, and what ``start`` raises."""
        if not settings.disk_space:
            raise InvalidRequestError(
                "disk_space is 0, but vLLM's processes take chunks from the disk. Give it some.", param="disk_space"
            )
        return VLLMEngine(
            self._start(),
            self._facts,
            store=store,
            events=events,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_answer_tokens=settings.max_answer_tokens,
        )


def own_vllm(settings: Settings) -> VLLMSource:
    """Make a source with vLLM in processes of its own.

    Raises InvalidRequestError where it is not installed, and ModelLoadError.
    """
    if find_spec("vllm") is None:
        raise InvalidRequestError(
            "vLLM is not installed here. Run pip install 'kvlinker[vllm]', or see docs/vllm.md for CPUs.",
            param="engine",
        )
    facts = read_facts(settings)
    return VLLMSource(facts, lambda: OwnClient(settings, dtype=str(facts.dtype).removeprefix("torch.")))
