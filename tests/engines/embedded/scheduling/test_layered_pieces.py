"""Long prompts beside requests that decode: pieces of which steps compute some layers, from their
beginning until all are done, or their request runs no more."""

import statistics
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.execution.capturing import Recorder
from kvlinker.engines.embedded.requests.request import RequestState
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.engines.embedded.scheduling.composition import (
    ELDEST_SHARE,
    IDLE_MULTIPLE,
    LAYERED_MINIMUM,
    PIECE_STEPS,
)
from tests.engines.embedded.fake_runner import (
    PIECE_LAYERS,
    Simulation,
    Timing,
    Work,
    arriving,
    decodes,
)
from tests.properties import examples

DEEP = Timing(per_read=1e-4)
"""Reading the KV of 1,000 tokens takes as long as a step that only decodes."""


def measured(**options) -> Simulation:
    """A simulation whose steps take what it has measured them to take before."""
    given = {"max_step_tokens": 512, "max_running": 64, "piece_tokens": 256} | options
    timing = given.pop("timing", None) or Timing(per_read=DEEP.per_read)
    return Simulation(given.pop("slots", 100_000), timing=timing, known=True, **given)


def decoding(simulation, count=1):
    works = [simulation.add(20, 50_000) for _ in range(count)]
    while any(work.output == 50_000 for work in works):
        simulation.step()
    return works


def seconds_of(simulation, call) -> float:
    before = simulation.timing.now
    call()
    return simulation.timing.now - before


def until_begun(simulation) -> None:
    for _ in range(20):
        if simulation.runner.begun is not None:
            return
        simulation.step()
    raise AssertionError("no piece has begun")


def test_a_long_prompt_delays_who_decodes_by_no_more_than_the_target_however_much_it_reads():
    simulation = measured()
    neighbour = decoding(simulation)[0]
    idle = seconds_of(simulation, simulation.step)
    long = simulation.add(3000)
    taken = []
    while not long.told:
        taken.append(seconds_of(simulation, simulation.step))
    assert long.told == ["finished"]
    assert not neighbour.told
    sizes = [len(batch.tokens) for batch in simulation.runner.pieces]
    assert sum(sizes) >= 2800, "its first tokens read little, and its last ones fit into a step"
    assert min(sizes[:-1]) >= LAYERED_MINIMUM
    layer = max(taken) - IDLE_MULTIPLE * idle  # the last one may end behind the target
    assert layer < 1.5 * PIECE_STEPS * (IDLE_MULTIPLE - 1) * idle / PIECE_LAYERS
    assert statistics.mean(taken[:-1]) < 1.3 * IDLE_MULTIPLE * idle
    by_tokens = measured(piece_tokens=0)
    decoding(by_tokens)
    other = by_tokens.add(3000)
    worst = 0.0
    while not other.told:
        worst = max(worst, seconds_of(by_tokens, by_tokens.step))
    assert worst > max(taken)
    assert by_tokens.timing.now > simulation.timing.now


@pytest.mark.parametrize("target", [None, 0.11, 0.15])
def test_prompts_that_read_little_are_computed_with_what_decodes(target):
    """A piece would read the weights once more; with a tight target that is most of its time."""
    simulation = measured(seconds_per_token=target, timing=Timing())
    decoding(simulation)
    for length in (5, 20, 40, 100):
        work = simulation.add(length)
        while not work.told:
            simulation.step()
    assert not simulation.runner.pieces


def test_the_last_tokens_of_a_long_prompt_delay_nobody():
    """They read as much as a piece, which several steps share."""
    simulation = measured()
    decoding(simulation)
    simulation.add(6000, runs=[(5997, 6000)])
    simulation.step()
    begun = simulation.runner.begun
    assert begun is not None
    assert len(begun[0].tokens) == 3


def test_a_short_prompt_behind_one_that_took_too_long_gets_no_piece():
    """What is left of a step that pays for it says nothing about those that follow."""
    simulation = measured(timing=Timing())
    decoding(simulation)
    for length in range(40, 60):
        for work in (simulation.add(length, refines=True), simulation.add(24)):
            while not work.told:
                simulation.step()
    assert not simulation.runner.pieces


def test_prompts_of_several_tenants_are_computed_by_pieces_in_turn():
    """None of them gets tokens in the steps that others' pieces go on in."""
    simulation = measured()
    decoding(simulation)
    works = [simulation.add(3000, tenant=tenant) for tenant in "abc"]
    first, taken = len(simulation.runner.steps), []
    while not all(work.told for work in works):
        taken.append(seconds_of(simulation, simulation.step))
    mixed = [
        len(run.tokens)
        for batch in simulation.runner.steps[first:]
        for run in batch.runs
        if not decodes(run)
    ]
    assert sum(mixed) < 600
    assert max(taken) < 5 * simulation.timing.constant


def test_tokens_of_a_prompt_are_apart_from_answers_that_are_recorded():
    """What was generated before a preemption: it is recorded again, by a whole step."""
    simulation = measured()
    decoding(simulation)
    work = simulation.enter(2000, output=100)
    sequence = work.make_sequence()
    sequence._answer = cast(Recorder, object())
    simulation.loads.remove(work)
    simulation.scheduler.loaded(work, sequence)
    while work.output > 60:
        simulation.step()
    with simulation.scheduler._lock:
        simulation.scheduler._preempt(work)
    while not work.told:
        simulation.step()
    assert simulation.runner.pieces[-1].positions[-1] == 1999


@pytest.mark.parametrize("per_read", [1e-4, 3e-4, 1e-3])
def test_more_requests_decode_than_a_step_holds(per_read):
    """None of them is a prompt, whose next token might be a piece."""
    simulation = measured(
        max_step_tokens=2, piece_tokens=64, timing=Timing(per_read=per_read, per_pair=1e-7)
    )
    works = [simulation.add(3000, output, runs=[(2999, 3000)]) for output in (20, 30, 40, 50)]
    for _ in range(200):
        simulation.step()
    assert all(work.told == ["finished"] for work in works)
    assert all(len(batch.tokens) == 1 for batch in simulation.runner.pieces)
    assert len(simulation.runner.pieces) < len(works)


@pytest.mark.parametrize("piece_tokens", [0, 256])
def test_of_two_tenants_none_waits_for_the_other_where_few_tokens_exceed_a_step(piece_tokens):
    """Four tokens take longer than a step has for prompts, and so does what is due to the prompt
    whose turn came first."""
    simulation = measured(seconds_per_token=0.12, piece_tokens=piece_tokens)
    decoding(simulation)
    long = simulation.add(4000, tenant="long")
    longest = 0.0
    for _ in range(150):
        short = simulation.add(12, tenant="short")
        began = simulation.timing.now
        while not short.told:
            simulation.step()
        longest = max(longest, simulation.timing.now - began)
    assert longest < 3
    assert long.sequence.pending[0][0] > 600


def test_nothing_is_looked_at_where_no_pieces_can_be(monkeypatch):
    simulation = measured(piece_tokens=0)
    monkeypatch.setattr(TokenSequence, "peek", lambda *_: int("looked"))
    decoding(simulation)
    work = simulation.add(3000)
    while not work.told:
        simulation.step()


def test_nothing_is_held_of_a_piece_when_the_engine_is_closed():
    simulation = measured()
    decoding(simulation)
    long = simulation.add(400)
    until_begun(simulation)
    simulation.scheduler.close()
    simulation.loop._loop()
    assert long.told == ["failed"]
    assert simulation.runner.begun is None


def test_a_piece_is_finished_at_once_when_nobody_decodes_any_more():
    simulation = measured()
    neighbour = decoding(simulation)[0]
    long = simulation.add(400)
    until_begun(simulation)
    begun, pieces = simulation.runner.begun, len(simulation.runner.pieces)
    assert begun is not None
    assert begun[1] < PIECE_LAYERS
    simulation.scheduler.cancel([neighbour])
    simulation.step()
    assert simulation.runner.pieces[pieces:] == [begun[0]]
    simulation.run()
    assert long.told == ["finished"]


@pytest.mark.parametrize("how", ["cancelled", "failed", "preempted"])
def test_a_piece_whose_request_runs_no_more_is_given_up(how, monkeypatch):
    simulation = measured(slots=500)
    neighbour = decoding(simulation)[0]
    long = simulation.add(300)
    until_begun(simulation)
    if how == "cancelled":
        simulation.scheduler.cancel([long])
        simulation.step()
        assert long.told == ["cancelled"]
    elif how == "failed":
        with monkeypatch.context() as patches:
            patches.setattr(simulation.runner, "compute_layers", lambda *_: int("no memory"))
            simulation.step()
        assert long.told == ["failed"]
        assert long.state is RequestState.FINISHED
    else:
        with simulation.scheduler._lock:
            simulation.scheduler._preempt(long)
        simulation.step()
        assert long.started
    if how != "preempted":
        simulation.step()
        assert simulation.runner.begun is None
    assert not neighbour.told
    other = simulation.add(150)
    works = [other, *([long] if how == "preempted" else [])]
    while not all(work.told for work in works):
        simulation.step()
    assert all(work.told == ["finished"] for work in works)


def test_short_prompts_come_before_the_piece_and_leave_it_a_share_of_the_step():
    simulation = measured()
    decoding(simulation)
    idle = seconds_of(simulation, simulation.step)
    long = simulation.add(20_000)
    until_begun(simulation)
    begin, computed = simulation.timing.now, simulation.runner.pieces.copy()
    taken = []
    for _ in range(300):
        short = [simulation.add(10) for _ in range(2)]
        while not all(work.told for work in short):
            taken.append(seconds_of(simulation, simulation.step))
    alone = 600 * 10 * simulation.timing.per_token
    assert simulation.timing.now - begin < 3 * alone / (1 - ELDEST_SHARE)
    assert statistics.mean(taken) < 1.05 * IDLE_MULTIPLE * idle
    assert len(simulation.runner.pieces) > len(computed), "the long one goes on"
    assert not long.told


def test_of_long_prompts_the_eldest_gets_every_fourth_piece():
    simulation = measured()
    decoding(simulation)
    eldest = simulation.add(3000)
    until_begun(simulation)
    simulation.timing.now += 1000
    shorter = [simulation.add(800) for _ in range(5)]
    while not all(work.told for work in shorter):
        simulation.step()
    owners = [next(iter(batch.owners)) for batch in simulation.runner.pieces]
    own = [index for index, owner in enumerate(owners) if owner is eldest.sequence]
    assert own == list(range(0, len(owners), 4))


def waited(piece_tokens) -> float:
    """The seconds that a short prompt waits whose tenant was served more than that of a long one,
    while a third tenant's chunk keeps that one's level."""
    simulation = measured(piece_tokens=piece_tokens)
    decoding(simulation)
    simulation.enter_chunk(20_000, tenant="chunks")
    for _ in range(3):
        simulation.step()
    served = simulation.add(3000, tenant="served")
    while not served.told:
        simulation.step()
    long = simulation.add(6000, tenant="long")
    for _ in range(20):
        simulation.step()
    short = simulation.add(10, tenant="served")
    began = simulation.timing.now
    for _ in range(50):
        if not short.told:
            simulation.step()
    assert short.told == ["finished"]
    assert not long.told
    return simulation.timing.now - began


def test_a_short_prompt_whose_turn_came_first_has_its_share_beside_pieces_too():
    assert waited(piece_tokens=256) < 2 * waited(piece_tokens=0)


def test_an_eldest_prompt_that_gets_no_pieces_leaves_them_to_others():
    simulation = measured()
    decoding(simulation)
    chunk = simulation.enter_chunk(20_000)
    for _ in range(3):
        simulation.step()
    simulation.timing.now += 3000
    long = simulation.add(3000)
    while not long.told:
        simulation.step()
    sizes = [len(batch.tokens) for batch in simulation.runner.pieces]
    assert sum(sizes) >= 2800
    assert not chunk.told
    assert chunk.sequence.pending[0][0] > 100, "it goes on meanwhile"


@pytest.mark.parametrize("when", ["between", "within"])
def test_nothing_is_held_of_a_piece_when_its_request_has_ended_and_nobody_else_is_there(
    when, monkeypatch
):
    simulation = measured()
    neighbour = decoding(simulation)[0]
    long = simulation.add(300)
    until_begun(simulation)

    def cancel(*_) -> None:
        simulation.scheduler.cancel([neighbour, long])

    if when == "between":
        cancel()
    else:
        step = simulation.runner.step

        def cancelled(*given):
            cancel()
            return step(*given)

        monkeypatch.setattr(simulation.runner, "step", cancelled)
    simulation.step()
    assert long.told == ["cancelled"]
    assert simulation.runner.begun is None
    assert simulation.scheduler.piece is None


def test_what_a_piece_has_computed_does_not_count_as_left_undone():
    """Whoever waits behind it would else come earlier, by the seconds of the last piece."""
    simulation = measured()
    decoding(simulation)
    long = simulation.add(400)
    simulation.step()
    second = simulation.add(400)
    backlog = second.backlog
    assert backlog > 0
    while not long.told:
        simulation.step()
    assert second.backlog == pytest.approx(backlog)


def test_what_is_arriving_or_refines_is_computed_as_before():
    simulation = measured()
    decoding(simulation)
    whole, streamed = simulation.add(300, refines=True), simulation.enter(600)
    simulation.load(streamed, arriving(5))
    for _ in range(20):
        simulation.step()
    assert whole.told == ["finished"]
    assert not simulation.runner.pieces


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=8),
    st.integers(160, 300),
    st.integers(1, 6),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_everything_finishes_and_no_kv_is_lost(requests, slots, max_running, most, random):
    """Prompts are slow, so that most are computed by pieces; some are cancelled, and others
    preempted, while theirs are under way."""
    simulation = measured(
        slots=slots,
        max_running=max_running,
        piece_tokens=most,
        timing=Timing(per_token=0.1, per_read=0.05),
    )
    pending = list(requests)
    works: list[Work] = []
    steps = 0
    while pending or not all(work.told for work in works):
        if pending and random.random() < 0.3:
            works.append(simulation.add(*pending.pop()))
        elif works and random.random() < 0.02:
            simulation.scheduler.cancel([random.choice(works)])
        simulation.step()
        steps += 1
        assert steps < 20_000, "no progress"
    assert all(len(work.told) == 1 for work in works)
    assert simulation.slots.used == 0


@pytest.mark.whole
@examples(15)
@given(strain=st.floats(0.3, 3))
def test_what_pieces_take_is_learnt(strain):
    simulation = measured(timing=Timing(strain=strain, per_read=1e-4))
    decoding(simulation)
    for _ in range(4):
        work = simulation.add(1500)
        while not work.told:
            simulation.step()
    cost = simulation.throughput.cost_beside_decoding
    assert cost is not None
    timing = simulation.timing
    for batch in simulation.runner.pieces[-8:]:
        (run,) = batch.runs
        ranges = [(run.start, run.end)]
        taken = strain * (
            timing.per_token * len(run.tokens)
            + timing.per_pair * len(run.tokens) * (run.start + run.end + 1) / 2
        )
        taken += timing.per_read * run.start
        assert cost.of(ranges) == pytest.approx(taken, rel=0.05)
