"""Where requests go: to where their chunks are, unless others wait there for longer."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.residency import MEMORY, KnownChunk, ResidencyReport, TierCost
from kvlinker_fleet.costs import STALE_SECONDS, UNMEASURED_SHARE
from kvlinker_fleet.naming import PromptOutline, WantedChunk
from kvlinker_fleet.replicas import BELIEVED_SECONDS
from kvlinker_fleet.router import MISS_WEIGHT, MOST_SHARE, SATURATION, Router, Slowdown

PER_TOKEN = 1e-3


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def known(*names: str, tier: str = MEMORY) -> KnownChunk:
    return KnownChunk((tier,), names)


def outline(*names: str, tokens: int = 500, beginnings: tuple[str, ...] = ()) -> PromptOutline:
    return PromptOutline(
        tuple(WantedChunk(name, tokens) for name in names),
        tuple((name, 100 * (n + 1)) for n, name in enumerate(beginnings)),
    )


def routers(*resident: set[str], running: tuple[int, ...] = ()) -> Router:
    """A router to replicas r0, r1, … that have these chunks, each under its key as name."""
    router = Router(seed=1)
    for number, keys in enumerate(resident):
        replica = f"r{number}"
        router.add(replica)
        router.set_ready(replica, True)
        assert router.report(
            replica,
            ResidencyReport("e", 1, True, {digest(key): known(f"name {key}") for key in keys}, ()),
            running=running[number] if running else 0,
            waiting=0,
            seconds_per_token=PER_TOKEN,
        )
    return router


def told(router: Router, report: ResidencyReport) -> bool:
    return router.report("r0", report, running=0, waiting=0, seconds_per_token=None)


def chosen(router: Router, prompt: PromptOutline, now: float = 0.0, **options: object) -> str:
    decision = router.choose(prompt, now, **options)  # type: ignore[arg-type]
    assert decision is not None
    return decision.replica


def test_most_resident_chunks_win_in_any_order() -> None:
    """A replica that has B3 and B4, but not B0, scores by both."""
    router = routers({"b0"}, {"b3", "b4"}, set())
    decision = router.choose(outline("name b0", "name b4", "name b3"), 0.0)
    assert decision is not None
    assert (decision.replica, decision.resident, decision.chunks) == ("r1", 2, 3)
    assert decision.expected == pytest.approx(500 * PER_TOKEN)
    assert decision.reason == "r1: 2 of 3 chunks"


TIERS = {"disk": TierCost(0.2 * PER_TOKEN), "redis": TierCost(0.4 * PER_TOKEN, "redis 1")}


def tell(router: Router, replica: str, tiers: dict[str, TierCost], **places: str) -> None:
    """Report which tier, or tiers with ``+`` between them, has each of these chunks."""
    chunks = {
        digest(key): KnownChunk(tuple(tier.split("+")), (f"name {key}",))
        for key, tier in places.items()
    }
    report = ResidencyReport("e", 1, True, chunks, ())
    assert router.report(
        replica, report, running=0, waiting=0, seconds_per_token=PER_TOKEN, tiers=tiers
    )


def test_what_can_be_loaded_costs_less_than_computing_and_more_than_memory() -> None:
    router = routers(set(), set(), set())
    tell(router, "r1", TIERS, a="disk", b="disk")
    tell(router, "r2", TIERS, c="memory")
    decision = router.choose(outline("name a", "name b", "name c"), 0.0)
    assert decision is not None
    assert decision.reason == "r1: 0 of 3 chunks, 2 to load"
    assert decision.expected == pytest.approx((500 + 2 * 0.2 * 500) * PER_TOKEN)
    tell(router, "r2", TIERS, a="memory")
    assert chosen(router, outline("name a")) == "r2"


def test_what_one_replica_has_in_a_shared_tier_all_have_that_use_it() -> None:
    router = routers(set(), set(), set())
    elsewhere = {"redis": TierCost(0.1 * PER_TOKEN, "redis 2")}
    tell(router, "r0", TIERS, a="memory+redis")
    tell(router, "r1", TIERS)
    tell(router, "r2", elsewhere)
    decision = router.choose(outline("name a"), 0.0, without={"r0"})
    assert decision is not None
    assert decision.reason == "r1: 0 of 1 chunks, 1 to load"
    assert decision.expected == pytest.approx(0.4 * 500 * PER_TOKEN)
    tell(router, "r0", TIERS)
    tell(router, "r1", TIERS)
    gone = router.choose(outline("name a"), BELIEVED_SECONDS, without={"r0"})
    assert gone is not None
    assert gone.expected == pytest.approx(500 * PER_TOKEN)


def test_a_tier_that_takes_longer_than_computing_counts_as_computing() -> None:
    router = routers(set(), set())
    tell(router, "r0", {"disk": TierCost(3 * PER_TOKEN)}, a="disk")
    decision = router.choose(outline("name a"), 0.0, without={"r1"})
    assert decision is not None
    assert decision.expected == pytest.approx(500 * PER_TOKEN)
    assert decision.reason == "r0: 0 of 1 chunks"


def test_a_tier_that_was_not_measured_counts_as_half_of_computing() -> None:
    router = routers(set(), set())
    tell(router, "r0", {"disk": TierCost(None)}, a="disk")
    decision = router.choose(outline("name a"), 0.0)
    assert decision is not None
    assert decision.replica == "r0"
    assert decision.expected == pytest.approx(UNMEASURED_SHARE * 500 * PER_TOKEN)


def test_a_name_that_one_replica_tells_is_known_of_all() -> None:
    router = routers({"a"}, set())
    assert chosen(router, outline("name a")) == "r0"
    router.report(
        "r1",
        ResidencyReport("e", 2, False, {digest("a"): known()}, ()),
        running=0,
        waiting=0,
        seconds_per_token=PER_TOKEN,
    )
    assert chosen(router, outline("name a")) == "r1", "r0 has one request already"


def test_waiting_longer_than_computing_goes_elsewhere() -> None:
    router = routers({"a"}, set())
    sent = [chosen(router, outline("name a", tokens=300)) for _ in range(40)]
    assert "r1" in sent, "a hot chunk is copied"
    assert sent[: sent.index("r1")] == ["r0"] * sent.index("r1")
    assert abs(sent.count("r0") - sent.count("r1")) <= sent.index("r1") + 1


def test_where_all_are_overloaded_having_the_chunks_decides() -> None:
    """A replica that is twice as busy as others, which are all very busy."""
    idle, busy = routers({"a"}, set(), running=(80, 0)), routers({"a"}, set(), running=(480, 400))
    assert chosen(idle, outline("name a")) == "r1"
    assert chosen(busy, outline("name a")) == "r0"


def test_requests_of_other_routers_count() -> None:
    router = routers({"a"}, set(), running=(50, 0))
    assert chosen(router, outline("name a")) == "r1"


def test_own_requests_are_not_others() -> None:
    """Whether they end before the report that counts them comes, or begin after it was asked
    for."""
    router = routers({"a"}, set())
    ending = router.choose(outline("name a"), 0.0)
    assert ending is not None
    router.note_poll("r0")
    beginning = router.choose(outline("name a"), 0.0)
    for decision in (ending, beginning):
        assert decision is not None
        assert decision.replica == "r0"
        router.note_end(decision)
    router.report(
        "r0",
        ResidencyReport("e", 1, False, {}, ()),
        running=2,
        waiting=0,
        seconds_per_token=PER_TOKEN,
    )
    decision = router.choose(outline("name a"), 0.0)
    assert decision is not None
    assert decision.wait == pytest.approx(0.0)


def test_own_decisions_are_believed_until_a_report_can_tell() -> None:
    router = routers(set(), set())
    first = chosen(router, outline("new"))
    decision = router.choose(outline("new"), 1.0)
    assert decision is not None
    assert decision.replica == first
    assert decision.resident == 1
    later = router.choose(outline("new"), 1.0 + BELIEVED_SECONDS)
    assert later is not None
    assert later.resident == 0


def test_what_was_just_made_is_believed_until_a_report_can_tell() -> None:
    router = routers(set(), set())
    router.note_made("r1", ["a", "b"], 0.0)
    router.note_made("gone", ["a"], 0.0)
    decision = router.choose(outline("b", "a"), 1.0)
    assert decision is not None
    assert (decision.replica, decision.resident) == ("r1", 2)
    later = router.choose(outline("a"), BELIEVED_SECONDS)
    assert later is not None
    assert later.replica == "r1", "where the question was sent"


def lines(*names: str) -> PromptOutline:
    return PromptOutline(lines=tuple(WantedChunk(name, 100) for name in names))


def test_passages_come_again_where_they_came_before() -> None:
    """So that a server sees them twice, and makes them a chunk."""
    router = routers(set(), set(), set())
    first = router.choose(lines("l1", "l2", "l3"), 0.0)
    assert first is not None
    router.note_first_byte(first, 0.2)
    router.note_end(first)
    again = router.choose(lines("l9", "l2", "l3"), 1000.0)
    assert again is not None
    assert again.replica == first.replica
    assert again.expected == pytest.approx(100 * PER_TOKEN)
    assert again.chunks == 0


def test_lines_of_a_chunk_count_as_that_chunk() -> None:
    """What was sent somewhere counts no more, once a server has told where the chunk is."""
    router = routers(set(), set(), set())
    first = router.choose(lines("l1", "l2"), 0.0)
    assert first is not None
    router.note_end(first)
    others = sorted(router.replicas.keys() - {first.replica})
    chunk = KnownChunk(("memory",), ("l1", "l2"))
    report = ResidencyReport("e", 1, True, {digest("a"): chunk}, ())
    router.report(others[0], report, running=0, waiting=0, seconds_per_token=PER_TOKEN)
    decision = router.choose(lines("l2", "l1", "l3"), 1.0)
    assert decision is not None
    assert decision.replica == others[0]
    assert (decision.resident, decision.chunks) == (1, 1)
    assert decision.expected == pytest.approx(100 * PER_TOKEN)


def test_conversations_go_on_where_they_were() -> None:
    router = routers(set(), set(), set())
    first = chosen(router, outline(beginnings=("t1",)))
    for turn in range(2, 6):
        decision = router.choose(
            outline(beginnings=tuple(f"t{n}" for n in range(1, turn + 1))), float(turn)
        )
        assert decision is not None
        assert decision.replica == first
        assert decision.expected == pytest.approx(100 * PER_TOKEN)
        router.note_first_byte(decision, 0.2)
        router.note_end(decision)


def test_a_replica_that_leaves_is_forgotten_with_its_last_request() -> None:
    router = routers({"a"}, set())
    decision = router.choose(outline("name a"), 0.0)
    assert decision is not None
    assert decision.replica == "r0"
    router.remove("r0")
    assert chosen(router, outline("name a")) == "r1"
    assert chosen(router, outline("name a"), without=("r0",)) == "r1"
    assert list(router.replicas) == ["r0", "r1"]
    router.note_end(decision)
    assert list(router.replicas) == ["r1"]
    router.add("r2")
    router.set_ready("r2", True)
    other = router.choose(outline("name a"), 0.0, without=("r0", "r1"))
    assert other is not None
    assert (other.replica, other.resident, other.wait) == ("r2", 0, 0.0)


def test_answers_under_way_count() -> None:
    """Though they have their first byte: a new replica, of which nothing was measured yet, gets the
    next ones."""
    router = routers(set())
    for _ in range(6):
        decision = router.choose(outline("new", tokens=20), 0.0)
        assert decision is not None
        router.note_first_byte(decision, 0.01)
    router.add("r1")
    router.set_ready("r1", True)
    empty = ResidencyReport("e", 1, True, {}, ())
    router.report("r1", empty, running=0, waiting=0, seconds_per_token=None)
    assert chosen(router, outline("other", tokens=20)) == "r1"


def test_a_busy_replica_is_no_better_for_computing_a_little_faster() -> None:
    router = routers(set(), set())
    for replica, seconds in (("r0", PER_TOKEN), ("r1", 1.3 * PER_TOKEN)):
        empty = ResidencyReport("e", 1, True, {}, ())
        router.report(replica, empty, running=0, waiting=0, seconds_per_token=seconds)
    sent: list[str] = []
    for number in range(20):
        decision = router.choose(outline(f"new {number}"), 0.0)
        assert decision is not None
        slower = 1 + MOST_SHARE * sent.count(decision.replica)
        router.note_first_byte(decision, slower * (decision.wait + decision.expected))
        sent.append(decision.replica)
    assert sent[0] == "r0"
    assert sent.count("r1") > 5


def test_answers_that_slow_nothing_down_count_no_more() -> None:
    """With measurements, the chunk decides again."""
    router = routers({"a"}, set())
    under_way = []
    for number in range(600):
        decision = router.choose(outline(f"new {number}", tokens=20), 0.0)
        assert decision is not None
        router.note_first_byte(decision, decision.wait + decision.expected + router._seconds)
        under_way.append(decision)
        if len(under_way) > 20 + number % 20:
            router.note_end(under_way.pop(0))
            router.note_end(under_way.pop(0))
    for decision in under_way:
        router.note_end(decision)
    for _ in range(10):
        decision = router.choose(outline("name a", tokens=20), 0.0)
        assert decision is not None
        assert decision.replica == "r0"
        router.note_first_byte(decision, decision.wait + decision.expected + router._seconds)


def test_a_slow_replica_is_tried_again_after_a_while() -> None:
    """What it measured may have been a moment's; with other requests it shows."""
    router = routers(set(), set())
    slow = ResidencyReport("e", 1, True, {}, ())
    router.report("r1", slow, running=0, waiting=0, seconds_per_token=50 * PER_TOKEN)

    def send(now: float) -> str:
        decision = router.choose(outline(f"new {now}"), now)
        assert decision is not None
        router.note_first_byte(decision, decision.wait + decision.expected)
        router.note_end(decision)
        return decision.replica

    tried = {"r0": -STALE_SECONDS, "r1": -STALE_SECONDS}
    sent = [(now, send(float(now))) for now in range(100)]
    assert sum(replica == "r1" for _, replica in sent) in range(3, 20)
    for now, replica in sent:
        tried[replica] = now
        assert now - min(tried.values()) <= 2 * STALE_SECONDS


def test_equal_costs_are_spread() -> None:
    router = routers(set(), set(), set(), set())
    sent = [chosen(router, PromptOutline()) for _ in range(40)]
    assert {sent.count(f"r{n}") for n in range(4)} == {10}


def test_only_ready_ones_get_requests() -> None:
    router = routers({"a"}, set())
    router.set_ready("r0", False)
    assert chosen(router, outline("name a")) == "r1"
    assert router.choose(outline("name a"), 0.0, without={"r1"}) is None
    router.set_ready("r0", True)
    assert chosen(router, outline("name a"), without={"r1"}) == "r0"


def test_another_run_of_a_replica_has_nothing_of_before() -> None:
    router = routers({"a"}, set())
    restarted = ResidencyReport("e2", 5, False, {}, ())
    assert not told(router, restarted), "the whole is asked for"
    assert told(router, ResidencyReport("e2", 5, True, {digest("b"): known("name b")}, ()))
    decision = router.choose(outline("name a", "name b"), 0.0)
    assert decision is not None
    assert decision.resident == 1


def has(router: Router, number: int, name: str) -> bool:
    copies = router._costs.index.copies(name, 0.0)
    return number in copies.replicas or number in copies.believed


@given(
    resident=st.lists(st.sets(st.sampled_from("abcdef")), min_size=1, max_size=4),
    prompts=st.lists(
        st.lists(st.sampled_from("abcdef"), max_size=4, unique=True), min_size=1, max_size=20
    ),
)
def test_nothing_is_lost_and_the_least_cost_wins(
    resident: list[set[str]], prompts: list[list[str]]
) -> None:
    router = routers(*resident)
    decisions = []
    for prompt in prompts:
        wanted = outline(*(f"name {key}" for key in prompt))
        long = SATURATION * PER_TOKEN * sum(c.tokens for c in wanted.chunks) + router._seconds
        waits = router._own_wait.tolist()
        costs = {}
        for number, replica in enumerate(router.replicas):
            missing = (c.tokens for c in wanted.chunks if not has(router, number, c.name))
            computing = PER_TOKEN * sum(missing)
            elsewhere = (sum(waits) - waits[number]) / max(1, len(waits) - 1)
            costs[replica] = (
                waits[number] / (1 + elsewhere / long)
                + MISS_WEIGHT * computing
                + router._open[number] * router._slowdown.share * (router._seconds + computing)
            )
        decision = router.choose(wanted, 0.0)
        assert decision is not None
        assert costs[decision.replica] == pytest.approx(min(costs.values()))
        decisions.append(decision)
    for decision in decisions:
        router.note_first_byte(decision, 0.1)
        router.note_end(decision)
    assert not router._open.any()
    assert router._own_wait == pytest.approx(0.0)


def learnt(share: float, *, most: int, requests: int = 1000, noise: float = 0.3) -> float:
    """What is learnt where requests take longer by such a share for each of 0 to ``most``
    answers."""
    chance, slowdown = random.Random(0), Slowdown()
    for _ in range(requests):
        answers = chance.randint(0, most)
        expected = chance.uniform(0.01, 0.1)
        usual = 1 + share * most / 2  # the mean is expected already
        took = (1 + share * answers) / usual * chance.uniform(1 - noise, 1 + noise)
        slowdown.note(answers, expected, expected * took)
    return slowdown.share


def test_nothing_is_learnt_from_nothing() -> None:
    assert Slowdown().share == MOST_SHARE
    assert learnt(0.0, most=0) == MOST_SHARE, "always alike: no difference tells"


@pytest.mark.parametrize("share", [0.0, 0.005, 0.02])
def test_the_share_is_found(share: float) -> None:
    usual = 1 + share * 20
    assert learnt(share, most=40) == pytest.approx(share / usual, abs=0.004)


def test_the_share_stays_within_its_bounds() -> None:
    assert learnt(0.5, most=2) == MOST_SHARE
    assert learnt(-0.02, most=40) == 0.0


def test_a_single_late_answer_changes_little() -> None:
    slowdown = Slowdown()
    for number in range(500):
        slowdown.note(number % 20, 0.1, 0.1)
    before = slowdown.share
    slowdown.note(19, 0.001, 60.0)
    assert slowdown.share - before < 0.015
