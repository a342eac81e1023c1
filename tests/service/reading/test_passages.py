"""Passages of a prompt's texts become chunks, and no token id of the prompt is another for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import Events
from kvlinker.base.types.chunks import Chunk, ContextCache, GenerationContext, Origin
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    Document,
    Implicit,
    MarkedText,
    TemplateOptions,
    TextSource,
)
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker.service.audit.policy_manager import PolicyManager
from kvlinker.service.implicit.caches import FoundChunk, Recognizer
from kvlinker.service.reading import ContentReader, ReadOptions
from kvlinker.settings import load_settings
from tests.agent_bodies import TOOLS, body, history, source, tool, turn
from tests.prompting.templates import CHATML, TRIMMING
from tests.properties import examples
from tests.service.implicit.test_recognition import Catalog
from tests.service.implicit.test_seen_lines import document
from tests.toy_tokenizers import byte_level, metaspace, unigram, word_level

TOOLS_BEHIND = (
    "{% if messages[0].role == 'system' %}{{ '<|start|>system\n' + messages[0].content }}{% endif"
    " %}{% if tools %}\n\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor"
    " %}\n</tools>{% endif %}<|end|>\n{% for m in messages %}{% if m.role != 'system' %}{{"
    " '<|start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}\n{{"
    " call.function | tojson }}{% endfor %}<|end|>\n{% endif %}{% endfor %}<|start|>assistant\n"
)
"""Puts definitions of tools behind the system prompt, as Qwen does."""


class Kept:
    """Implicit context caches of token ids; ``known`` has those that exist by content and salt."""

    def __init__(self, *, knows_all: bool = False) -> None:
        self.known: dict[tuple[str, str], Chunk] = {}
        self.knows_all = knows_all

    def encode(self, text: str, salt: str = "") -> Chunk | None:
        return None

    def within(self, ids: Sequence[int], salt: str = "") -> Chunk | None:
        return Chunk(tuple(ids), salt=salt) if ids else None

    def find(self, chunks: Sequence[Chunk], *, tenant: str) -> dict[Chunk, FoundChunk]:
        if self.knows_all:
            self.known |= {(chunk.content, chunk.salt): chunk for chunk in chunks}
        return {
            chunk: self._found(self.known[chunk.content, chunk.salt], False)
            for chunk in chunks
            if (chunk.content, chunk.salt) in self.known
        }

    def use(
        self,
        texts: Mapping[Chunk, MarkedText],
        known: Mapping[Chunk, FoundChunk],
        *,
        tenant: str,
        kept: Sequence[str] = (),
    ) -> dict[Chunk, FoundChunk]:
        new = {(chunk.content, chunk.salt): chunk for chunk in texts if chunk not in known}
        self.known |= new
        return {chunk: known.get(chunk) or self._found(chunk, True) for chunk in texts}

    def find_part(self, text: str, ids: Sequence[int], *, salt: str, tenant: str) -> None:
        pass

    def extend(self, caches: Mapping[ContextCache, float | None]) -> None:
        pass

    def _found(self, chunk: Chunk, created: bool) -> FoundChunk:
        cache = ContextCache(f"cc_{chunk.content}", "anna", "tiny", "f", chunk, "key", 0.0)
        return FoundChunk(chunk, cache, created)


class Ahead:
    """Computes at once what it is told of; ``texts`` has all that."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.texts: dict[Chunk, MarkedText] = {}

    def note(self, texts: Mapping[Chunk, MarkedText], *, tenant: str) -> None:
        self.texts |= texts
        self._kept.use(texts, {}, tenant=tenant)


def reader(
    kept: Kept,
    *,
    tokenizer: Any = None,
    template: str = TOOLS_BEHIND,
    ahead: Ahead | None = None,
    caches: Any = None,
) -> tuple[ContentReader, PromptBuilder]:
    built = PromptBuilder(
        tokenizer or byte_level(), context=GenerationContext.ALONE, chat_template=template
    )
    engine: Any = None
    policies = PolicyManager(
        load_settings(policy="row"), engine, Events(), model="tiny", decode=str
    )
    catalog: Any = Catalog()
    recognizer = Recognizer(catalog, built.encoder, Events(), fingerprint="model")
    implicit, made_ahead = [_any(each) for each in (kept, ahead)]
    return (
        ContentReader(built, caches, implicit, recognizer, policies, Implicit.MARKED, made_ahead),
        built,
    )


def _any(value: object) -> Any:
    return value


def how(implicit: Implicit, **options: Any) -> ReadOptions:
    return ReadOptions("anna", implicit=implicit, **options)


def read(
    reading: ContentReader, asked: Mapping[str, Any], implicit: Implicit, **options: Any
) -> Prompt:
    """Read a body of an agent."""
    messages: list[ChatMessage[CachedPart]] = [
        ChatMessage(
            each["role"],
            (each["content"],),
            fields={"tool_calls": each["tool_calls"]} if "tool_calls" in each else {},
        )
        for each in asked["messages"]
    ]
    tools = TemplateOptions(tools=tuple(asked["tools"]))
    return reading.chat(messages, how(implicit, **options), options=tools).prompt


PARTS = st.sampled_from(
    [
        '{"a": {"b": {}}}', "}}\n", "}}}\n\n", "\n", "\n\n", "\r\n", " ", "the cat sat. ",
        document("a"), document("b"), "# Title\n\n", "<|end|>", "日本\n", "  indented\n", "---\n",
    ]
)  # fmt: skip
TEXTS = st.lists(PARTS, max_size=8).map("".join)
READERS = [
    reader(Kept(knows_all=True), tokenizer=tokenizer, template=template)[0]
    for tokenizer in (
        byte_level(),
        metaspace("first"),
        metaspace("prepend"),
        word_level(),
        unigram(),
    )
    for template in (TOOLS_BEHIND, CHATML, TRIMMING)
]


@given(st.sampled_from(READERS), st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 2))
@examples(300)
def test_chunks_never_change_the_tokens_of_a_prompt(
    reading: ContentReader, texts: list[str], tools: int
) -> None:
    """Whatever is found, and everything that is found is known here."""
    asked = {
        "messages": [{"role": "user", "content": text} for text in texts],
        "tools": [tool(name, does) for name, does in list(TOOLS.items())[:tools]],
    }
    plain = read(reading, asked, Implicit.OFF)
    for implicit in (Implicit.AUTO, Implicit.STRUCTURE, Implicit.STRUCTURE, Implicit.AUTO):
        told = read(reading, asked, implicit)
        assert told.tokens.tolist() == plain.tokens.tolist()
        assert told.texts == ()


def test_marks_and_documents_are_plain_text_in_a_structure() -> None:
    reading, _ = reader(Kept(knows_all=True))
    marked = MarkedText("the cat " * 100), MarkedText("a dog " * 100)
    plain, told = (
        reading.chat(
            [ChatMessage("user", (marked[0], "Who?"))],
            how(implicit),
            [Document(marked[1], {"title": "Dogs"})],
            TemplateOptions(tools=({**tool("f", "does"), "cache_control": {"type": "ephemeral"}},)),
        ).prompt
        for implicit in (Implicit.OFF, Implicit.STRUCTURE)
    )
    assert told.tokens.tolist() == plain.tokens.tolist()
    assert len(told.chunks) > 2
    texts = tuple(marked)
    completed = [
        reading.completion(texts, how(implicit)).prompt
        for implicit in (Implicit.OFF, Implicit.STRUCTURE)
    ]
    assert completed[0].tokens.tolist() == completed[1].tokens.tolist()
    assert completed[1].chunks


def test_what_is_not_kept_is_cut_alike_and_enters_nothing() -> None:
    kept = Kept()
    ahead = Ahead(kept)
    reading, _ = reader(kept, ahead=ahead)
    asked = body(history(("cart",), "Add a discount."))
    for implicit in (Implicit.STRUCTURE, Implicit.AUTO):
        assert not read(reading, asked, implicit, keeps=False).chunks
        assert not ahead.texts
        assert not kept.known
    read(reading, asked, Implicit.STRUCTURE)
    told = read(reading, asked, Implicit.STRUCTURE, keeps=False)
    assert told.chunks
    assert told == read(reading, asked, Implicit.STRUCTURE)
    assert {text.source for text in ahead.texts.values()} == {TextSource.STRUCTURE}


def test_pieces_come_at_their_second_sight_where_nothing_is_computed_ahead() -> None:
    kept = Kept()
    reading, _ = reader(kept)
    asked = body(history(("cart",), "Add a discount."))
    told = [read(reading, asked, Implicit.STRUCTURE) for _ in range(2)]
    assert not told[0].chunks
    assert len(told[1].chunks) > len(TOOLS)
    assert not read(reading, asked, Implicit.STRUCTURE, salt="salt").chunks


def shares(asked: Sequence[Mapping[str, Any]], implicit: Implicit) -> list[float]:
    """Return the share of each prompt's tokens that a server may read, where what was new is
    computed ahead after each: its longest beginning with an earlier prompt, and chunks."""
    kept = Kept()
    reading, _ = reader(kept, ahead=Ahead(kept))
    earlier: list[list[int]] = []
    shares = []
    for each in asked:
        prompt = read(reading, each, implicit)
        tokens = prompt.tokens.tolist()
        begun = 0
        for other in earlier:
            pairs = zip(tokens, other, strict=False)
            begun = max(begun, next((n for n, (a, b) in enumerate(pairs) if a != b), len(other)))
        fresh, position = 0, 0
        for segment in prompt.segments:
            position += len(segment.tokens)
            if isinstance(segment, FreshSegment):
                fresh += min(len(segment.tokens), max(0, position - begun))
        shares.append(1 - max(1, fresh) / len(tokens))
        earlier.append(tokens)
    return shares


ASKED = history(("cart", "prices", "orders"), "Add a discount of ten percent to the cart.")
ELSEWHERE: dict[str, Any] = {
    "directory": "/srv/build/7f3a/other-project",
    "date": "2026-04-09",
    "status": "On branch fix-totals\nmodified: a.py\nmodified: b.py",
}


def test_an_agents_requests_are_read_in_another_repository_and_after_edits() -> None:
    said = [
        {"role": "assistant", "content": "The cart has no discount yet."},
        {"role": "user", "content": "Then add it to `total`, please."},
    ]
    edited = [*map(dict, ASKED)]
    edited[4]["content"] = edited[4]["content"].replace("step 3", "step three")
    compacted = [{"role": "user", "content": "Earlier, you read two files."}, *ASKED[5:]]
    first = [{"role": "user", "content": "Which of the tests fail?"}]
    read_again = [*first, *turn(0, "orders", source("orders"))]
    share = shares(
        [
            body(ASKED),
            body([*ASKED, *said]),
            body(edited),
            body(compacted),
            body(first, **ELSEWHERE),
            body(read_again, **ELSEWHERE),
            body(first, tools=dict(reversed(TOOLS.items())), **ELSEWHERE),
        ],
        Implicit.STRUCTURE,
    )
    new, goes_on, after_edit, after_compaction, elsewhere, known_file, reversed_tools = share
    assert new == pytest.approx(0)
    assert goes_on >= 0.98
    assert after_edit >= 0.9
    assert after_compaction >= 0.9
    assert elsewhere >= 0.85
    assert known_file >= 0.85
    assert reversed_tools >= 0.85


def test_auto_finds_the_same_tools_behind_another_system_prompt() -> None:
    share = shares([body(ASKED), body(ASKED, **ELSEWHERE), body(ASKED, **ELSEWHERE)], Implicit.AUTO)
    assert share[1] >= 0.7
    assert share[2] >= 0.98


class LostAnswers:
    """Context caches whose KV is in no tier, or in memory."""

    def __init__(self, tier: str | None) -> None:
        self._tier = tier

    def tier(self, cache: ContextCache) -> str | None:
        return self._tier


@pytest.mark.parametrize(("tier", "prefix", "linked"), [("host", (1,), 1), (None, (1,), 0)])
def test_kept_answers_are_linked_where_their_kv_is_there(
    tier: str | None, prefix: tuple[int, ...], linked: int
) -> None:
    kept = Kept()
    reading, built = reader(kept, caches=LostAnswers(tier))
    asked: Any = [
        ChatMessage("user", (document("a"),)),
        ChatMessage("assistant", (document("answer"),)),
    ]
    plain = reading.chat(asked, how(Implicit.OFF)).prompt
    answer = built.encoder.encode_data(document("answer"))
    kept.known[Chunk(answer).content, ""] = Chunk(answer, prefix, origin=Origin.ANSWER)
    catalog: Any = reading._passages._recognizer._catalog
    catalog.enter(document("answer"))
    told = reading.chat(asked, how(Implicit.AUTO)).prompt
    assert len(told.chunks) == linked
    assert told.tokens.tolist() == plain.tokens.tolist()
    position = plain.tokens.tolist().index(answer[0])
    at = next(
        place
        for place in range(position, len(plain))
        if tuple(plain.tokens[place : place + len(answer)].tolist()) == answer
    )
    home = tuple(plain.tokens[:at].tolist())
    kept.known[Chunk(answer).content, ""] = Chunk(answer, home, origin=Origin.ANSWER)
    assert not reading.chat(asked, how(Implicit.AUTO)).prompt.chunks, "the conversation goes on"
