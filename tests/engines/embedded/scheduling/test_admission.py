"""Who comes next: short prompts first, in turn, fair between tenants; and who is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import OverloadedError
from kvlinker.engines.embedded.requests.request import RequestState
from kvlinker.engines.embedded.scheduling.queues import SIMILAR_SECONDS, WORKFLOW_LEAD_SECONDS
from kvlinker.engines.embedded.scheduling.scheduler import PREFETCH_LIMIT
from tests.engines.embedded.fake_runner import CHUNK_BYTES, LAYERS, Simulation, Work, arriving
from tests.engines.embedded.scheduling.test_composition import decoding, measured
from tests.properties import examples


def admitted(simulation, works):
    """Take steps until all have been admitted; return them in the order in which that happened."""
    order: list[Work] = []
    while len(order) < len(works):
        simulation.step()
        order += [
            work
            for work in works
            if work.state not in (RequestState.READY, RequestState.LOADING) and work not in order
        ]
    return order


def test_short_prompts_overtake_long_ones_and_only_for_a_time():
    simulation = measured(max_running=1)
    first = simulation.add(50, 5)
    simulation.step()
    long, short = simulation.add(400), simulation.add(20)
    simulation.timing.now += 3
    soon = simulation.add(20)
    simulation.timing.now += 3
    late = simulation.add(20)
    assert admitted(simulation, [first, long, short, soon, late]) == [
        first,
        short,
        soon,
        long,
        late,
    ]


def test_short_prompts_are_fetched_before_long_ones_that_were_fetched_ahead():
    simulation = measured(max_running=1)
    long = [simulation.enter(4000) for _ in range(PREFETCH_LIMIT + 1)]
    assert simulation.loads == long[:PREFETCH_LIMIT]
    short = simulation.enter(20, tenant="other")
    assert simulation.loads[-1] is short


def test_few_are_fetched_ahead_however_short_they_are():
    simulation = measured(max_running=1)
    for length in range(4000, 1000, -100):
        simulation.enter(length)
    assert len(simulation.loads) == 2 * PREFETCH_LIMIT


def test_of_each_tenant_one_is_fetched_ahead_however_many_others_have():
    simulation = measured(max_running=1)
    for length in range(4000, 1000, -100):
        simulation.enter(length, tenant="many")
    few = [simulation.enter(4000, tenant=tenant) for tenant in ("few", "fewer", "few")]
    assert simulation.loads[2 * PREFETCH_LIMIT :] == few[:2]


def test_a_tenants_hundred_requests_do_not_hold_up_anothers_one():
    simulation = measured(max_running=4)
    hundred = [simulation.enter(100, 3, tenant="many") for _ in range(100)]
    simulation.load_all()
    for _ in range(3):
        simulation.step()
    one = simulation.add(100, 3, tenant="few")
    begin = simulation.timing.now
    while not one.told:
        simulation.load_all()
        simulation.step()
    assert simulation.timing.now - begin < 12
    assert sum(work.told == ["finished"] for work in hundred) < 20


@pytest.mark.whole
@examples(10)
@given(
    lengths=st.tuples(st.integers(100, 400), st.integers(100, 400)),
    neighbour=st.booleans(),
)
def test_tenants_who_flood_the_queue_get_the_same_time(lengths, neighbour):
    """As long as both have prompts waiting, and but for the few that were admitted last."""
    simulation = measured(max_running=8)
    if neighbour:
        decoding(simulation, tenant="other")
    works: dict[str, list[Work]] = {"a": [], "b": []}
    for index in range(100):
        for (tenant, own), length in zip(works.items(), lengths, strict=True):
            if index * length < 10_000:
                own.append(simulation.enter(length, tenant=tenant))
    while all(own[-1].waits for own in works.values()):
        simulation.load_all()
        simulation.step()
    done = {
        tenant: sum(work.prompt_seconds for work in own if not work.waits)
        for tenant, own in works.items()
    }
    longest = max(own[0].prompt_seconds for own in works.values())
    assert abs(done["a"] - done["b"]) <= 3 * longest


def test_who_has_taken_all_places_gives_one_up_to_a_tenant_that_has_none():
    simulation = measured(max_running=4)
    works = decoding(simulation, 4, tenant="many")
    other = simulation.add(20, 3, tenant="few")
    simulation.step()
    assert other.state is RequestState.RUNNING
    assert [work.state for work in works] == [RequestState.RUNNING] * 3 + [
        RequestState.PREEMPTED
    ], "the last one gives way"
    again = [simulation.add(20, 3, tenant=name) for name in ("few", "fewer", "fewest")]
    for _ in range(60):
        simulation.load_all()
        simulation.step()
    assert all(work.told == ["finished"] for work in (other, *again))
    assert [work.state for work in works] == [RequestState.RUNNING] * 4
    assert simulation.scheduler.preemptions <= 3, "each gives way once, and one of them never"


def test_a_tenant_gets_a_place_though_another_has_all_places_and_many_waiting():
    """Prompts are short, so that those of the one have early turns, and answers long, so that none
    of them ends."""
    simulation = measured(max_running=4)
    for _ in range(3 * PREFETCH_LIMIT):
        simulation.enter(2, 50_000, tenant="many")
    for _ in range(20):
        simulation.load_all()
        simulation.step()
    one = simulation.add(20, 3, tenant="few")
    for _ in range(10):
        simulation.step()
    assert one.told == ["finished"]


def test_a_tenant_with_nothing_in_a_full_queue_is_let_in():
    simulation = measured(max_running=1, max_waiting=3)
    for _ in range(4):
        simulation.add(20, 50, tenant="many")
        simulation.step()
    with pytest.raises(OverloadedError, match="3 requests are queued already"):
        simulation.enter(20, tenant="many")
    simulation.enter(20, tenant="few")
    with pytest.raises(OverloadedError):
        simulation.enter(20, tenant="few")


def test_what_is_cancelled_holds_up_nobody_of_its_tenant():
    simulation = measured(max_running=1)
    first = simulation.add(50, 3)
    simulation.step()
    cancelled = [simulation.add(300, tenant="many") for _ in range(4)]
    again = simulation.add(310, tenant="many")
    other = simulation.add(400, tenant="few")
    simulation.scheduler.cancel(cancelled)
    assert admitted(simulation, [first, again, other]) == [first, again, other]


def test_those_without_a_token_give_way_first():
    simulation = measured(max_running=3)
    simulation.add(30, 50_000, tenant="many")
    prompt, second = simulation.add(3000, tenant="many"), simulation.add(30, 50_000, tenant="many")
    for _ in range(6):
        simulation.step()
    simulation.add(20, tenant="few")
    simulation.step()
    assert (prompt.state, second.state) == (RequestState.PREEMPTED, RequestState.RUNNING)


def test_nobody_gives_way_in_vain():
    simulation = Simulation(300, max_step_tokens=300)
    works = [simulation.add(60, 2000, tenant="many") for _ in range(2)]
    simulation.step()
    simulation.add(290, tenant="few")
    for _ in range(5):
        simulation.step()
    assert [work.state for work in works] == [RequestState.RUNNING] * 2
    assert simulation.scheduler.preemptions == 0


@examples(100)
@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 4), st.sampled_from("ab"), st.floats(0, 4)),
        min_size=2,
        max_size=25,
    ),
    st.integers(1, 3),
)
def test_who_arrives_after_a_requests_turn_comes_after_it(arrivals, max_running):
    simulation = measured(max_running=max_running)
    works: list[Work] = []
    placeless: set[Work] = set()
    order: list[Work] = []

    def step():
        running = {work.tenant for work in works if work.state is RequestState.RUNNING}
        simulation.step()
        new = [
            work
            for work in works
            if work.state not in (RequestState.READY, RequestState.LOADING) and work not in order
        ]
        order.extend(sorted(new, key=lambda work: work.turn))
        placeless.update(work for work in new if work.tenant not in running)

    for length, output, tenant, pause in arrivals:
        works.append(simulation.add(length, output, tenant=tenant))
        simulation.timing.now += pause
        step()
    while len(order) < len(works):
        simulation.load_all()
        step()
    for index, work in enumerate(order):
        overtaken = [
            other for other in order[index + 1 :] if other.turn + SIMILAR_SECONDS < work.arrived
        ]
        assert not overtaken or work in placeless
    simulation.run()
    assert all(work.told == ["finished"] for work in works)


def test_who_waits_longer_than_promised_is_refused_with_the_time_to_try_again():
    simulation = measured(slo_ttft=10)
    for _ in range(2):
        simulation.add(300)
    with pytest.raises(
        OverloadedError, match=r"after \d+\.\d seconds, but this server answers within 10"
    ) as refusal:
        simulation.enter(300)
    assert 1 <= refusal.value.retry_after <= 6
    short = simulation.add(20, tenant="other")
    simulation.timing.now += refusal.value.retry_after
    simulation.step()
    simulation.step()
    assert simulation.enter(300)
    assert short


def test_a_prompt_that_takes_longer_than_promised_is_served_when_nobody_is_before_it():
    simulation = measured(slo_ttft=2)
    long = simulation.add(800)
    with pytest.raises(OverloadedError):
        simulation.enter(900)
    simulation.run()
    assert long.told == ["finished"]
    assert simulation.enter(900)


def test_prompts_beside_decoding_take_longer_and_are_refused_sooner():
    alone, beside = measured(slo_ttft=10), measured(slo_ttft=10)
    decoding(beside, 2)
    for simulation in (alone, beside):
        simulation.add(250)
        simulation.step()
    alone.enter(350)
    with pytest.raises(OverloadedError):
        beside.enter(350)


def test_of_similar_requests_those_whose_chunks_are_in_memory_are_fetched_first():
    simulation = measured(memory=2 * CHUNK_BYTES, resident="a")
    first = simulation.enter(chunks="ab")
    second = simulation.enter(chunks="cd")
    same = simulation.enter(chunks="a")
    assert simulation.loads == [first, same], "it needs no memory, and the second has none"
    simulation.timing.now += 2 * SIMILAR_SECONDS
    simulation.enter(chunks="a")
    assert simulation.loads == [first, same], "much later ones do not overtake"
    simulation.load_all()
    simulation.run()
    assert simulation.loads[0] is second


def test_who_lost_a_chunk_is_fetched_before_those_who_wait_for_its_memory():
    simulation = measured(memory=2 * CHUNK_BYTES)
    kv = arriving(1)
    long, short = simulation.enter(200, chunks="a"), simulation.enter(1, chunks="bc")
    simulation.load(long, kv)
    kv.give_up()
    simulation.step()
    assert simulation.loads == [long]
    simulation.load_all()
    simulation.run()
    assert long.told == ["finished"]
    simulation.load_all()
    simulation.run()
    assert short.told == ["finished"]


def test_of_similar_requests_those_that_share_chunks_with_running_ones_are_admitted_first():
    simulation = measured(memory=10 * CHUNK_BYTES, max_running=2)
    running = [simulation.add(20, 30, chunks="a"), simulation.add(20, 10, chunks="b")]
    simulation.step()
    other, sharing = simulation.add(20, chunks="c"), simulation.add(20, chunks="a")
    simulation.timing.now += 2 * SIMILAR_SECONDS
    late = simulation.add(20, chunks="a")
    assert admitted(simulation, [*running, other, sharing, late])[2:] == [sharing, other, late]


def test_a_linked_prompt_counts_as_what_it_computes():
    simulation = measured(max_running=1)
    first = simulation.add(50, 3)
    simulation.step()
    plain = simulation.add(300)
    linked = simulation.enter(400)
    simulation.load(linked, arriving(380, LAYERS))
    assert admitted(simulation, [first, plain, linked]) == [first, linked, plain]


def test_a_tenants_workflows_come_one_after_the_other():
    """Another tenant keeps its turns, and what belongs to no workflow waits for a time at most."""
    simulation = measured(max_running=1)
    running = [simulation.add(50, 40, workflow="a"), simulation.add(20, 5, tenant="other")]
    simulation.step()
    simulation.timing.now += 1
    begun = simulation.add(20, workflow="b")
    simulation.timing.now += 1
    plain, other = simulation.add(20), simulation.add(20, tenant="other")
    simulation.timing.now += 1
    goes_on, again = simulation.add(20, workflow="a"), simulation.add(20, workflow="b")
    order = admitted(simulation, [*running, begun, plain, other, goes_on, again])
    own = [work for work in order if work.tenant != "other" and work not in running]
    assert own == [goes_on, begun, again, plain]
    assert order.index(other) < order.index(plain)


def test_a_workflow_is_ahead_by_a_bounded_time():
    simulation = measured(max_running=1)
    running = simulation.add(50, 400, workflow="a")
    simulation.step()
    plain = simulation.add(20)
    simulation.timing.now += WORKFLOW_LEAD_SECONDS - 1
    simulation.enter(1, workflow="a")
    simulation.timing.now += 2
    late = simulation.add(20, workflow="a")
    assert late.began == pytest.approx(late.arrived - WORKFLOW_LEAD_SECONDS)
    simulation.timing.now += WORKFLOW_LEAD_SECONDS + 1
    assert simulation.add(20, workflow="a").began == simulation.timing.now
    assert plain.began == plain.arrived
    assert running.began == running.arrived


def test_who_lets_its_workflow_go_first_waits_in_its_place():
    """Else a tenant's whole workflow would come in the place of one request, before others."""
    simulation = measured(max_running=3)
    simulation.add(20, 50_000, workflow="a")
    simulation.add(20, 50_000, tenant="other")
    simulation.add(20, 20)
    for _ in range(3):
        simulation.step()
    simulation.timing.now += 1
    plain = simulation.enter(20)
    own, others = [], []
    for _ in range(7):
        simulation.timing.now += 0.01
        others.append(simulation.enter(20, tenant="other"))
        own.append(simulation.enter(20, workflow="a"))
    waiting, order = [plain, *own, *others], []
    for _ in range(200):
        simulation.load_all()
        simulation.step()
        order += [work for work in waiting if work.started and work not in order]
    assert len(order) == len(waiting)
    assert order.index(own[0]) < order.index(plain)
    ahead = [sum(work in own for work in order[: order.index(other)]) for other in others]
    assert all(before <= place + 2 for place, before in enumerate(ahead)), ahead
    simulation.scheduler.check_integrity()


def test_choices_belong_to_the_workflow_from_its_beginning():
    simulation = measured(max_running=1)
    simulation.timing.now += 1
    first = simulation.add(20, 5, n=3, workflow="a")
    simulation.step()
    assert {work.began for work in first.choices} == {first.arrived}


def test_newcomers_wait_for_who_left_a_step_as_long_as_before():
    """All of its prompt is computed again once its chunk's layers are there."""
    simulation = measured(slo_ttft=2.0)
    late = simulation.enter(150)
    simulation.load(late, arriving(10, delivered=1))
    with pytest.raises(OverloadedError):
        simulation.enter(160)
    simulation.step()
    assert late.state is RequestState.LOADING
    with pytest.raises(OverloadedError):
        simulation.enter(160)
