"""Typed content becomes a prompt with chunks in the places of context caches and of marked
texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvlinker.base.errors import ContextCacheNotFoundError, ContextLengthError, InvalidRequestError
from kvlinker.base.events import Events
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import Chunk, LinkedCache
from kvlinker.base.types.messages import (
    ChatMessage,
    ContextCacheReference,
    Document,
    Implicit,
    MarkedText,
    TemplateOptions,
    TokenIds,
)
from kvlinker.linking import parse_policy
from kvlinker.service.audit.policy_manager import PolicyManager
from kvlinker.service.implicit.caches import FoundChunk
from kvlinker.service.reading import ContentReader, ReadOptions
from kvlinker.settings import load_settings
from kvlinker.store import ContextCache

ANNA = ReadOptions("anna")
ONE, TWO = ContextCacheReference("cc_1"), ContextCacheReference("cc_2")


def cache(cache_id: str, *tokens: int) -> ContextCache:
    return ContextCache(cache_id, "anna", "tiny", "fingerprint", Chunk(tokens), "key", 0.0)


class Caches:
    """Context caches as ``ContentReader`` asks for them: ``known`` by id. Notes what is asked."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = {cache_id: cache(cache_id, number) for number, cache_id in enumerate(known)}
        self.asked: list[tuple[str, ...]] = []

    def usable(self, cache_ids: Iterable[str], *, tenant: str) -> dict[str, ContextCache]:
        assert tenant == "anna"
        wanted = tuple(cache_ids)
        self.asked.append(wanted)
        for cache_id in wanted:
            if cache_id not in self.known:
                raise ContextCacheNotFoundError(cache_id)
        return {cache_id: self.known[cache_id] for cache_id in wanted}


class Implicits:
    """Implicit context caches: a text's chunk is its characters, and there is room for those that
    begin small."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.searches = 0

    def encode(self, text: str, salt: str = "") -> Chunk | None:
        return Chunk(tuple(map(ord, text))) if text else None

    def find(self, chunks: Sequence[Chunk], *, tenant: str) -> dict[Chunk, FoundChunk]:
        self.searches += 1
        texts = {chunk: "".join(map(chr, chunk.tokens)) for chunk in chunks}
        return {
            chunk: FoundChunk(chunk, cache(f"cc_{text}", *chunk.tokens), False)
            for chunk, text in texts.items()
            if text in self.entered
        }

    def use(
        self,
        texts: Mapping[Chunk, MarkedText],
        known: Mapping[Chunk, FoundChunk],
        *,
        tenant: str,
        kept: Sequence[str] = (),
    ) -> dict[Chunk, FoundChunk]:
        assert tenant == "anna"
        found = {chunk: known[chunk] for chunk in texts if chunk in known}
        for chunk, text in texts.items():
            if chunk in found:
                continue
            if text.text[0].islower():
                found[chunk] = FoundChunk(
                    chunk, cache(f"cc_{text.text}", *chunk.tokens), text.text not in self.entered
                )
                self.entered.append(text.text)
        return found

    def extend(self, caches: Mapping[ContextCache, float | None]) -> None:
        pass


class BuiltPrompt(list[Any]):
    """Messages and documents without texts; of definitions, one does not stand there just once."""

    texts = ()

    def __init__(self, messages: Any, documents: Any, definitions: Mapping[str, Chunk]) -> None:
        super().__init__([messages, documents])
        self.definitions = definitions
        parts = [chunk for text, chunk in definitions.items() if text != "twice"]
        parts += [document.text for document in documents]
        parts += [part for message in messages for part in message.content]
        self.chunks = [part for part in parts if isinstance(part, Chunk)]


class CompletionParts(tuple[Any, ...]):
    """The parts of a completion's prompt without texts."""

    texts = ()

    @property
    def chunks(self) -> list[Chunk]:
        return [part for part in self if isinstance(part, Chunk)]


class Limit:
    """Refuses long texts, and prompts of more than ``MOST`` parts."""

    MOST = 100

    def check_prompt(self, tokens: int) -> None:
        if tokens > self.MOST:
            raise ContextLengthError("too long", param="messages")

    def check_texts(self, texts: Sequence[str], *, param: str) -> None:
        if sum(map(len, texts)) > 1000:
            raise ContextLengthError("too long", param=param)


class Template:
    """Names functions, but for one that it does not show."""

    def definition(self, tool: Any) -> str | None:
        name: str = tool["function"]["name"]
        return None if name == "hidden" else name


class Builder:
    """Gives back what it is to build a prompt of; refuses chunks in messages of the role ``picky``,
    and makes long what holds "over". Notes the options."""

    def __init__(self) -> None:
        self.options: list[TemplateOptions] = []
        self.limit = Limit()
        self.template = Template()

    def chat(
        self,
        messages: Sequence[ChatMessage[Chunk]],
        documents: Sequence[Document[Chunk]] = (),
        *,
        options: TemplateOptions,
        definitions: Mapping[str, Chunk],
        with_texts: bool,
    ) -> Any:
        if any(
            message.role == "picky" and not isinstance(message.content[0], str)
            for message in messages
        ):
            raise InvalidRequestError("no", param="messages")
        self.options.append(options)
        built = BuiltPrompt(list(messages), list(documents), definitions)
        if "over" in repr(built):
            built += ["over"] * Limit.MOST
        return built

    def completion(
        self, prompt: Any, *, special_tokens: bool = True, with_texts: bool = False
    ) -> Any:
        return CompletionParts(prompt)


class Finder:
    """A recognizer of a tenant that keeps no answers, in whose prompts seven tokens come again."""

    def keeps_answers(self, tenant: str) -> bool:
        assert tenant == "anna"
        return False

    def notice(self, texts: Any, *, tenant: str, salt: str) -> Any:
        assert tenant == "anna"
        return [SimpleNamespace(tokens=(3, 10))]


def reader(
    *ids: str,
    policy: str = "legolink-4",
    implicit_policy: str | None = "naive",
    steered: Callable[[], str] | None = None,
) -> tuple[Any, Caches, Implicits]:
    """A ContentReader, whose prompts are what its builder was given. ``steered`` names the default
    policy where a quality target moves it."""
    settings = load_settings(policy=policy, implicit_policy=implicit_policy)
    engine: Any = None
    policies: Any = PolicyManager(settings, engine, Events(), model="tiny", decode=str)
    if steered is not None:
        policies.controller = SimpleNamespace(policy=lambda tenant: parse_policy(steered()))
    builder: Any = Builder()
    caches: Any = Caches(ids)
    implicit: Any = Implicits()
    finder: Any = Finder()
    made: Any = ContentReader(builder, caches, implicit, finder, policies, Implicit.MARKED)
    return made, caches, implicit


def test_chunks_take_the_places_of_references() -> None:
    reading, caches, _ = reader("cc_1", "cc_2")
    messages = [ChatMessage("system", (TWO, "a", ONE)), ChatMessage("user", ("b", TWO), "ann")]
    read = reading.chat(messages, ANNA)
    assert read.prompt[0] == [
        ChatMessage("system", (Chunk((1,)), "a", Chunk((0,)))),
        ChatMessage("user", ("b", Chunk((1,))), "ann"),
    ]
    assert read.linked == (
        LinkedCache("cc_2", 1, False),
        LinkedCache("cc_1", 1, False),
    ), "in the order of the prompt"
    assert read.ids == {Chunk((1,)).content: "cc_2", Chunk((0,)).content: "cc_1"}
    assert caches.asked == [("cc_2", "cc_1")], "once, and each id once"
    assert reading.completion((ONE, "a"), ANNA).prompt == (Chunk((0,)), "a")


def test_content_without_context_caches_asks_for_none() -> None:
    reading, caches, _ = reader()
    assert reading.chat([ChatMessage("user", ("a",))], ANNA).prompt[0] == [
        ChatMessage("user", ("a",))
    ]
    assert reading.completion(("a",), ANNA).prompt == ("a",)
    assert reading.completion(TokenIds((1,)), ANNA).prompt == (1,)
    assert caches.asked == []


def test_the_first_place_of_an_unknown_id_is_named() -> None:
    reading, _, _ = reader("cc_1")
    messages = [
        ChatMessage("user", (ONE,)),
        ChatMessage("user", ("a", ONE, TWO)),
        ChatMessage("user", (TWO,)),
    ]
    with pytest.raises(ContextCacheNotFoundError) as caught:
        reading.chat(messages, ANNA)
    assert (caught.value.cache_id, caught.value.param) == ("cc_2", "messages.1.content.2.id")
    with pytest.raises(ContextCacheNotFoundError) as caught:
        reading.completion(("a", TWO), ANNA)
    assert caught.value.param == "prompt.1.id"


def test_chunks_take_the_places_of_marked_texts() -> None:
    reading, _, implicit = reader()
    content = (MarkedText("x"), "and", MarkedText("Y"), MarkedText("", 5.0))
    read = reading.completion(content, ANNA)
    assert read.prompt == (Chunk((120,)), "and", "Y", ""), "what there is no room for is text"
    assert read.linked == (LinkedCache("cc_x", 1, True),)
    assert reading.completion(content, ANNA).linked == (LinkedCache("cc_x", 1, False),)
    assert implicit.searches == 2, "once for each prompt"
    document = Document(MarkedText("z"), {"title": "Z"})
    read = reading.chat([ChatMessage("user", ("a", MarkedText("x")))], ANNA, [document])
    assert read.prompt[1] == [Document(Chunk((122,)), {"title": "Z"})]
    assert [each.id for each in read.linked] == ["cc_z", "cc_x"]


MARK = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}


def tool(name: str, **marks: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}, **marks}


def test_marked_definitions_of_tools_become_chunks() -> None:
    """What the template does not show just once stays text, and is not told of."""
    reading, _, implicit = reader()
    names = ("marked", "hidden", "twice")
    tools = (tool("plain"), *(tool(name, **MARK) for name in names))
    read = reading.chat([ChatMessage("user", ("a",))], ANNA, options=TemplateOptions(tools=tools))
    assert list(read.prompt.definitions) == ["marked", "twice"]
    assert [each.id for each in read.linked] == ["cc_marked"]
    assert implicit.entered == ["marked", "twice"]
    (options,) = reading._builder.options
    assert options.tools == tuple(tool(name) for name in ("plain", *names)), (
        "templates know nothing of marks"
    )


@pytest.mark.parametrize("implicit", list(Implicit))
def test_a_wrong_mark_of_a_tool_is_refused(implicit: str) -> None:
    reading, _, _ = reader()
    options = TemplateOptions(tools=(tool("f"), tool("g", cache_control={"type": "forever"})))
    with pytest.raises(InvalidRequestError, match="'ephemeral'") as refused:
        reading.chat(
            [ChatMessage("user", ("a",))],
            ReadOptions("anna", implicit=Implicit(implicit)),
            options=options,
        )
    assert refused.value.param == "tools.1"


@pytest.mark.parametrize(
    "how",
    [
        ReadOptions("anna", implicit=Implicit.OFF),
        ReadOptions("anna", implicit=Implicit.STRUCTURE),
        ReadOptions("anna", policy=parse_policy("full")),
    ],
)
def test_marks_may_mean_nothing(how: ReadOptions) -> None:
    reading, _, implicit = reader("cc_1")
    read = reading.completion((MarkedText("x"), ONE), how)
    assert read.prompt == ("x", Chunk((0,)))
    assert implicit.entered == []


def test_what_is_not_kept_is_cut_alike() -> None:
    reading, _, implicit = reader()
    read = reading.completion((MarkedText("x"), "and"), ReadOptions("anna", keeps=False))
    assert (read.prompt, read.linked, implicit.entered) == ((Chunk((120,)), "and"), (), [])


def test_what_the_template_does_not_take_is_text() -> None:
    reading, _, _ = reader("cc_1")
    read = reading.chat(
        [ChatMessage("picky", (MarkedText("x"),)), ChatMessage("user", (ONE,))], ANNA
    )
    assert read.prompt[0] == [ChatMessage("picky", ("x",)), ChatMessage("user", (Chunk((0,)),))]
    assert [each.id for each in read.linked] == ["cc_1"]
    with pytest.raises(InvalidRequestError):
        reading.chat([ChatMessage("picky", (ONE,))], ANNA)


@pytest.mark.parametrize(
    ("options", "noticed"),
    [
        ({}, True),
        ({"implicit": Implicit.OFF}, True),
        ({"implicit": Implicit.AUTO}, False),
        ({"implicit": Implicit.STRUCTURE}, False),
        ({"policy": parse_policy("full")}, False),
        ({"keeps": False}, False),
    ],
)
def test_texts_that_would_be_found_are_counted_where_they_are_not_looked_for(
    options: dict[str, Any], noticed: bool
) -> None:
    reading, _, _ = reader()
    read = reading.completion(("a", "b"), ReadOptions("anna", **options))
    assert read.reusable == (7 if noticed else 0)
    assert read.reusable_of(Usage(0, 0, 1)) == min(1, read.reusable), "no more than are fresh"


@pytest.mark.parametrize(
    ("content", "asked", "policy"),
    [
        (("a",), None, "legolink-4"),
        ((MarkedText("x"),), None, "naive"),
        ((MarkedText("X"),), None, "legolink-4"),
        ((MarkedText("x"), ONE), None, "legolink-4"),
        ((MarkedText("x"), ONE), "legolink-8", "legolink-8"),
    ],
)
def test_which_policy_applies(content: Any, asked: str | None, policy: str) -> None:
    reading, _, _ = reader("cc_1")
    how = ReadOptions("anna", policy=parse_policy(asked) if asked else None)
    assert reading.completion(content, how).policy.name == policy


@pytest.mark.parametrize(
    ("implicit_policy", "entered", "policy"),
    [
        (None, ["x"], "query-5"),
        ("legolink-4", ["x"], "legolink-4"),  # it stays, although the default policy was the same
        ("full", [], "query-5"),
    ],
)
def test_what_applies_to_marked_texts_once_the_default_policy_has_moved(
    implicit_policy: str | None, entered: list[str], policy: str
) -> None:
    now = ["legolink-4"]
    reading, _, implicit = reader("cc_1", implicit_policy=implicit_policy, steered=lambda: now[0])
    now[0] = "query-5"
    read = reading.completion((MarkedText("x"),), ANNA)
    assert (implicit.entered, read.policy.name) == (entered, policy)
    assert reading.completion((ONE,), ANNA).policy.name == "query-5"


@pytest.mark.parametrize(("steered", "entered"), [(True, ["x"]), (False, [])])
def test_a_default_policy_that_was_raised_to_full_still_links_marked_texts(
    steered: bool, entered: list[str]
) -> None:
    controller = (lambda: "full") if steered else None
    reading, _, implicit = reader(policy="full", implicit_policy=None, steered=controller)
    assert reading.completion((MarkedText("x"),), ANNA).policy.name == "full"
    assert implicit.entered == entered


def test_texts_that_are_too_long_together_are_refused_before_they_are_encoded() -> None:
    reading, _, implicit = reader()
    parts = tuple(MarkedText(f"{number:d}" * 300) for number in range(3))
    documents = [Document(MarkedText("d" * 300))]
    with pytest.raises(ContextLengthError) as caught:
        reading.chat([ChatMessage("user", parts)], ANNA, documents)
    assert caught.value.param == "messages"
    with pytest.raises(ContextLengthError) as caught:
        reading.completion((*parts, MarkedText("d" * 300)), ANNA)
    assert caught.value.param == "prompt"
    assert not implicit.entered


def test_nothing_is_entered_for_a_prompt_that_is_refused() -> None:
    reading, _, implicit = reader()
    with pytest.raises(ContextLengthError):
        reading.chat([ChatMessage("user", (MarkedText("marked"), "over"))], ANNA)
    assert not implicit.entered
