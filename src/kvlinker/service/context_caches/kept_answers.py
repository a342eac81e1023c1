"""Keeps answers as context caches, with the KV that decoding computed (after RelayCaching).

An answer's KV was computed after its own prompt and depends on it, so it stays its tenant's, and is
separate from that of texts that were computed alone (``Chunk.origin``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, Self, cast, get_args

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.events import AnswerKept, Events
from kvlinker.base.types.answers import AnswerParts, Delta
from kvlinker.base.types.chunks import Chunk, KeptAnswer, Origin
from kvlinker.engines.contract.contract import AnswerKV, Finished, GenerationEvent, Sink
from kvlinker.prompting.answer_forms.reader import PlainReader, Reader
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.service.context_caches import ContextCaches
from kvlinker.service.context_caches.checks import check_ttl

KeptPart = Literal["answer", "all"]
"""``answer`` is the answer's text, without reasoning and calls; ``all`` is all of it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Asks to keep a request's answer."""

    part: KeptPart = "answer"
    ttl: float | None = None
    """The seconds that it lives from its last use; None for those of implicit context caches."""

    reader: Callable[[], Reader] = PlainReader
    """Makes readers that separate the answer's reasoning and calls from its text."""

    @classmethod
    def of(cls, part: str, ttl: float | None, reader: Callable[[], Reader]) -> Self | None:
        """Ask for the part of this name; None for "off". Raises InvalidRequestError for others."""
        if ttl is not None:
            check_ttl(ttl)
        if part == "off":
            return None
        if part not in get_args(KeptPart):
            raise InvalidRequestError(
                f"'keep' is {part!r}, but must be 'answer', 'all' or 'off'.", param="keep"
            )
        return cls(cast(KeptPart, part), ttl, reader)


class AnswerKeeper:
    """Makes context caches of answers, in a thread of its own. Methods may be called from any
    thread."""

    def __init__(
        self, encoder: TextEncoder, caches: ContextCaches, events: Events, *, ttl: float
    ) -> None:
        """``ttl``: the seconds that an answer lives from its last use, where a request does not
        say."""
        self._encoder = encoder
        self._caches = caches
        self._events = events
        self._ttl = ttl
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-keep")

    def watch(self, sink: Sink, wanted: KeepRequest, *, tenant: str, salt: str) -> Sink:
        """Return a sink for the events of a request's choices, which passes them on, the last one
        of the first choice when its answer is kept."""
        texts: list[str] = []

        def finish(choice: int, finished: Finished) -> None:
            kept = self._keep(finished, "".join(texts), wanted, tenant, salt)
            self._events.publish(AnswerKept(tenant, kept.id is not None))
            sink(choice, replace(finished, answer_kv=None, kept=kept))

        def take(choice: int, event: GenerationEvent) -> None:
            if choice == 0 and isinstance(event, Finished) and event.reason != "cancelled":
                self._thread.submit(finish, choice, event)
                return
            if choice == 0 and isinstance(event, Delta):
                texts.append(event.text)
            sink(choice, event)

        return take

    def close(self) -> None:
        """Finish the answers under way, and keep no more. Idempotent."""
        self._thread.shutdown()

    def _keep(
        self, finished: Finished, text: str, wanted: KeepRequest, tenant: str, salt: str
    ) -> KeptAnswer:
        try:
            if finished.answer_kv is None:
                return KeptAnswer(
                    None,
                    reason="Some of its KV was gone, or that of other answers took all room.",
                )
            cut = finished.reason != "stop"
            return self._entered(finished.answer_kv, text, cut, wanted, tenant, salt)
        except KVLinkerError as error:
            return KeptAnswer(None, reason=error.message)
        except Exception:
            logger.exception("An answer could not be kept")
            return KeptAnswer(None, reason="It could not be stored; see the server's log.")

    def _entered(
        self,
        answer: AnswerKV,
        text: str,
        cut: bool,
        wanted: KeepRequest,
        tenant: str,
        salt: str,
    ) -> KeptAnswer:
        begin, end = 0, len(answer.tokens)
        if wanted.part == "answer":
            reader = wanted.reader()
            said = AnswerParts.of([*reader.feed(text), *reader.finish(cut=cut)])
            found = self._find(answer.tokens, said)
            if found is None:
                return KeptAnswer(
                    None,
                    reason="Its text has no tokens of its own: keep 'all' of it.",
                )
            begin, end = found
            text = said.content
        if begin == end:
            return KeptAnswer(None, reason="It says nothing.")
        chunk = Chunk(
            tuple(answer.tokens[begin:end].tolist()),
            (*answer.prompt.tolist(), *answer.tokens[:begin].tolist()),
            salt=salt,
            origin=Origin.LINKED_ANSWER if answer.linked else Origin.ANSWER,
            scored=False,
        )
        cache = self._caches.creation.keep_answer(
            chunk,
            answer.part(begin, end),
            text=text,
            owner=tenant,
            ttl=wanted.ttl or self._ttl,
        )
        if cache is None:
            return KeptAnswer(None, reason="There is no room for it in the tenant's quota.")
        return KeptAnswer(cache.id, cache.tokens)

    def _find(self, tokens: NDArray[np.int64], said: AnswerParts) -> tuple[int, int] | None:
        """Return which of the sampled tokens are the answer's text; None if these are not tokens of
        their own: a stop string began within one, or they have special tokens between them."""
        if not said.content:
            return 0, 0
        texts = self._encoder.token_texts(tokens.tolist())
        whole = "".join(texts)
        try:
            content: Sequence[int] = self._encoder.encode_data(said.content, param="content")
        except InvalidRequestError:
            content = ()
        behind = whole.find(said.reasoning) + len(said.reasoning)  # calls may quote the text
        ends = np.cumsum([0, *map(len, texts)])
        for start in _positions(tokens, np.asarray(content, dtype=np.int64)):
            if ends[start] >= behind:
                return start, start + len(content)
        return (0, len(tokens)) if whole.strip() == said.content.strip() else None


def _positions(tokens: NDArray[np.int64], part: NDArray[np.int64]) -> Sequence[int]:
    """Return where ``part`` begins in ``tokens``, ascending; nowhere if it is empty."""
    if not 0 < len(part) <= len(tokens):
        return ()
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(part))
    found: list[int] = np.flatnonzero((windows == part).all(axis=1)).tolist()
    return found
