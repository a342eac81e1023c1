"""Makes passages of a prompt's texts chunks in their places; no token id of the prompt changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.messages import Implicit, MarkedText, TextSource
from kvlinker.prompting.segments import Passage, Prompt
from kvlinker.service.context_caches import ContextCaches
from kvlinker.service.implicit.ahead import PassagesAhead
from kvlinker.service.implicit.caches import FoundChunk, ImplicitCaches, Recognizer
from kvlinker.service.implicit.structure import pieces_of


class _Placed(NamedTuple):
    """A passage of a prompt as a chunk, and its text."""

    chunk: Chunk
    text: MarkedText


_Places = Mapping[int, _Placed]
"""Passages by the positions in a prompt where they begin."""


class PassageLinker:
    """Finds passages in the texts of prompts and their context caches. A passage is linked if it
    has a context cache, or is to get one at once; others get theirs later, for the next prompt."""

    def __init__(
        self,
        caches: ContextCaches,
        implicit: ImplicitCaches,
        recognizer: Recognizer,
        ahead: PassagesAhead | None,
    ) -> None:
        """``ahead`` computes passages that were seen once; without it, they wait until they come
        again."""
        self._caches = caches
        self._implicit = implicit
        self._recognizer = recognizer
        self._ahead = ahead

    def link(
        self,
        prompt: Prompt,
        mode: Implicit,
        *,
        tenant: str,
        salt: str,
        keeps: bool,
        used: Collection[str],
    ) -> tuple[Prompt, dict[Chunk, FoundChunk]]:
        """Return the prompt with chunks in the places of passages, and their context caches.

        ``used`` are the ids of those that the prompt has already, which new ones do not evict.
        Without ``keeps``, nothing is entered or remembered, and the prompt is cut alike.
        """
        if not prompt.texts:
            return prompt, {}
        now, later = self._passages(prompt, mode, tenant=tenant, salt=salt, keeps=keeps)
        texts = {each.chunk: each.text for each in (*later.values(), *now.values())}
        found = self._implicit.find(tuple(texts), tenant=tenant)
        parts: dict[int, FoundChunk] = {}
        if keeps and mode is not Implicit.STRUCTURE:
            sought = later if mode is Implicit.MARKED else now
            unknown = {at: each for at, each in sought.items() if each.chunk not in found}
            parts, settled = self._parts(prompt, unknown, tenant=tenant, salt=salt)
            now, later = (
                {at: each for at, each in places.items() if at not in settled}
                for places in (now, later)
            )
        linked = {*found, *(each.chunk for each in now.values())}
        if keeps:
            texts = {each.chunk: each.text for each in (*later.values(), *now.values())}
            wanted = {chunk: text for chunk, text in texts.items() if chunk in linked}
            found = self._implicit.use(wanted, found, tenant=tenant, kept=used)
            linked = set(found)
            if self._ahead is not None and mode is not Implicit.MARKED and len(wanted) < len(texts):
                self._ahead.note(texts, tenant=tenant)
        chunks = {place: part.chunk for place, part in parts.items()}
        uses = {part.chunk: part for part in parts.values()}
        for place, (chunk, _) in (*later.items(), *now.items()):
            each = found.get(chunk)
            if each is None and chunk in linked:
                chunks[place] = chunk
            elif each is not None and self._is_of_use(each, prompt, place):
                chunks[place] = each.chunk
                uses[each.chunk] = each
        return prompt.with_chunks_at(chunks), uses

    def is_lost_answer(self, found: FoundChunk) -> bool:
        """Return whether this is a kept answer whose KV is gone. To compute that anew takes all of
        the conversation before it; its tokens alone, as a part of the prompt, are exact."""
        return found.chunk.contextual and self._caches.tier(found.cache) is None

    def _is_of_use(self, found: FoundChunk, prompt: Prompt, place: int) -> bool:
        """Return whether to link a chunk at a position: not a kept answer that follows its own
        prompt, which is a conversation that goes on and is reused as it was computed."""
        if not found.chunk.contextual:
            return True
        is_at_home = list(found.chunk.prefix) == prompt.tokens[:place].tolist()
        return not is_at_home and not self.is_lost_answer(found)

    def _parts(
        self, prompt: Prompt, passages: _Places, *, tenant: str, salt: str
    ) -> tuple[dict[int, FoundChunk], set[int]]:
        """Return the context caches of parts of chunks whose texts have other tokens at their edges
        in the prompt, by the positions where they begin; and the positions of passages that are
        either linked so, or stay text."""
        parts: dict[int, FoundChunk] = {}
        settled: set[int] = set()
        for place, (chunk, text) in passages.items():
            part = self._implicit.find_part(text.text, chunk.tokens, salt=salt, tenant=tenant)
            if part is None:
                continue
            start = place + part.skipped
            found = FoundChunk(part.chunk, part.whole.cache, created=False)
            if self._is_of_use(found, prompt, start):
                kept = self._implicit.keep_part(part, text.text, tenant=tenant)
                parts |= {} if kept is None else {start: kept}
            if start in parts or part.chunk.contextual:
                settled.add(place)
        return parts, settled

    def _passages(
        self, prompt: Prompt, mode: Implicit, *, tenant: str, salt: str, keeps: bool
    ) -> tuple[_Places, _Places]:
        """Return the passages that are to get context caches at once, and the others."""
        if mode is Implicit.MARKED:
            answers = self._recognizer.find_answers(prompt.texts, tenant=tenant, salt=salt)
            return {}, self._placed(prompt, answers.chunks, TextSource.RECOGNITION, salt)
        if mode is Implicit.AUTO:
            read = self._recognizer.read(prompt.texts, tenant=tenant, salt=salt, notes=keeps)
            now, later = (
                self._placed(prompt, passages, TextSource.RECOGNITION, salt)
                for passages in (read.chunks, read.new)
            )
            return now, later
        pieces = self._placed(prompt, pieces_of(prompt.texts), TextSource.STRUCTURE, salt)
        if self._ahead is not None:
            return {}, pieces
        contents = [piece.chunk.content for piece in pieces.values()]
        seen = self._recognizer.seen_before(contents, tenant=tenant, salt=salt, notes=keeps)
        again = {at: piece for at, piece in pieces.items() if piece.chunk.content in seen}
        return again, pieces

    def _placed(
        self, prompt: Prompt, passages: Iterable[Passage], source: TextSource, salt: str
    ) -> _Places:
        """Return the passages that can be chunks."""
        places: dict[int, _Placed] = {}
        for passage in passages:
            first, last = passage.tokens
            chunk = self._implicit.within(prompt.tokens[first:last].tolist(), salt)
            if chunk is not None:
                places[first] = _Placed(chunk, MarkedText(passage.text, source=source))
        return places
