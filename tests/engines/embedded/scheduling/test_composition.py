"""Steps by time: what decodes keeps its target, prompts are cut to fit, and none of them stands
still."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.scheduling.composition import (
    BACKGROUND_SECONDS,
    BACKGROUND_TOKENS,
    ELDEST_SHARE,
    IDLE_MULTIPLE,
    MIXED_STEPS,
    PIECE_MINIMUM,
    PROMPT_SHARE_MINIMUM,
)
from kvlinker.engines.embedded.scheduling.throughput import TokenCost
from tests.engines.embedded.fake_runner import Simulation, Timing, decodes
from tests.properties import examples

SLOTS = 100_000


def measured(timing=None, **options):
    """A simulation whose steps take what it has measured them to take before, but for the
    strain."""
    options = {"max_step_tokens": 512, "max_running": 64} | options
    return Simulation(SLOTS, timing=timing or Timing(), known=True, **options)


def decoding(simulation, count=1, length=20, **options):
    """Requests that decode without an end."""
    works = [simulation.add(length, 50_000, **options) for _ in range(count)]
    while any(work.output == 50_000 for work in works):
        simulation.step()
    return works


def idle_seconds(simulation):
    """The seconds of a step that only decodes, now."""
    simulation.step()
    return simulation.timing.taken[-1]


def mixed(simulation):
    """The seconds of the steps so far in which requests decoded and prompts were computed."""
    kinds = [{decodes(run) for run in batch.runs} for batch in simulation.runner.steps]
    return [
        seconds
        for seconds, kind in zip(simulation.timing.taken, kinds, strict=True)
        if len(kind) == 2
    ]


def prompt_tokens(batch):
    return sum(len(run.tokens) for run in batch.runs if not decodes(run))


def test_alone_a_prompt_takes_all_the_tokens_of_a_step():
    simulation = measured()
    simulation.add(2000)
    simulation.run()
    assert [prompt_tokens(batch) for batch in simulation.runner.steps] == [512, 512, 512, 464]


@pytest.mark.parametrize("per_token", [0.0005, 0.01])
def test_in_the_background_steps_are_short(per_token):
    """So that whoever arrives waits for one of them at most; where tokens are slow, for a few
    tokens."""
    timing = Timing(per_token=per_token, per_pair=1e-9)
    simulation = measured(timing)
    work = simulation.enter_background(1000)
    while not work.told:
        simulation.step()
    piece = max(BACKGROUND_SECONDS, BACKGROUND_TOKENS * per_token)
    *pieces, _ = timing.taken
    assert (
        0.9 * piece
        <= min(pieces) - timing.constant
        <= max(pieces) - timing.constant
        <= 1.05 * piece
    )


@pytest.mark.parametrize("target", [None, 0.15, 0.5])
def test_a_long_prefill_leaves_its_neighbour_its_time_per_token(target):
    simulation = measured(
        Timing(per_token=0.002, per_pair=1e-7, per_read=1e-7), seconds_per_token=target
    )
    neighbour, idle = decoding(simulation)[0], idle_seconds(simulation)
    long = simulation.add(5000)
    first = len(simulation.timing.taken)
    while not long.told:
        simulation.step()
    taken = simulation.timing.taken[first:-1]
    assert max(taken) <= 1.05 * (target or IDLE_MULTIPLE * idle)
    assert statistics.mean(taken) >= 0.85 * (target or IDLE_MULTIPLE * idle), "the time is used"
    assert neighbour.told == []


def test_a_target_that_decoding_alone_does_not_keep_leaves_prompts_a_little():
    simulation = measured(Timing(per_token=0.002, per_pair=1e-6), seconds_per_token=0.01)
    decoding(simulation)
    idle = idle_seconds(simulation)
    long = simulation.add(600)
    while not long.told:
        simulation.step()
    assert max(mixed(simulation)) <= 1.05 * (1 + PROMPT_SHARE_MINIMUM) * idle


def test_one_step_without_prompts_measures_decoding():
    simulation = Simulation(1000, timing=Timing(), max_step_tokens=64)
    simulation.add(30, 50)
    long = simulation.add(200)
    sizes = []
    while not long.told:
        sizes.append(len(simulation.step().tokens))
    assert sizes[:2] == [64, 1]
    assert all(size > 1 for size in sizes[2:MIXED_STEPS])


@examples(15)
@given(
    constant=st.floats(0.001, 1),
    per_token=st.floats(1e-4, 0.1),
    per_pair=st.floats(1e-8, 1e-5),
    strain=st.floats(0.6, 1.2),
    neighbours=st.integers(1, 8),
    context=st.integers(2, 400),
)
def test_no_step_takes_longer_than_thrice_an_idle_one(
    constant, per_token, per_pair, strain, neighbours, context
):
    simulation = measured(Timing(constant, per_token, per_pair, strain))
    decoding(simulation, neighbours, context)
    for _ in range(10):
        idle = idle_seconds(simulation)
    simulation.add(1000)
    first = len(simulation.timing.taken)
    for _ in range(60):
        batch = simulation.step()
        if prompt_tokens(batch) <= PIECE_MINIMUM:  # no less is possible
            simulation.timing.taken[-1] = 0
    assert max(simulation.timing.taken[first:]) <= 3 * idle


@examples(20)
@given(
    target=st.none() | st.floats(0.05, 1),
    neighbours=st.integers(1, 4),
    arrivals=st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 5), st.sampled_from("ab"), st.integers(0, 6)),
        max_size=12,
    ),
)
def test_what_decodes_keeps_its_target_whatever_prompts_come(target, neighbours, arrivals):
    simulation = measured(seconds_per_token=target)
    decoding(simulation, neighbours)
    works = []
    for length, output, tenant, steps in [*arrivals, (1, 1, "a", 30)]:
        works.append(simulation.add(length, output, tenant=tenant))
        for _ in range(steps):
            answers = neighbours + sum(not work.told for work in works)
            batch = simulation.step()
            decoded = sum(map(decodes, batch.runs))
            idle, soon = (
                simulation.timing.constant + simulation.timing.per_token * count
                for count in (decoded, max(decoded, answers - 1))
            )
            if prompt_tokens(batch) > PIECE_MINIMUM:
                allowed = max(target or IDLE_MULTIPLE * soon, (1 + PROMPT_SHARE_MINIMUM) * idle)
                least = PIECE_MINIMUM * simulation.timing.per_token  # which the eldest gets anyway
                assert simulation.timing.taken[-1] <= 1.05 * allowed + least


@pytest.mark.parametrize(("length", "together"), [(100, 8), (2000, 1)])
def test_the_more_wait_with_short_prompts_the_longer_steps_are(length, together):
    """So that soon as many decode together as there are, not few while many wait; answers with long
    prompts would not decode together soon."""
    simulation = measured()
    decoding(simulation)
    for _ in range(8):
        simulation.add(length, 50)
    simulation.step()
    soon = simulation.timing.constant + together * simulation.timing.per_token
    assert simulation.timing.taken[-1] == pytest.approx(IDLE_MULTIPLE * soon, rel=0.1)


def test_chunks_that_nobody_waits_for_do_not_make_steps_longer():
    simulation = measured()
    decoding(simulation)
    for _ in range(15):
        simulation.enter_chunk(100)
    simulation.load_all()
    simulation.step()
    idle = simulation.timing.constant + simulation.timing.per_token
    assert simulation.timing.taken[-1] == pytest.approx(IDLE_MULTIPLE * idle, rel=0.1)


@examples(10)
@given(strain=st.floats(0.3, 3))
def test_what_prompts_take_beside_decoding_is_learnt(strain):
    simulation = measured(Timing(strain=strain))
    decoding(simulation)
    idle = idle_seconds(simulation)
    simulation.add(1000)
    for _ in range(60):
        simulation.step()
    simulation.add(1000)
    first = len(simulation.timing.taken)
    for _ in range(60):
        simulation.step()
    assert max(simulation.timing.taken[first:]) <= 1.2 * IDLE_MULTIPLE * idle


def test_after_an_indivisible_prompt_prompts_wait_until_decoding_has_caught_up():
    simulation = measured()
    decoding(simulation)
    idle = idle_seconds(simulation)
    whole, other = simulation.add(300, refines=True), simulation.add(2000)
    first = len(simulation.timing.taken)
    while not other.told:
        simulation.step()
    assert whole.told == ["finished"]
    taken = simulation.timing.taken[first:-1]
    worst = taken.index(max(taken))
    assert taken[worst] > 10 * idle
    waited = [seconds for seconds in taken[worst + 1 :] if seconds < 1.1 * idle]
    assert len(waited) >= 0.8 * taken[worst] / idle
    assert statistics.mean(taken) <= 1.1 * IDLE_MULTIPLE * idle


def test_indivisible_prompts_come_one_to_a_step_beside_decoding():
    simulation = measured()
    decoding(simulation)
    works = [simulation.add(300, refines=True) for _ in range(4)]
    while not all(work.told for work in works):
        batch = simulation.step()
        assert len({run.owner for run in batch.runs if not decodes(run)}) <= 1


def test_short_prompts_come_before_a_long_one_that_is_being_computed():
    simulation = measured()
    decoding(simulation)
    long = simulation.add(5000)
    for _ in range(5):
        simulation.step()
    begin = simulation.timing.now
    short = simulation.add(20)
    while not short.told:
        simulation.step()
    assert simulation.timing.now - begin < 2 * (0.2 / (1 - ELDEST_SHARE)) * IDLE_MULTIPLE
    assert not long.told


@examples(15)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    load=st.floats(0.5, 3),
    answers=st.booleans(),
    long_length=st.integers(50, 300),
)
def test_nobody_starves_whatever_comes(lengths, load, answers, long_length):
    """Short prompts come without an end, and faster than they can be computed; the long one gets
    its share. What steps read for each piece, and give to those that measure, makes up to 2.8 times
    of it (745 random cases)."""
    simulation = measured(max_running=500, max_waiting=10_000)
    neighbours = decoding(simulation) if answers else []
    begin = simulation.timing.now
    long = simulation.add(long_length)
    alone = simulation.throughput.seconds([(0, long_length)]) / (
        1 - 1 / IDLE_MULTIPLE if answers else 1
    )
    due = begin
    steps = 0
    while not long.told:
        while due <= simulation.timing.now and simulation.scheduler.load().running < 400:
            length = lengths[steps % len(lengths)]
            simulation.add(length, tenant="other" if steps % 2 else "")
            due += length * simulation.timing.per_token / load
            steps += 1
        simulation.step()
    steps_taken = len(simulation.timing.taken) - 1
    assert simulation.timing.now - begin <= 3 * alone / ELDEST_SHARE + 2 * max(
        simulation.timing.taken
    ), steps_taken
    simulation.scheduler.cancel(neighbours)


def test_a_chunk_is_computed_in_the_end_whatever_comes():
    simulation = measured()
    decoding(simulation)
    chunk = simulation.enter_chunk(50)
    for _ in range(2000):
        simulation.add(30)
        simulation.step()
        if chunk.told:
            break
    assert chunk.told == ["finished"]


def test_decoding_is_measured_anew_while_prompts_are_computed():
    """The machine becomes slower: what a step takes without prompts is seen, and prompts get as
    much as before."""
    simulation = measured()
    decoding(simulation)
    long = simulation.add(8000)
    for _ in range(10 * MIXED_STEPS):
        simulation.step()
    sizes = [prompt_tokens(batch) for batch in simulation.runner.steps[-2 * MIXED_STEPS :]]
    assert sizes.count(0) == 2
    simulation.timing.constant *= 2
    for _ in range(20 * MIXED_STEPS):
        simulation.step()
    assert simulation.timing.taken[-1] == pytest.approx(IDLE_MULTIPLE * 0.21, rel=0.25)
    assert not long.told


def begun(simulation, **options):
    """A long prompt, some steps of which are computed."""
    long = simulation.add(8000, **options)
    for _ in range(3):
        simulation.step()
    return long


def test_a_quick_prompt_beside_a_long_one_makes_the_next_step_short():
    """First tokens come with the end of a step, which must not hold all that memory has room for
    then."""
    simulation = measured()
    long = begun(simulation)
    assert simulation.timing.taken[-1] > 5
    quick = simulation.add(1, 3)
    batch = simulation.step()
    assert {run.owner for run in batch.runs} == {quick.sequence, long.sequence}
    assert simulation.timing.taken[-1] <= 1.05 * IDLE_MULTIPLE * 0.11
    assert quick.output == 2, "it has its first token"


@pytest.mark.parametrize("length", [40, 100, 300])
def test_a_short_prompt_leaves_a_long_one_a_share_of_the_step_in_which_it_ends(length):
    simulation = measured()
    long = begun(simulation)
    short = simulation.add(length, 3)
    batch = simulation.step()
    taken = {run.owner: len(run.tokens) for run in batch.runs}
    assert taken[short.sequence] == length
    cost = TokenCost(0.01, 1e-5, 1e-6)
    least = ELDEST_SHARE / (1 - ELDEST_SHARE) * cost.of([(0, length)])
    (given,) = (cost.of([(r.start, r.end)]) for r in batch.runs if r.owner is long.sequence)
    token = cost.of([(1999, 2000)])
    assert least - token <= given <= max(least, (IDLE_MULTIPLE - 1) * 0.11) + token


def test_short_prompts_that_come_together_are_computed_together():
    """However little time each takes: nobody long is there for whom to hurry."""
    simulation = measured()
    for _ in range(5):
        simulation.add(100, 3)
    assert prompt_tokens(simulation.step()) == 500


@pytest.mark.parametrize("neighbours", [0, 1])
def test_a_quick_prompt_of_a_tenant_that_was_served_most_waits_for_no_others_step(neighbours):
    simulation = measured()
    decoding(simulation, neighbours, tenant="third")
    greedy = simulation.add(6000, tenant="greedy")
    while not greedy.told:
        simulation.step()
    long = begun(simulation, tenant="other")
    assert simulation.scheduler._composer._served["greedy"] > 20
    quick = simulation.add(1, 3, tenant="greedy")
    batch = simulation.step()
    if quick.output == 3:  # this one measured decoding alone
        assert neighbours
        batch = simulation.step()
    assert quick.sequence in {run.owner for run in batch.runs}
    assert long.sequence in {run.owner for run in batch.runs}


@pytest.mark.parametrize("neighbours", [0, 1])
@pytest.mark.parametrize("flooding", ["", "other"])
def test_quick_prompts_without_an_end_leave_a_long_one_its_share(neighbours, flooding):
    """As many quick prompts as there may be, of its own tenant or another."""
    simulation = measured(max_running=500, max_waiting=10_000)
    works = decoding(simulation, neighbours)
    begin = simulation.timing.now
    long = simulation.add(300)
    alone = simulation.throughput.seconds([(0, 300)]) / (1 - 1 / IDLE_MULTIPLE)
    while not long.told:
        for _ in range(3):
            simulation.add(1, tenant=flooding)
        simulation.step()
    assert simulation.timing.now - begin <= 3 * alone / ELDEST_SHARE
    simulation.scheduler.cancel(works)
