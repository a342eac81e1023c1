"""Policies that choose among variants of chunks, against trying everything."""

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.chunk_scores import ContextChunk, Contextualization
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking import EmptyLibrary, Variant, parse_policy
from kvlinker.linking.policies.cachecraft import fix_overhead
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt

HEADS = ((), (1,))


class Shelf:
    """A library of the variants that a test names; ``asked`` counts how often it was asked."""

    def __init__(self, variants):
        self.known = variants
        self.asked = 0

    def variants(self, chunk):
        self.asked += 1
        return [v for v in self.known if v.chunk.tokens == chunk.tokens and v.chunk != chunk]

    def has(self, chunk):
        return chunk in [v.chunk for v in self.known]


@st.composite
def prompts(draw):
    """Up to four different chunks of one token each, fresh tokens between some, and variants of
    them."""
    count = draw(st.integers(1, 4))
    head = draw(st.sampled_from(HEADS))
    between = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    segments: list[FreshSegment | CachedSegment] = [FreshSegment(head)]
    for index in range(count):
        segments += [CachedSegment(Chunk((10 + index,))), FreshSegment((2,) * between[index])]
    prompt = Prompt((*segments, FreshSegment((3, 4))))
    places = draw(
        st.lists(st.tuples(st.permutations(range(count)), st.integers(0, count - 1)), max_size=8)
    )
    variants = []
    for order, place in places:
        old = prompt.with_chunks([prompt.chunks[index] for index in order])
        chunk = Chunk(old.chunks[place].tokens, tuple(old.tokens_before(place)))
        attention = draw(st.lists(st.integers(0, 5), min_size=place, max_size=place))
        context = tuple(ContextChunk(old.contents[j], 1, float(a)) for j, a in enumerate(attention))
        variants.append(Variant(chunk, Contextualization(1, 1.0, context)))
    return prompt, Shelf(variants)


def exact_head(prompt):
    """How many chunks at the start are exact."""
    exact = [span.exact for span in prompt.spans]
    return exact.index(False) if False in exact else len(exact)


def arrangements(prompt, shelf, orders):
    """Every order with every choice of KV."""
    for order in orders:
        for chunks in product(
            *[
                (prompt.chunks[i], *(v.chunk for v in shelf.variants(prompt.chunks[i])))
                for i in order
            ]
        ):
            yield prompt.with_chunks(chunks)


@given(prompts())
def test_prefix_takes_the_longest_exact_prefix(case):
    prompt, shelf = case
    arranged = parse_policy("prefix").arrange(prompt, shelf)
    assert arranged.tokens.tolist() == prompt.tokens.tolist()
    orders = [range(len(prompt.chunks))]
    assert exact_head(arranged) == max(
        exact_head(other) for other in arrangements(prompt, shelf, orders)
    )


@given(prompts())
def test_set_prefix_takes_the_longest_exact_prefix_of_any_order(case):
    prompt, shelf = case
    arranged = parse_policy("set-prefix").arrange(prompt, shelf)
    assert sorted(arranged.contents) == sorted(prompt.contents)
    orders = permutations(range(len(prompt.chunks)))
    best = max(exact_head(other) for other in arrangements(prompt, shelf, orders))
    assert exact_head(arranged) == best
    if not best:
        assert arranged == prompt


def test_set_prefix_tries_chunks_that_are_alike_once():
    """Each order of one text's many places is the same prompt: there are 40! of them."""
    copy, copies = Chunk((10,), (1,)), 40
    prompt = Prompt((FreshSegment((1,)), *[CachedSegment(copy)] * copies, FreshSegment((3,))))
    behind = [Variant(Chunk((10,), (1, *[10] * n)), Contextualization(1, 1.0)) for n in range(1, 9)]
    shelf = Shelf(behind)
    arranged = parse_policy("set-prefix").arrange(prompt, shelf)
    assert exact_head(arranged) == 1 + len(behind)
    assert arranged.tokens.tolist() == prompt.tokens.tolist()
    assert shelf.asked == copies


@pytest.mark.parametrize(("policy", "looks"), [("set-prefix", 1), ("cachecraft-1", 0)])
def test_what_no_variant_may_stand_behind_is_not_looked_at(monkeypatch, policy, looks):
    """Behind the template's header any chunk is exact, and to write out what stands before each of
    a thousand took seconds."""
    looked = []
    before = Prompt.tokens_before

    def counted(*at):
        looked.append(at)
        return before(*at)

    monkeypatch.setattr(Prompt, "tokens_before", counted)
    chunks = [CachedSegment(Chunk((10 + index, 11), (1,))) for index in range(1000)]
    prompt = Prompt((FreshSegment((1,)), *chunks, FreshSegment((3,))))
    shelf = Shelf([])
    assert parse_policy(policy).arrange(prompt, shelf) == prompt
    assert (len(looked), shelf.asked) == (looks, 1000)


@given(prompts())
def test_cachecraft_takes_the_lowest_overhead(case):
    prompt, shelf = case
    arranged = parse_policy("cachecraft-1").arrange(prompt, shelf)
    assert arranged.contents == prompt.contents
    known = {variant.chunk: variant.contextualization for variant in reversed(shelf.known)}
    for index, (chunk, original) in enumerate(zip(arranged.chunks, prompt.chunks, strict=True)):
        new = prompt.contents[:index]
        alone = Contextualization(1, 0.0)
        overheads = [
            fix_overhead(variant.contextualization, new) for variant in shelf.variants(original)
        ]
        best = min([fix_overhead(alone, new), *overheads])
        found = [known.get(chunk, alone)] + [
            v.contextualization for v in shelf.known if v.chunk == chunk
        ]
        assert best in [fix_overhead(contextualization, new) for contextualization in found]


@given(
    prompts(),
    st.sampled_from(["prefix", "set-prefix", "cachecraft-1", "prefix+legolink-1", "full"]),
)
def test_without_variants_nothing_changes(case, policy):
    prompt, _ = case
    if policy == "set-prefix" and not prompt.segments[0].tokens:
        policy = "prefix"  # a chunk that was computed alone may come to the start
    assert parse_policy(policy).arrange(prompt, EmptyLibrary()) == prompt
