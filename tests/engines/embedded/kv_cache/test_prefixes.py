"""What later requests reuse of earlier ones: the tree of what was computed, and answers that do not
depend on it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.embedded.kv_cache import paths, prefixes
from kvlinker.engines.embedded.kv_cache.paths import PathChunk, SequencePath, linked_path
from kvlinker.engines.embedded.kv_cache.pool import SlotAllocator, SlotSpan, slots_of
from kvlinker.engines.embedded.kv_cache.prefixes import LEAST_TOKENS, PrefixTree
from kvlinker.engines.embedded.kv_cache.spilling import PoolSpill
from kvlinker.engines.embedded.kv_cache.states import SequenceState
from kvlinker.engines.embedded.requests.sequence import SequenceSlots, TokenSequence
from kvlinker.linking import Evidence, make_plan, parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt, Segment
from tests.engines.embedded.conftest import full_forward, random_tokens
from tests.properties import examples
from tests.toy_models import FAMILIES

TOLERANCE = 1e-5
CHUNKS = [Chunk(random_tokens(length, [3, length])) for length in (20, 33, 47)]


def prompt_of(*parts):
    """A prompt of chunks, given by number, and of fresh tokens."""
    segments: list[Segment] = []
    for part in parts:
        segments.append(
            CachedSegment(CHUNKS[part]) if isinstance(part, int) else FreshSegment(tuple(part))
        )
    return Prompt(tuple(segments))


def keys_of(prompt):
    return [chunk.content for chunk in prompt.chunks]


class FakeSpill(PoolSpill):
    """Keeps what the slots of a machine hold, unless it is full; loading pays, unless it is
    slow."""

    fingerprint = "model"
    note = None

    def __init__(self, machine) -> None:
        self.machine = machine
        self.files: dict[str, list[str]] = {}
        self.full = self.slow = False

    def pays(self, own) -> bool:
        return not self.slow

    def write(self, key, spans) -> bool:
        if not self.full:
            self.files[key] = self.machine.contents[slots_of(spans)].tolist()
        return not self.full

    def contains(self, key) -> bool:
        return key in self.files

    def fits(self, tokens) -> bool:
        return True

    def touch(self, key) -> None:
        """No file goes for another."""

    def flush(self, deadline=None) -> None:
        """All is written at once."""

    def drop_waiting(self) -> None:
        """Nothing waits."""

    def leave(self, note) -> None:
        self.note = note

    def restore(self, kv, first, last, slots) -> None:
        raise AssertionError("the tree copies nothing back")


def test_a_sharer_all_of_whose_prefixes_are_gone_takes_no_memory():
    tree = PrefixTree(SlotAllocator(8))
    for number in range(50):
        tree.evict(6)
        spans = tree._allocator.allocate(6)
        assert spans is not None
        tree.insert(SequencePath(f"salt {number}", np.arange(6)), np.arange(6), spans)
        tree._allocator.release(spans)
    assert list(tree._roots) == ["salt 49"]


def test_a_path_that_states_divide_is_given_up_at_once():
    allocator = SlotAllocator(80)
    tree = PrefixTree(allocator, states=8)
    path, spans = SequencePath("", np.arange(80)), allocator.allocate(80)
    assert spans is not None
    states = [SequenceState(position, ()) for position in (20, 50, 79)]
    tree.insert(path, np.arange(80), spans, states)
    allocator.release(spans)
    tree.evict(80)
    assert allocator.free == 80, "else running requests are preempted for what is kept"


class TreeMachine(RuleBasedStateMachine):
    """Paths enter and leave; what is found is the longest common beginning of those that are there.
    What is given up is on disk, as long as that keeps it, and still belongs to just that
    beginning."""

    TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
    CHUNK = st.sampled_from(
        [(PathChunk("a", ""), 3), (PathChunk("b", ""), 2), (PathChunk("b", "naive"), 2)]
    )

    def __init__(self) -> None:
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(prefixes, "LEAST_TOKENS", 3)
        self.allocator = SlotAllocator(120)
        self.spill = FakeSpill(self)
        self.tree = PrefixTree(self.allocator, self.spill)
        self.paths: list[tuple[SequencePath, tuple[str, ...]]] = []
        self.contents = np.full(
            120, "", dtype=object
        )  # what each slot holds: all that stands before it, too
        self.holders: list[tuple[SlotSpan, ...]] = []

    def path(
        self, tenant: str, tokens: list[int], chunk: tuple[PathChunk, int] | None, start: int
    ) -> SequencePath:
        if chunk is None or start + chunk[1] > len(tokens):
            return SequencePath(tenant, np.array(tokens))
        tokens = [*tokens[:start], *[ord(chunk[0].key)] * chunk[1], *tokens[start + chunk[1] :]]
        return SequencePath(tenant, np.array(tokens), {start: chunk})

    def own(self, path: SequencePath) -> np.ndarray:
        mask = np.ones(len(path.tokens), dtype=bool)
        for start, (chunk, length) in path.chunks.items():
            mask[start : start + length] = False
            mask[start] = chunk.linked == "naive"  # a token that was computed again
        return np.flatnonzero(mask)

    def story(self, path: SequencePath, position: int) -> str:
        """All that the KV of a position depends on."""
        chunks = [(start, *entry) for start, entry in path.chunks.items() if start <= position]
        return f"{path.tenant}{path.tokens[: position + 1].tolist()}{chunks}"

    @rule(
        tenant=st.sampled_from("xy"),
        tokens=TOKENS,
        chunk=st.none() | CHUNK,
        start=st.integers(0, 20),
    )
    def insert(self, tenant, tokens, chunk, start) -> None:
        path = self.path(tenant, tokens, chunk, start)
        own = self.own(path)
        if self.allocator.free < len(own):
            self.tree.evict(len(own))
        spans = self.allocator.allocate(len(own)) if len(own) else ()
        if spans is None:
            return
        slots = [slot for span in spans for slot in range(span.slot, span.end)]
        self.contents[slots] = [self.story(path, position) for position in own]
        self.tree.insert(path, own, spans)
        self.allocator.release(spans)

    @rule(
        tenant=st.sampled_from("xy"),
        tokens=TOKENS,
        chunk=st.none() | CHUNK,
        start=st.integers(0, 20),
        length=st.integers(1, 30),
    )
    def acquire(self, tenant, tokens, chunk, start, length) -> None:
        path = self.path(tenant, tokens, chunk, start)
        own = self.own(path)
        for begin, (_, size) in path.chunks.items():
            if begin < length < begin + size:
                length = begin  # a chunk is linked whole
        length = min(length, len(tokens))
        spans, _ = self.tree.acquire(path.up_to(length - 1), own)
        slots = [slot for span in spans for slot in range(span.slot, span.end)]
        assert len(slots) <= np.count_nonzero(own < length)
        assert self.contents[slots].tolist() == [
            self.story(path, position) for position in own[: len(slots)]
        ]
        self.holders.append(spans)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.allocator.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule(slots=st.integers(1, 120))
    def evict(self, slots) -> None:
        self.tree.evict(slots)
        held = {
            slot for spans in self.holders for span in spans for slot in range(span.slot, span.end)
        }
        assert self.allocator.free >= min(slots, 120 - len(held)) or any(
            node.has_children_in_pool for node in self.tree._used
        )

    @rule()
    def lose_all(self) -> None:
        """All files go, and with them all nodes that are not in the pool."""
        self.spill.files.clear()
        self.tree._sweep_at = 0
        self.tree.evict(0)
        assert not self.tree._spilled

    @precondition(lambda self: self.spill.files)
    @rule(data=st.data())
    def lose(self, data) -> None:
        """A file goes, since its room was needed."""
        del self.spill.files[data.draw(st.sampled_from(sorted(self.spill.files)))]

    @rule()
    def restart(self) -> None:
        """The next process knows all that is on disk behind what is there, too."""
        self.tree.leave(seconds=60)

        def kept(node) -> int:
            behind = sum(
                kept(child)
                for child in node.children.values()
                if not len(child.own) or (child.stored and self.spill.contains(child.stored.key))
            )
            return behind + bool(node.parent and (len(node.own) or behind))

        expected = sum(map(kept, self.tree._roots.values()))
        self.allocator, self.holders = SlotAllocator(120), []
        self.contents[:] = ""
        self.tree = PrefixTree(self.allocator, self.spill)
        assert len(self.tree) == expected

    @rule(full=st.booleans(), slow=st.booleans())
    def change(self, full, slow) -> None:
        self.spill.full, self.spill.slow = full, slow

    @invariant()
    def nodes_hold_their_own(self) -> None:
        sizes = {"a": 3, "b": 2}
        nodes, names = 0, set[int]()
        for tenant, root in self.tree._roots.items():
            leaves: list = [(child, [], {}) for child in root.children.values()]
            while leaves:
                node, tokens, chunks = leaves.pop()
                nodes, names = nodes + 1, names.union(node.chunk_names)
                assert node.starts[0] == len(tokens)
                tokens, chunks = list(tokens), dict(chunks)
                for item in node.items.tolist():
                    if item < 0:
                        chunk = self.tree._chunks[item]
                        chunks[len(tokens)] = chunk, sizes[chunk.key]
                        tokens += [ord(chunk.key)] * sizes[chunk.key]
                    else:
                        tokens.append(item)
                path = SequencePath(tenant, np.array(tokens), chunks)
                stories = [self.story(path, position) for position in node.own]
                if node.spans is not None:
                    assert node in self.tree._used
                    assert node.parent.spans is not None, (
                        "what stands before it is in the pool, too"
                    )
                    assert (
                        self.contents[slots_of(node.spans)].tolist() == stories
                        if stories
                        else not node.spans
                    )
                else:
                    assert node in self.tree._spilled
                if node.stored is not None and node.stored.key in self.spill.files:
                    assert (
                        self.spill.files[node.stored.key][node.stored.first : node.stored.last]
                        == stories
                    )
                leaves += [(child, tokens, chunks) for child in node.children.values()]
        assert nodes == len(self.tree)
        assert set(self.tree._names.values()) == set(self.tree._chunks) == names, (
            "no other chunks have names"
        )

    @invariant()
    def slots_are_counted(self) -> None:
        self.allocator.check_integrity(
            [*self.tree.spans, *(span for spans in self.holders for span in spans)]
        )

    def teardown(self) -> None:
        self.patches.undo()
        for spans in self.holders:
            self.allocator.release(spans)
        self.tree.evict(120)
        assert self.allocator.free == 120


TestTree = TreeMachine.TestCase
TestTree.settings = examples(150, stateful_step_count=30, deadline=None)


def slots_with(*linked):
    """Slots that keep prompts, each linked under a policy."""
    slots = SequenceSlots(4096, keeps_prefixes=True)
    for prompt, policy in linked:
        plan = make_plan(prompt, parse_policy(policy), Evidence())
        path = linked_path("tenant", plan, keys_of(prompt))
        own = np.concatenate([np.arange(*run) for run in plan.runs])
        own = own[own < len(path.tokens)]
        spans = slots._allocator.allocate(len(own)) or ()
        slots.prefixes.insert(path, own, spans)
        slots._allocator.release(spans)
    return slots


def keep(slots, path, own) -> None:
    """Have the slots keep a sequence of which these tokens were computed."""
    spans = slots._allocator.allocate(len(own)) if len(own) else ()
    sequence = SimpleNamespace(
        path=lambda: path,
        path_so_far=path,
        prompt_in_place=True,
        own=own,
        computed_length=len(own),
        spans=spans,
        marked={},
        state=None,
    )
    slots.release(sequence)


def found(slots, prompt, policy, tenant="tenant"):
    """The number of tokens that the prompt can reuse."""
    reused = slots.prefixes.find(tenant, prompt, keys_of(prompt), parse_policy(policy))
    return 0 if reused is None else reused.length


HEADER, FIRST, SECOND = random_tokens(25, 1), random_tokens(12, 2), random_tokens(14, 3)


def test_a_conversation_goes_on_where_it_was() -> None:
    before = prompt_of(HEADER, 0, FIRST)
    after = prompt_of(HEADER, 0, (*FIRST, *SECOND))
    for policy in ("full", "naive", "legolink-4"):
        slots = slots_with((before, policy))
        assert found(slots, after, policy) == len(before)
        assert found(slots, before, policy) == len(before) - 1, "the last token's logits are needed"


def test_what_was_linked_differently_is_reused_up_to_there() -> None:
    before, after = prompt_of(HEADER, 0, FIRST), prompt_of(HEADER, 0, (*FIRST, *SECOND))
    for linked, asked in (("naive", "full"), ("naive", "legolink-4"), ("legolink-4", "naive")):
        assert found(slots_with((before, linked)), after, asked) == len(HEADER)


def test_what_was_computed_exactly_serves_every_policy() -> None:
    before, after = prompt_of(HEADER, 0, FIRST), prompt_of(HEADER, 0, (*FIRST, *SECOND))
    for policy in ("naive", "legolink-4", "query-10"):
        assert found(slots_with((before, "full")), after, policy) == len(before)
    plain = Prompt((FreshSegment(tuple(after.tokens.tolist())),))
    assert found(slots_with((before, "full")), plain, "full") == len(before), (
        "chunks or not, the tokens are the same"
    )
    assert found(slots_with((before, "naive")), plain, "full") == len(HEADER)


def test_another_question_is_linked_anew_where_policies_look_at_it(bench) -> None:
    made, cold = bench(prefix_cache="on"), bench()
    asked, other = prompt_of(HEADER, 0, 1, FIRST), prompt_of(HEADER, 0, 1, SECOND)
    for policy, reused in (("query-10", len(HEADER)), ("legolink-4", len(HEADER) + 53)):
        made.answer(asked, policy)
        outcome = made.answer(other, policy)
        assert outcome.finished.usage.exact_cached_tokens == reused
        assert_alike(outcome, cold.answer(other, policy))
        following = prompt_of(HEADER, 0, 1, (*SECOND, *outcome.tokens, *FIRST))
        assert made.answer(following, policy).finished.usage.exact_cached_tokens == len(other) + 7
        assert (
            made.answer(following, policy).finished.usage.exact_cached_tokens == len(following) - 1
        )
    (tree,) = [made.engine.scheduler._slots.prefixes]
    assert (
        set(tree._names.values())
        == set(tree._chunks)
        == {name for name, uses in tree._name_uses.items() if uses}
    )


def test_other_tokens_chunks_and_tenants_are_not_found() -> None:
    slots = slots_with((prompt_of(HEADER, 0, FIRST), "naive"))
    assert found(slots, prompt_of(HEADER, 1, FIRST), "naive") == len(HEADER)
    assert found(slots, prompt_of(random_tokens(25, 9), 0, FIRST), "naive") == 0
    assert found(slots, prompt_of(HEADER, 0, FIRST), "naive", tenant="another") == 0


def test_little_is_not_worth_reusing() -> None:
    slots = slots_with((prompt_of(HEADER, 0, FIRST), "naive"))
    assert found(slots, prompt_of((*HEADER[: LEAST_TOKENS - 1], 5), FIRST), "naive") == 0
    assert found(slots, prompt_of((*HEADER[:LEAST_TOKENS], 5), FIRST), "naive") == LEAST_TOKENS


def test_one_of_many_is_found() -> None:
    allocator = SlotAllocator(1 << 17)
    tree = PrefixTree(allocator)
    spans = allocator.allocate(1)
    assert spans is not None
    for number in range(20_000):
        tokens = np.array([number % 200, number // 200, number])
        tree.insert(SequencePath("tenant", tokens), np.arange(3), [SlotSpan(3 * number, 3)])
    prompt = Prompt((FreshSegment((7, 30, 30 * 200 + 7, *range(20))),))
    assert len(tree) > 20_000
    assert sum(count for _, count in tree._follow("tenant", prompt.tokens)) == 3


def test_a_path_of_many_nodes_is_found() -> None:
    """Every turn of a conversation adds nodes to its path."""
    tokens = tuple(range(2000))
    slots = slots_with((prompt_of(tokens), "full"))
    tree = slots.prefixes
    (node,) = tree._roots["tenant"].children.values()
    while len(node.items) > 1:
        tree._divide(node, 1)
        (node,) = node.children.values()
    assert len(tree) == len(tokens)
    assert found(slots, prompt_of((*tokens, 7)), "full") == len(tokens)


def test_a_look_up_stays_with_the_chunks_that_it_comes_to(monkeypatch) -> None:
    """It holds the scheduler's lock."""
    slots = slots_with(
        (prompt_of(HEADER, 0, FIRST), "naive"), (prompt_of(HEADER, 1, FIRST), "naive")
    )
    tried: list[PathChunk] = []

    def linked_chunk(key: str, linked: str) -> PathChunk:
        tried.append(PathChunk(key, linked))
        return tried[-1]

    monkeypatch.setattr(paths, "PathChunk", linked_chunk)
    assert found(slots, prompt_of(HEADER, 0, FIRST, 1, 2, SECOND), "naive") == len(
        HEADER
    ) + 20 + len(FIRST)
    assert {chunk.key for chunk in tried} == {CHUNKS[0].content}


def test_a_request_that_leaves_nothing_names_nothing() -> None:
    """It reuses a prefix, and is cancelled before its chunk is linked."""
    slots = slots_with((prompt_of(HEADER, 0, FIRST), "naive"))
    prompt, policy = prompt_of(HEADER, 1, FIRST), parse_policy("naive")
    reused = slots.prefixes.find("tenant", prompt, keys_of(prompt), policy)
    assert reused is not None
    path = linked_path("tenant", make_plan(prompt, policy, Evidence()), keys_of(prompt))
    spans, _ = slots.prefixes.acquire(path.up_to(reused.length - 1), reused.own)
    assert sum(span.size for span in spans) == len(HEADER)
    assert list(slots.prefixes._names) == [PathChunk(CHUNKS[0].content, "naive")]


def test_chunks_alone_are_not_kept() -> None:
    """They would hold no slots, and stay as long as no other prefix has to go."""
    slots = SequenceSlots(8, keeps_prefixes=True)
    for number in range(50):
        chunk = {0: (PathChunk(f"chunk {number}", ""), 20)}
        keep(slots, SequencePath(f"salt {number}", np.arange(20), chunk), np.arange(0))
    assert not slots.prefixes._roots
    assert not slots.prefixes._names


def test_chunks_behind_what_was_computed_are_not_kept() -> None:
    slots = SequenceSlots(200, keeps_prefixes=True)
    for number in range(50):
        chunk = {2: (PathChunk(f"chunk {number}", ""), 20)}
        keep(slots, SequencePath("tenant", np.arange(22), chunk), np.arange(2))
    assert len(slots.prefixes) == 1
    assert not slots.prefixes._names


def test_prefixes_stay_where_giving_them_up_makes_no_room() -> None:
    slots = SequenceSlots(200, keeps_prefixes=True)
    running = slots._allocator.allocate(150)
    assert running is not None
    keep(slots, SequencePath("tenant", np.arange(30)), np.arange(30))
    waiting = TokenSequence(np.arange(60), [(0, 60)], most_tokens=60)
    assert not slots.admit(waiting)
    assert slots.kept == 30
    slots._allocator.release(running[:1])
    assert slots.admit(waiting)


def test_a_node_without_kv_goes_with_the_last_that_stood_behind_it() -> None:
    """Two prompts go on behind a chunk that was linked as it is, and one without it. Only their
    header stays."""
    allocator = SlotAllocator(200)
    spill = FakeSpill(SimpleNamespace(contents=np.full(200, "", dtype=object)))
    tree = PrefixTree(allocator, spill)
    chunk = {len(HEADER): (PathChunk("chunk", "naive"), 3)}
    linked = [
        SequencePath("tenant", np.array([*HEADER, 1, 2, 3, *[last] * LEAST_TOKENS]), chunk)
        for last in (4, 5)
    ]
    for path in (*linked, SequencePath("tenant", np.array([*HEADER, *[6] * LEAST_TOKENS]))):
        own = np.setdiff1d(
            np.arange(len(path.tokens)), len(HEADER) + np.arange(3) if path.chunks else ()
        )
        spans = allocator.allocate(len(own))
        assert spans is not None
        tree.insert(path, own, spans)
        allocator.release(spans)
    tree.acquire(linked[0].up_to(len(HEADER) - 1), np.arange(len(HEADER)))
    tree.evict(200)
    assert (len(tree), len(spill.files)) == (5, 3)
    spill.files.clear()
    tree._sweep_at = 0
    tree.evict(0)
    assert len(tree) == 1


# --- answers

SELECTING = ["full", "naive", "naive-unpositioned", "prefix", "legolink-4", "random-30", "h2o-30"]
LINKING = [
    "naive",
    "legolink-4",
    "query-20",
    "query-20-w6",
    "query-10+legolink-2",
    "cacheblend-20",
    "cachecraft-0.7",
]


def conversation(turns, *, header=True, seed=0):
    """Prompts of a conversation over two chunks, each of which begins with the one before and its
    answer's place."""
    parts: list = [HEADER if header else (), 0, 1]
    for turn in range(turns):
        parts.append(random_tokens(9 + turn, [seed, turn]))
        yield prompt_of(*parts)


def assert_alike(outcome, cold):
    assert outcome.failed is None, outcome.failed
    assert outcome.tokens == cold.tokens
    np.testing.assert_allclose(outcome.logprobs, cold.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_prefix_gives_the_models_own_answer(bench, family):
    made = bench(family, prefix_cache="on", max_step_tokens=37)
    for turn, prompt in enumerate(conversation(3)):
        tokens, logprobs = full_forward(family, prompt, 4)
        outcome = made.answer(prompt, "full", max_tokens=4)
        assert outcome.tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=2e-5)
        usage = outcome.finished.usage
        assert (usage.exact_cached_tokens > 0) == (turn > 0)
        assert usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("policy", SELECTING)
def test_the_same_prompt_again_computes_its_last_token(bench, policy):
    cold, warm = bench(), bench(prefix_cache="on")
    prompt = prompt_of(HEADER, 0, FIRST, 2, SECOND)
    expected = cold.answer(prompt, policy)
    for turn in range(3):
        outcome = warm.answer(prompt, policy)
        assert_alike(outcome, expected)
        usage = outcome.finished.usage
        if turn:
            assert usage.exact_cached_tokens == len(prompt) - 1
            assert (usage.cached_tokens, usage.recomputed_tokens, usage.fresh_tokens) == (
                len(prompt) - 1,
                0,
                1,
            )


@pytest.mark.parametrize("policy", LINKING)
def test_later_turns_link_nothing_again(bench, policy):
    made = bench(prefix_cache="on")
    prompts = list(conversation(4))
    length = 0
    for turn, prompt in enumerate(prompts):
        outcome = made.answer(prompt, policy, max_tokens=5)
        usage = outcome.finished.usage
        if turn and not parse_policy(policy).needs.refines:
            assert usage.exact_cached_tokens == length
            assert usage.recomputed_tokens == 0
            assert usage.fresh_tokens == len(prompt) - length
        elif turn:
            assert usage.exact_cached_tokens == len(HEADER), (
                "dropped tokens differ from layer to layer"
            )
        length = len(prompt)


def test_the_answer_is_reused_too(bench):
    made = bench(prefix_cache="on")
    prompt = prompt_of(HEADER, 0, FIRST)
    answer = made.answer(prompt, "legolink-4", max_tokens=30)
    following = prompt_of(HEADER, 0, (*FIRST, *answer.tokens, *SECOND))
    usage = made.answer(following, "legolink-4").finished.usage
    assert usage.exact_cached_tokens == len(prompt) + 29, "the last token was never computed"


def test_choices_and_their_conversations_share_the_prompt(bench):
    made, cold = bench(prefix_cache="on", kv_slots=600), bench()
    prompt = prompt_of(HEADER, 0, FIRST)
    for _ in range(2):
        outcomes, _ = made.submit_choices(prompt, 6, temperature=1.0, seed=4, max_tokens=30)
        expected, _ = cold.submit_choices(prompt, 6, temperature=1.0, seed=4, max_tokens=30)
        for outcome, alone in zip(outcomes, expected, strict=True):
            assert_alike(outcome.wait(), alone.wait())
    answers = [outcome.tokens for outcome in outcomes]
    for tokens in answers:
        following = prompt_of(HEADER, 0, (*FIRST, *tokens, *SECOND))
        assert made.answer(following).finished.usage.exact_cached_tokens == len(prompt) + 29


def test_prefixes_make_room_for_requests(bench):
    """A pool that two prompts fill: each newcomer pushes the oldest out, and nobody is preempted
    for what is kept."""
    made, cold = bench(prefix_cache="on", kv_slots=300), bench()
    prompts = [prompt_of(random_tokens(100, seed), 0, FIRST) for seed in range(5)]
    for prompt in prompts:
        assert_alike(
            made.answer(prompt, "full", max_tokens=20), cold.answer(prompt, "full", max_tokens=20)
        )
    assert made.engine.scheduler.preemptions == 0
    assert made.answer(prompts[-1], "full").finished.usage.exact_cached_tokens > 0
    assert made.answer(prompts[0], "full").finished.usage.exact_cached_tokens == 0


def test_a_chunk_may_stand_twice_in_what_is_given_up(bench):
    made = bench(prefix_cache="on", kv_slots=300)
    made.answer(prompt_of(HEADER, 0, 0, FIRST), "naive")
    made.answer(prompt_of(random_tokens(290, 5)), "full")
    assert (
        made.answer(prompt_of(HEADER, 0, 0, FIRST), "naive").finished.usage.exact_cached_tokens == 0
    )


def test_a_failed_or_cancelled_request_leaves_nothing_wrong(bench):
    made, cold = bench(prefix_cache="on", max_step_tokens=16), bench()
    prompt = prompt_of(HEADER, 0, FIRST)
    for _ in range(4):
        outcome, handle = made.submit(prompt, "full", max_tokens=200)
        outcome.wait_for_token()
        handle.cancel()
        outcome.wait()
    assert_alike(made.answer(prompt, "full"), cold.answer(prompt, "full"))


def test_nothing_is_kept_where_that_is_off(bench):
    made = bench()
    prompt = prompt_of(HEADER, 0, FIRST)
    for _ in range(2):
        assert made.answer(prompt, "full").finished.usage.exact_cached_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_what_came_before(bench, seed):
    """Conversations of two tenants in any order, with forks, policies, cancellations, deleted
    chunks, and a pool that keeps only some of it."""
    draw = random.Random(seed)
    cold, warm = bench(), bench(prefix_cache="on", kv_slots=700, max_step_tokens=50)
    known: dict = {}
    reused = 0
    for _ in range(12):
        running = []
        for _ in range(draw.randint(1, 4)):
            turns = list(
                conversation(
                    draw.randint(1, 4), header=draw.random() < 0.8, seed=draw.randint(0, 2)
                )
            )
            policy, tenant = (
                draw.choice(["full", "naive", "legolink-4"]),
                draw.choice(["one", "two"]),
            )
            running.append(
                (turns[-1], policy, warm.submit(turns[-1], policy, tenant, max_tokens=4))
            )
        if draw.random() < 0.3:
            draw.choice(running)[2][1].cancel()
        if draw.random() < 0.2 and warm.store.keys():
            warm.store.delete(draw.choice(sorted(warm.store.keys())))
        for prompt, policy, (outcome, _) in running:
            outcome.wait()
            if outcome.finished is None or outcome.finished.reason == "cancelled":
                continue
            usage = outcome.finished.usage
            if usage.exact_cached_tokens and policy != "full":
                reused += 1
                continue  # it may have been linked behind what was computed exactly
            name = (prompt, policy)
            if name not in known:
                known[name] = cold.answer(prompt, policy, max_tokens=4)
            assert_alike(outcome, known[name])
    assert reused


def test_choices_count_alike_what_was_gone_when_their_prompt_got_slots(bench, monkeypatch):
    made = bench(prefix_cache="on", kv_slots=200)
    prompt = prompt_of(random_tokens(60, 1))
    made.answer(prompt)
    tree = made.engine.scheduler._slots.prefixes
    acquire = tree.acquire

    def acquired_late(*arguments):
        tree.evict(200)
        return acquire(*arguments)

    monkeypatch.setattr(tree, "acquire", acquired_late)
    outcomes, _ = made.submit_choices(prompt, 2)
    for outcome in outcomes:
        assert outcome.wait().finished.usage == Usage(0, 0, 60, 8)
