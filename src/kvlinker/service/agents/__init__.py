"""Parts for agents: workflows and what they use next, chunks brought to memory in advance, and
conversations kept while a tool is called.

No other request touches them: ``LLM.agents`` builds them for the first request that names a
workflow, offers tools (where ``tool_wait`` is set) or prefetches.
"""

from __future__ import annotations

from contextlib import ExitStack

from kvlinker.base.events import Events
from kvlinker.engines.contract.contract import Engine
from kvlinker.service.agents.preloading import Preloading
from kvlinker.service.agents.tool_waits import ToolWaits
from kvlinker.service.agents.workflows import Workflows
from kvlinker.service.context_caches import ContextCaches
from kvlinker.store import Catalog, ChunkStore

__all__ = ["Agents"]


class Agents:
    """The parts for agents of one server."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        store: ChunkStore,
        caches: ContextCaches,
        events: Events,
        *,
        longest_wait: float,
    ) -> None:
        """``longest_wait``: the most seconds that a conversation is kept for its tools."""
        self.preloading = Preloading(catalog, store, engine)
        self.workflows = Workflows(caches, store.next_uses, self.preloading, events)
        self.tool_waits = ToolWaits(engine, longest=longest_wait)

    def close(self) -> None:
        """Bring no more chunks to memory, and watch no more answers. Idempotent."""
        with ExitStack() as closing:
            closing.callback(self.tool_waits.close)
            closing.callback(self.preloading.close)
