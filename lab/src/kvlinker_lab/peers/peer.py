"""Says what a peer is: an engine that is measured in a process of its own. Registers peers by name.

A module of this package calls ``register`` for each of its peers; it imports the peer's own
libraries when one starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvlinker.base.errors import InvalidRequestError, did_you_mean
from kvlinker.base.registry import Registry
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.measurement import START_TOKENS, Tokens, Workload

STEP_TOKENS = 2048
"""The most tokens that a peer takes at once while it prefills; kvlinker takes its default."""


@dataclass(frozen=True)
class Task:
    """The work of a peer: its model, and the measurements. All values are ones that JSON has."""

    peer: str
    """The peer's name."""
    model: str
    """The folder of the model, as transformers writes it."""
    folder: str
    """A folder for files that are made of the model, which later runs find again."""
    dtype: str
    """The weights' and the KV cache's, such as ``bfloat16``."""
    device: str
    """Where peers that can choose compute: ``cpu``, ``cuda`` …"""
    threads: int
    """CPU threads of peers that do not choose their number themselves."""
    vocabulary: int
    kv_bytes_per_token: int
    prefill_tokens: int
    """The length of the prompt that is prefilled."""
    batches: tuple[int, ...]
    """How many requests decode at once, case by case."""
    context_tokens: int
    """The length of the prompt that each of them decodes behind."""
    steps: int
    """Steps of decoding that are timed in each case."""
    chunks: int = 0
    """Cached chunks that requests share where they decode behind linked ones; 0: no such case."""
    chunk_tokens: int = 512
    fresh_tokens: int = 32
    """Tokens behind the chunks, each request's own."""
    policy: str = "legolink-16"
    """Links the chunks."""
    vllm_options: Mapping[str, Any] | None = None
    gguf: str = ""
    """The GGUF file that the model was unpacked from; empty where there is none."""
    started: float = 0.0
    """When the process that runs it was started, in seconds since the epoch."""

    @property
    def fresh(self) -> Workload:
        """The prompts of requests that decode behind tokens of their own."""
        return Workload(0, 1, self.context_tokens)

    @property
    def linked(self) -> Workload | None:
        """The prompts of requests that decode behind linked chunks; None where that is not
        measured."""
        return Workload(self.chunks, self.chunk_tokens, self.fresh_tokens) if self.chunks else None

    def longest(self, *, linking: bool) -> int:
        """Return the most tokens that one request has, its answer included; ``linking``: where the
        peer links."""
        return max(self.prefill_tokens, *self._contexts(linking)) + self.steps + START_TOKENS

    def kv_tokens(self, *, linking: bool) -> int:
        """Return the tokens that a KV cache must have room for; ``linking``: where the peer
        links."""
        at_once = max(self.batches) * (max(self._contexts(linking)) + self.steps + START_TOKENS)
        return max(at_once, self.longest(linking=linking))

    def _contexts(self, linking: bool) -> list[int]:
        return [self.context_tokens, self.linked.tokens if linking and self.linked else 0]


class Peer(Protocol):
    """Runs a task's model."""

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float] | None:
        """Return the log probabilities of all tokens but the first, in nats; None where the peer
        does not tell them."""

    def prefill(self, tokens: Sequence[int]) -> float:
        """Return the seconds from asking for a greedy token behind these to having it."""

    def decode_step(self, tokens: Tokens, *, steps: int) -> float:
        """Return the median seconds of ``steps`` greedy steps of all requests at once, behind
        ``tokens``."""


@runtime_checkable
class LinkingPeer(Peer, Protocol):
    """Runs a task's model behind linked chunks, too."""

    def linked_decode_step(self, prompts: Sequence[Prompt], *, steps: int) -> float:
        """Return the median seconds of ``steps`` greedy steps of all prompts at once, once their
        chunks are linked."""


@dataclass(frozen=True)
class PeerKind:
    """Describes one peer before it runs."""

    name: str
    start: Callable[[Task], AbstractContextManager[Peer]]
    """Loads the task's model; leaving the context stops the peer."""
    program: str = ""
    """The name by which an environment is given for the program that it runs on beside kvlinker.
    Peers may share one."""
    modules: tuple[str, ...] = ()
    """The modules that must be installed where it runs."""
    distributions: tuple[str, ...] = ()
    """Packages whose versions count, those that are installed."""
    installation: str = ""
    """Says how to get the modules."""
    model_types: frozenset[str] | None = None
    """The ``model_type`` of configurations that it takes; None for all."""
    quantises: bool = False
    """Whether it quantises the model by itself, which is done already in a GGUF file."""


_registry: Registry[PeerKind] = Registry("peer", own="kvlinker_lab.peers", group="kvlinker.peers")


def register(kind: PeerKind) -> None:
    """Register a peer. Raises ValueError where another has its name."""
    _registry.add(kind.name, kind)


def known_peers() -> Mapping[str, PeerKind]:
    """Return all peers by name, as they are registered."""
    return _registry.known()


def find_peer(name: str) -> PeerKind:
    """Return the peer of this name. Raises InvalidRequestError, which lists the names, for an
    unknown one."""
    known = known_peers()
    if name not in known:
        meant = did_you_mean(name, known)
        raise InvalidRequestError(
            f"Unknown peer {name!r}; known are {', '.join(known)}.{meant}", param="systems"
        )
    return known[name]
