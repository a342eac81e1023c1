import hashlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import InvalidRequestError, ModelLoadError
from kvlinker.base.types.chunks import Chunk, GenerationContext
from kvlinker.base.types.messages import ChatMessage
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from tests.prompting import templates
from tests.properties import examples
from tests.toy_tokenizers import byte_level, metaspace

CONTEXTS = list(GenerationContext)
TEMPLATES = {
    "chatml": templates.CHATML,
    "trimming": templates.TRIMMING,
    "alternating": templates.ALTERNATING,
    "reordering": templates.REORDERING,
}
BUILDERS = {
    name: PromptBuilder(byte_level(), context=GenerationContext.ALONE, chat_template=template)
    for name, template in TEMPLATES.items()
}
TOKENIZERS = {
    "byte_level": byte_level(),
    **{kind: metaspace(kind) for kind in ("first", "always", "prepend")},
}


def builder(template: str | None = templates.CHATML, **options: Any) -> PromptBuilder:
    return PromptBuilder(
        byte_level(), chat_template=template, **{"context": GenerationContext.ALONE} | options
    )


def user(*content: str | Chunk) -> ChatMessage:
    return ChatMessage("user", content)


def assert_well_formed(prompt: Prompt) -> None:
    """No empty segments, no two fresh ones in a row, and each span shows its chunk's tokens."""
    fresh = [isinstance(segment, FreshSegment) for segment in prompt.segments]
    assert not any(a and b for a, b in pairwise(fresh))
    assert all(segment.tokens for segment in prompt.segments)
    for chunk, span in zip(prompt.chunks, prompt.spans, strict=True):
        assert tuple(prompt.tokens[span.start : span.end].tolist()) == chunk.tokens


words = st.sampled_from([*"abc ?\n\té😀", "the cat", "<|end|>", "<s>", "chunk0z", "</think>"])
texts = st.lists(words, max_size=6).map("".join)
chunk_indices = st.integers(0, 3)
contents = st.lists(texts | chunk_indices, min_size=1, max_size=5)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@examples(25)
@given(data=st.lists(texts, min_size=1, max_size=5))
def test_text_alone_gives_what_the_tokenizer_gives(
    name: str, tokenizer: str, data: list[str]
) -> None:
    own = TOKENIZERS[tokenizer]
    built = PromptBuilder(own, context=GenerationContext.ALONE, chat_template=TEMPLATES[name])
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(data)
    ]
    expected = own.apply_chat_template(
        messages, chat_template=TEMPLATES[name], add_generation_prompt=True, return_dict=False
    )
    if expected:
        prompt = built.chat([ChatMessage(m["role"], (m["content"],)) for m in messages])
        assert prompt.tokens.tolist() == expected


@pytest.mark.parametrize("name", TEMPLATES)
@examples(60)
@given(data=st.lists(contents, min_size=1, max_size=4), context=st.sampled_from(CONTEXTS))
def test_chunks_stand_anywhere_with_the_templates_text_around_them(
    name: str, data: list[list[str | int]], context: GenerationContext
) -> None:
    built = BUILDERS[name]
    chunks = [
        built.encode_chunk(text, context) for text in ("A document.", " x", "<|end|>\n", "😀")
    ]
    messages = []
    shown = []
    for i, content in enumerate(data):
        role = ("user", "assistant")[i % 2]
        messages.append(
            ChatMessage(role, tuple(chunks[p] if isinstance(p, int) else p for p in content))
        )
        shown.append(
            {"role": role, "content": "".join("@" if isinstance(p, int) else p for p in content)}
        )

    prompt = built.chat(messages)

    assert_well_formed(prompt)
    assert prompt.chunks == tuple(
        chunks[p] for content in data for p in content if isinstance(p, int)
    )
    seen = [
        "@" if isinstance(s, CachedSegment) else byte_level().decode(list(s.tokens))
        for s in prompt.segments
    ]
    assert "".join(seen) == byte_level().apply_chat_template(
        shown, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )


def test_a_template_may_move_chunks() -> None:
    built = BUILDERS["reordering"]
    rules, one, two = (built.encode_chunk(text) for text in ("rules", "one", "two"))
    prompt = built.chat(
        [ChatMessage("system", (rules,)), user(one), ChatMessage("assistant", ("Yes",)), user(two)]
    )
    assert prompt.chunks == (one, rules, two)
    assert_well_formed(prompt)


def test_the_same_chunk_may_stand_twice() -> None:
    chunk = BUILDERS["chatml"].encode_chunk("again")
    prompt = BUILDERS["chatml"].chat([user(chunk, chunk, " and ", chunk)])
    assert prompt.chunks == (chunk, chunk, chunk)
    assert_well_formed(prompt)


@pytest.mark.parametrize("kind", ["first", "always", "prepend"])
def test_no_space_appears_after_a_chunk(kind: str) -> None:
    tokenizer = metaspace(kind)
    built = PromptBuilder(
        tokenizer, context=GenerationContext.ALONE, chat_template=templates.REORDERING
    )
    chunk = built.encode_chunk("the cat")
    prompt = built.chat([user(chunk, "sat ", chunk, " on")])
    middle, end = (s for s in prompt.segments[1:] if isinstance(s, FreshSegment))
    assert "".join(tokenizer.convert_ids_to_tokens(list(middle.tokens))) == "sat▁"
    assert tokenizer.decode([0, *end.tokens]).removeprefix("<unk>") == " on [/INST]"


def test_names_reach_the_template() -> None:
    built = builder(templates.WITH_NAMES)
    prompt = built.chat([ChatMessage("user", ("hi",), name="ann"), user("ho")])
    assert byte_level().decode(prompt.tokens.tolist()) == "ann: hi\nuser: ho\n"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_template_without_names_leaves_them_out(role: str) -> None:
    built = BUILDERS["chatml"]
    named, plain = (built.chat([ChatMessage(role, ("hi",), name=name)]) for name in ("ann", None))
    assert named.tokens.tolist() == plain.tokens.tolist()


def test_a_user_cannot_write_the_word_that_stands_for_a_chunk() -> None:
    """Not even one who knows how it was made for the same conversation without that word."""
    built = BUILDERS["chatml"]
    chunk = built.encode_chunk("a cat")
    digest = hashlib.sha256()
    for text in ("user", "", "x"):
        digest.update(text.encode() + b"\n")
    guess = f"chunk{digest.hexdigest()[:32]}n0z"
    prompt = built.chat([user(chunk, guess)])
    assert len(prompt.chunks) == 1
    assert guess in byte_level().decode(prompt.tokens.tolist())


class TestPrefix:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_first_chunk_of_a_chat_is_exact(self, name: str) -> None:
        built = builder(TEMPLATES[name], context=GenerationContext.PREFIX)
        first, second = built.encode_chunk("A document."), built.encode_chunk("Another.")
        prompt = built.chat([user(first, second, "Why?")])
        assert [span.exact for span in prompt.spans] == [True, False]
        assert first.prefix == built.prefix == prompt.segments[0].tokens

    def test_with_system_prompt(self) -> None:
        built = builder(context=GenerationContext.PREFIX, system_prompt="Be brief.")
        chunk = built.encode_chunk("A document.")
        assert (
            byte_level().decode(list(chunk.prefix))
            == "<|start|>system\nBe brief.<|end|>\n<|start|>user\n"
        )
        assert built.chat([user(chunk)]).spans[0].exact
        assert not built.chat([ChatMessage("system", ("Be long.",)), user(chunk)]).spans[0].exact
        assert not built.chat([user("See: ", chunk)]).spans[0].exact

    @pytest.mark.parametrize("kind", ["first", "always", "prepend"])
    def test_with_tokenizers_that_put_spaces_before_text(self, kind: str) -> None:
        built = PromptBuilder(
            metaspace(kind), context=GenerationContext.PREFIX, chat_template=templates.REORDERING
        )
        assert built.chat([user(built.encode_chunk("A document."), "Why?")]).spans[0].exact

    def test_chunk_in_a_system_message_is_exact_behind_the_header_alone(self) -> None:
        built = builder(
            "{% for m in messages %}{{ m.content }}{% endfor %}", context=GenerationContext.PREFIX
        )
        assert built.prefix == ()
        assert (
            built.chat([ChatMessage("system", (built.encode_chunk("A document."),))]).spans[0].exact
        )


class TestSystemPrompt:
    def test_stands_before_conversations_without_one(self) -> None:
        with_system = [ChatMessage("system", ("Be brief.",)), user("Hi")]
        assert builder(system_prompt="Be brief.").chat([user("Hi")]) == builder().chat(with_system)

    @pytest.mark.parametrize("role", ["system", "developer"])
    def test_gives_way_to_the_conversations_own(self, role: str) -> None:
        messages = [ChatMessage(role, ("Be long.",)), user("Hi")]
        assert builder(system_prompt="Be brief.").chat(messages) == builder().chat(messages)


MISTAKES: list[tuple[str | None, list[ChatMessage], str]] = [
    (templates.CHATML, [], "at least one message"),
    (templates.CHATML, [user("\ud800")], r"lone surrogate U\+D800"),
    (templates.CHATML, [ChatMessage("us\udfffer", ("Hi",))], "lone surrogate"),
    (templates.CHATML, [ChatMessage("user", ("Hi",), name="\ud800")], "lone surrogate"),
    (None, [user("Hi")], "no chat template.*completion"),
    (templates.ALTERNATING, [user("a"), user("b")], "roles must alternate"),
    (
        templates.ALTERNATING,
        [ChatMessage("system", ("a",)), user("b")],
        "System role not supported",
    ),
    ("{{ messages[0].content + 1 }}", [user("a")], "does not accept these messages"),
    ("{{ messages[0].content.a.b }}", [user("a")], "does not accept these messages"),
    ("", [user("a")], "encodes to no tokens"),
    (templates.LAST_ONLY, [user(Chunk((9,))), user("b")], "shows 0 of 1 context caches"),
    (templates.REPEATING, [user("a", Chunk((9,)))], "shows 1 of 1 context caches, 2 times"),
    ("{{ messages[0].content | upper }}", [user(Chunk((9,)))], "shows 0 of 1 context caches"),
]


def test_errors(subtests: pytest.Subtests) -> None:
    for template, messages, message in MISTAKES:
        with subtests.test(message, template=template, messages=messages):
            with pytest.raises(InvalidRequestError, match=message) as caught:
                builder(template).chat(messages)
            assert caught.value.param == "messages"


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages | no_such_filter }}"])
def test_a_template_that_is_no_jinja_fails_at_once(template: str) -> None:
    with pytest.raises(ModelLoadError, match="not valid Jinja: line 1"):
        builder(template)
