"""Sequences that are computed for their KV alone: chunks that somebody asked for, and variants for an idle engine."""

from __future__ import annotations

from concurrent.futures import Executor

from kvlinker.embedded.chunk_builder import ChunkBuilder
from kvlinker.embedded.commands import CommandQueue
from kvlinker.embedded.scheduler import Scheduler
from kvlinker.embedded.sequence import Sequence
from kvlinker.embedded.variants import VariantBuilder
from kvlinker.errors import KVLinkerError
from kvlinker.prompt.segments import Prompt


class Captures:
    """Knows whose a sequence with a capture is. ``offer`` may be called from any thread, all else from the engine's."""

    def __init__(
        self,
        chunks: ChunkBuilder,
        variants: VariantBuilder | None,
        scheduler: Scheduler,
        commands: CommandQueue,
        loaders: Executor,
    ) -> None:
        """``variants``: None where none are kept. ``loaders``: run what waits for the store."""
        self._chunks = chunks
        self._variants = variants
        self._scheduler = scheduler
        self._commands = commands
        self._loaders = loaders

    @property
    def variants_wait(self) -> bool:
        """An idle engine has variants to compute."""
        return self._variants is not None and self._variants.waiting

    @property
    def under_way(self) -> tuple[Sequence, ...]:
        """Sequences that are queued or being computed."""
        variants = () if self._variants is None else self._variants.under_way
        return (*self._chunks.under_way, *variants)

    def offer(self, prompt: Prompt, tenant: str) -> None:
        """What a request for this prompt missed may be there for the next one."""
        if self._variants is not None:
            self._loaders.submit(self._offer, self._variants, prompt, tenant)

    def start_variants(self) -> None:
        """The engine is idle: queue the variants of one prompt, if any wait."""
        sequence = None if self._variants is None else self._variants.start()
        if sequence is not None:
            self._scheduler.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """All of its tokens are computed."""
        if self._variants is not None and sequence in self._variants.under_way:
            self._scheduler.remove(sequence)
            self._loaders.submit(self._variants.finish(sequence))
        else:
            self._chunks.finish(sequence)

    def fail(self, sequence: Sequence, error: KVLinkerError) -> None:
        """Give it up; unknown sequences are ignored."""
        if self._variants is not None and sequence in self._variants.under_way:
            self._scheduler.remove(sequence)
            self._variants.drop(sequence)
        else:
            self._chunks.fail(sequence, error)

    def _offer(self, variants: VariantBuilder, prompt: Prompt, tenant: str) -> None:
        if variants.offer(prompt, tenant):
            self._commands.wake()
