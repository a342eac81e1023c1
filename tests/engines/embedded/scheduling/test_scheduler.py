"""Scheduling without a model: which state a request is in, what is computed when, and who holds the
slots."""

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlinker.base.errors import EngineClosedError, KVLinkerError, OverloadedError
from kvlinker.engines.embedded.requests import sequence as slots_module
from kvlinker.engines.embedded.requests.request import RequestState
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.engines.embedded.scheduling import queues
from kvlinker.engines.embedded.scheduling import scheduler as scheduling
from kvlinker.engines.embedded.scheduling.scheduler import PREFETCH_LIMIT, VARIANT_LIMIT
from tests.engines.embedded.fake_runner import (
    CHUNK_BYTES,
    LAYER,
    LAYERS,
    BackgroundWork,
    ChunkWork,
    Simulation,
    Timing,
    VariantWork,
    Work,
    arriving,
)
from tests.properties import examples


def owners(batch):
    return [run.owner for run in batch.runs]


def state_of(work: Work) -> RequestState:
    """Return where the work stands now: mypy takes an attribute that was compared to keep its
    value."""
    return work.state


def test_long_prefills_are_cut_at_the_budget():
    simulation = Simulation(100, max_step_tokens=7)
    long = simulation.add(24)
    sizes = [len(simulation.step().tokens) for _ in range(4)]
    assert sizes == [7, 7, 7, 3]
    assert long.told == ["finished"]


def test_decoding_comes_before_prefill():
    simulation = Simulation(200, max_step_tokens=5)
    decoding = simulation.add(3, 50)
    simulation.step()
    simulation.add(40)
    for _ in range(5):
        batch = simulation.step()
        assert owners(batch)[0] is decoding.sequence
        assert len(batch.tokens) == 5


def test_requests_are_admitted_in_order_of_arrival_and_only_as_slots_allow():
    simulation = Simulation(50, max_step_tokens=100)
    works = [simulation.enter(20, 1) for _ in range(3)]
    for work in reversed(works):
        simulation.load(work)
    simulation.scheduler.next_step()
    assert [work.state for work in works] == [
        RequestState.RUNNING,
        RequestState.RUNNING,
        RequestState.READY,
    ]
    load = simulation.scheduler.load()
    assert (load.running, load.waiting) == (2, 1)


def test_a_linked_sequence_computes_only_its_runs():
    simulation = Simulation(100)
    work = simulation.add(30, runs=[(4, 6), (20, 23), (28, 30)])
    simulation.runner.pool.tokens[:30] = work.sequence.tokens
    batch = simulation.step()
    assert [(run.start, run.end) for run in batch.runs] == [(4, 6), (20, 23), (28, 30)]
    assert [run.wants_logits for run in batch.runs] == [False, False, True]


def test_cancelling_frees_at_once_running_or_waiting():
    simulation = Simulation(30, max_step_tokens=4)
    running, waiting = simulation.add(20), simulation.add(20)
    simulation.step()
    simulation.scheduler.cancel([waiting, running])
    simulation.scheduler.cancel([running])
    assert simulation.step() is None
    assert simulation.slots.used == 0
    assert running.told == waiting.told == ["cancelled"]
    simulation.scheduler.cancel([running])
    assert simulation.step() is None
    assert running.told == ["cancelled"]


@pytest.mark.parametrize("how", ["finished", "failed", "cancelled"])
def test_an_ending_that_raises_ends_nobody_else(monkeypatch, caplog, how):
    def tell(*_):
        raise RuntimeError("nobody is there")

    simulation = Simulation(200)
    broken, other = simulation.add(5), simulation.add(5, 3)
    if how == "finished":
        monkeypatch.setattr(broken, "advance", lambda logits: tell)
    elif how == "failed":
        monkeypatch.setattr(broken, "advance", tell)
        monkeypatch.setattr(broken, "fail", tell)
    else:
        monkeypatch.setattr(broken, "cancel", tell)
        simulation.scheduler.cancel([broken])
    simulation.run()
    assert broken.state is RequestState.FINISHED
    assert other.told == ["finished"]
    assert "nobody is there" in caplog.text


def test_an_ending_that_raises_does_not_keep_the_engine_from_closing(monkeypatch):
    def fail(error):
        raise RuntimeError("nobody is there")

    simulation = Simulation(200)
    works = [simulation.enter(5) for _ in range(8)]
    monkeypatch.setattr(works[3], "fail", fail)
    simulation.loop.start()
    simulation.loop.close()
    assert [work.told for work in works] == [
        [] if work is works[3] else ["failed"] for work in works
    ]


def test_states_change_as_told_and_in_no_other_way():
    simulation = Simulation(30)
    work = simulation.enter(5)
    assert state_of(work) is RequestState.LOADING
    for state in (RequestState.RUNNING, RequestState.PREEMPTED, RequestState.LOADING):
        with pytest.raises(RuntimeError, match=f"loading cannot become {state.value}"):
            simulation.scheduler._move(work, state)
    simulation.load_all()
    assert state_of(work) is RequestState.READY
    simulation.run()
    assert state_of(work) is RequestState.FINISHED
    with pytest.raises(RuntimeError, match="finished cannot become ready"):
        simulation.scheduler._move(work, RequestState.READY)


def test_the_last_admitted_gives_way_and_starts_again():
    simulation = Simulation(180, max_step_tokens=100)
    first, second = simulation.add(20, 100), simulation.add(20, 100)
    while second.state is not RequestState.PREEMPTED:
        simulation.step()
    assert first.state is RequestState.RUNNING
    assert simulation.scheduler.preemptions == 1
    simulation.run()
    assert first.told == second.told == ["finished"]


def test_so_many_are_fetched_ahead():
    simulation = Simulation(200, max_running=1)
    for _ in range(PREFETCH_LIMIT + 2):
        simulation.enter(5)
    assert len(simulation.loads) == PREFETCH_LIMIT
    simulation.load(simulation.loads[0])  # it waits for slots instead
    assert len(simulation.loads) == PREFETCH_LIMIT - 1
    simulation.step()
    assert len(simulation.loads) == PREFETCH_LIMIT


def test_a_request_is_alone_while_there_is_no_other_in_any_state():
    simulation = Simulation(200)
    first = simulation.enter(5)
    assert simulation.scheduler.is_alone(first)
    second = simulation.enter(5)
    assert not simulation.scheduler.is_alone(first)
    simulation.load(second)
    assert not simulation.scheduler.is_alone(first)
    simulation.scheduler.cancel([second])
    simulation.step()
    assert simulation.scheduler.is_alone(first)


def test_fetches_whose_requests_have_ended_count_until_they_report():
    simulation = Simulation(200)
    works = [simulation.enter(5) for _ in range(PREFETCH_LIMIT + 2)]
    simulation.scheduler.cancel(works[: PREFETCH_LIMIT + 1])
    simulation.step()
    assert simulation.loads == works[:PREFETCH_LIMIT]
    simulation.load(works[0])
    assert works[0].sequence is None, "it would keep the KV alive"
    assert simulation.loads[-1] is works[-1], "the one before it was cancelled"


def test_more_than_may_wait_are_refused_and_hold_no_place():
    simulation = Simulation(200, max_waiting=3, max_running=2)
    simulation.add(5, 10, n=2)
    simulation.step()
    simulation.add(5)
    simulation.enter(5)
    simulation.enter(5, n=100)
    for _ in range(5):
        with pytest.raises(OverloadedError, match="3 requests"):
            simulation.enter(5)
    assert simulation.scheduler.load().waiting == 3
    simulation.enter_chunk(5)  # chunks are not answers
    while not simulation.scheduler.idle:
        simulation.load_all()
        simulation.step()
    assert simulation.enter(5)


def test_what_cannot_be_loaded_fails_alone():
    simulation = Simulation(200)
    bad, good = simulation.enter(5), simulation.enter(5)
    simulation.scheduler.failed(bad, KVLinkerError("lost"))
    simulation.loads.remove(bad)
    simulation.load_all()
    simulation.run()
    assert (bad.told, good.told) == (["failed"], ["finished"])
    simulation.scheduler.failed(bad, KVLinkerError("again"))
    assert bad.told == ["failed"]


def test_one_chunk_at_a_time_beside_answers_and_more_without():
    simulation = Simulation(1000, max_step_tokens=8)
    answer = simulation.add(30)
    chunks = [simulation.enter_chunk(9) for _ in range(3)]
    waiting = [simulation.add(900) for _ in range(2)]
    batch = simulation.step()
    assert owners(batch) == [answer.sequence]
    assert [chunk.state for chunk in chunks] == [
        RequestState.RUNNING,
        RequestState.READY,
        RequestState.READY,
    ]
    simulation.scheduler.cancel(waiting)
    simulation.step()
    assert [chunk.state for chunk in chunks] == [RequestState.RUNNING] * 3


def test_the_same_chunk_is_one_request_until_it_ends():
    simulation = Simulation(100)
    first = simulation.enter_chunk(9, identity="key")
    assert simulation.enter_chunk(9, identity="key") is first
    assert simulation.enter_chunk(9, identity="other") is not first
    simulation.run()
    assert simulation.enter_chunk(9, identity="key") is not first


def test_a_chunk_that_an_answer_waits_for_comes_first():
    simulation = Simulation(100, max_running=1)
    chunks = [simulation.enter_chunk(9, identity=name) for name in "abc"]
    simulation.enter_chunk(9, identity="c", urgent=True)
    assert owners(simulation.step()) == [chunks[2].sequence]
    simulation.run()
    assert all(chunk.told == ["finished"] for chunk in chunks)


def test_a_chunk_that_an_answer_waits_for_gets_slots_before_answers_that_came_later():
    simulation = Simulation(100, max_step_tokens=200)
    running = simulation.add(30, 20)
    simulation.step()
    chunk = simulation.enter_chunk(90, urgent=True)
    later = [simulation.add(20) for _ in range(5)]
    while chunk.state is not RequestState.FINISHED:
        assert all(work.state is RequestState.READY for work in later)
        simulation.step()
    assert running.told == ["finished"]
    simulation.run()
    assert all(work.told == ["finished"] for work in later)


def test_variants_wait_for_an_idle_engine_and_the_last_comes_first():
    simulation = Simulation(1000)
    variants = [simulation.enter_variant(9) for _ in range(VARIANT_LIMIT + 1)]
    assert variants[0].told == ["cancelled"], "the oldest makes room"
    chunk, answer = simulation.enter_chunk(9), simulation.add(9, 3)
    while not (chunk.told and answer.told):
        assert all(variant.state is not RequestState.RUNNING for variant in variants)
        simulation.step()
    order = []
    while simulation.step() is not None:
        order += [
            variant for variant in variants if variant.told == ["finished"] and variant not in order
        ]
    assert order == variants[:0:-1]


@pytest.mark.parametrize("others", ["chunk", "answer"])
def test_what_runs_in_the_background_pauses_and_goes_on(others):
    simulation = Simulation(1000, max_step_tokens=8)
    background = simulation.enter_background(40)
    simulation.step()
    other = simulation.enter_chunk(9) if others == "chunk" else simulation.add(9, 3)
    while not other.told:
        assert background.sequence not in owners(simulation.step())
    assert background.state is RequestState.RUNNING, "it keeps its slots"
    assert simulation.scheduler.load().running == 0
    steps = 0
    while not background.told:
        steps += 1
        simulation.step()
    assert steps == 4, "what was computed before is not computed again"


def test_what_runs_in_the_background_gives_its_slots_up_to_whoever_needs_them():
    simulation = Simulation(100, max_step_tokens=8)
    background = simulation.enter_background(50)
    simulation.step()
    small = simulation.add(8, 3)
    simulation.step()
    assert state_of(background) is RequestState.RUNNING
    large = simulation.add(80)
    simulation.step()
    assert state_of(background) is RequestState.PREEMPTED
    simulation.run()
    assert small.told == large.told == background.told == ["finished"]


@pytest.mark.parametrize("kind", [ChunkWork, BackgroundWork])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_each_of_many_takes_no_look_at_all_others(kind, how, monkeypatch):
    looks = []
    set_turn = queues.set_turn

    def noted(work):
        looks.append(work)
        set_turn(work)

    monkeypatch.setattr(queues, "set_turn", noted)
    simulation = Simulation(200, timing=Timing(), known=True)
    works = [kind(20) for _ in range(600)]
    for work in works:
        simulation.timing.now += 0.001
        simulation.scheduler.enter(work)
    assert all(work.seconds_left for work in works)
    assert len(looks) < 100 * len(works)
    looks.clear()
    if how == "cancelled":
        simulation.scheduler.cancel(works)
        simulation.step()
        simulation.scheduler.check_integrity()
    else:
        simulation.scheduler.close()
        simulation.loop.start()
        simulation.loop.close()
    assert all(work.told == [how] for work in works)
    assert len(looks) < 100 * len(works)


def test_what_runs_in_the_background_counts_for_no_place():
    simulation = Simulation(1000, max_step_tokens=8, max_running=1)
    background = simulation.enter_background(40)
    simulation.step()
    answer = simulation.add(9)
    simulation.run()
    assert answer.told == background.told == ["finished"]


def test_a_late_layer_is_waited_for_beside_what_runs_in_the_background():
    """Only an answer that could run ends the wait in the middle of a step."""
    simulation = Simulation(1000)
    simulation.enter_background(40)
    simulation.step()
    work, kv = simulation.enter(5), arriving(1, 1)
    simulation.load(work, kv)
    simulation.scheduler.next_step()
    came = iter([False, True])
    waited = threading.Thread(target=lambda: simulation.scheduler.wait_in_step(lambda: next(came)))
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()
    simulation.scheduler.wake()
    waited.join(5)
    assert not waited.is_alive()


def test_choices_fork_from_one_prompt():
    simulation = Simulation(1000, max_step_tokens=10)
    work = simulation.add(25, 4, n=3)
    choices = work.all_choices()
    computed = 0
    while (batch := simulation.step()) is not None:
        computed += sum(len(run.tokens) for run in batch.runs if run.start < 25)
    assert computed == 25
    assert all(choice.told == ["finished"] for choice in choices)


def test_choices_are_admitted_without_a_look_at_all_others_for_each(monkeypatch):
    """Else one request for many answers holds up all others for a third of a second."""
    count, looks = 100, 0
    in_place = vars(TokenSequence)["prompt_in_place"].fget

    def counted(sequence):
        nonlocal looks
        looks += 1
        return in_place(sequence)

    simulation = Simulation(10_000, max_step_tokens=200, max_running=count)
    choices = simulation.add(25, 3, n=count).all_choices()
    simulation.step()
    monkeypatch.setattr(TokenSequence, "prompt_in_place", property(counted))
    simulation.loop._turn()
    assert all(state_of(choice) is RequestState.RUNNING for choice in choices)
    assert looks < count**2


def test_choices_take_slots_for_the_prompt_once():
    simulation = Simulation(1000, max_step_tokens=100)
    choices = simulation.add(60, 10, n=8).all_choices()
    for _ in range(4):
        simulation.step()
    assert all(choice.state is RequestState.RUNNING for choice in choices)
    assert simulation.slots.used == 60 + 8 * 10


def test_a_request_waits_for_room_in_memory_while_others_use_it():
    simulation = Simulation(1000, memory=2 * CHUNK_BYTES)
    first, second = simulation.enter(chunks="ab"), simulation.enter(chunks="bc")
    assert simulation.loads == [first], "three chunks do not fit"
    same = simulation.enter(chunks="a")
    assert simulation.loads == [first], "nobody overtakes the second"
    simulation.load(first)
    simulation.run()
    assert first.told == ["finished"]
    assert simulation.loads == [second]
    simulation.load_all()
    simulation.run()
    assert simulation.loads == [same]
    simulation.load_all()
    simulation.run()
    assert simulation.holds.nbytes == 0


def test_a_prompt_larger_than_memory_is_computed_alone():
    simulation = Simulation(1000, memory=CHUNK_BYTES)
    other, large = simulation.enter(chunks="a"), simulation.enter(chunks="abc")
    assert simulation.loads == [other]
    simulation.load_all()
    simulation.run()
    assert simulation.loads == [large]
    assert simulation.holds.nbytes == 3 * CHUNK_BYTES
    simulation.scheduler.cancel([large])
    simulation.step()
    assert simulation.holds.nbytes == 0


def test_choices_keep_their_chunks_until_the_last_has_ended():
    simulation = Simulation(1000, memory=CHUNK_BYTES)
    first, second = simulation.add(25, 6, n=2, chunks="a").all_choices()
    first.output = 2
    while not first.told:
        simulation.step()
    assert simulation.holds.nbytes == CHUNK_BYTES
    simulation.run()
    assert second.told == ["finished"]
    assert simulation.holds.nbytes == 0


def test_choices_that_find_no_slots_take_over_those_of_their_siblings():
    simulation = Simulation(70, max_step_tokens=10)
    choices = simulation.add(25, 10, n=5).all_choices()
    later = simulation.add(25, 1)
    computed = 0
    while (batch := simulation.step()) is not None:
        computed += sum(
            len(run.tokens)
            for run in batch.runs
            if run.start < 25 and run.owner is not later.sequence
        )
    assert computed == 25
    assert all(choice.told == ["finished"] for choice in (*choices, later))


def test_a_choice_that_ends_with_its_first_token_hands_its_slots_over():
    simulation = Simulation(40, max_step_tokens=100)
    work = Work(25, 3, n=2)
    first, second = work.all_choices()
    simulation.scheduler.enter(work)
    simulation.load_all()
    first.output = 1
    simulation.run()
    assert first.told == second.told == ["finished"]
    assert sum(len(batch.tokens) for batch in simulation.runner.steps) == 25 + 2


def test_cancelling_ends_all_choices_before_and_after_they_fork():
    simulation = Simulation(70, max_step_tokens=10)
    before, after = simulation.add(25, 10, n=3), simulation.add(25, 10, n=3)
    choices = [*before.all_choices(), *after.all_choices()]
    simulation.scheduler.cancel(choices[:3])
    while after.unforked:
        simulation.step()
    simulation.step()
    simulation.scheduler.cancel(choices[3:])
    assert simulation.step() is None
    assert all(choice.told == ["cancelled"] for choice in choices)
    assert simulation.slots.used == 0


def test_a_late_request_leaves_and_comes_back_when_half_of_the_rest_is_there():
    simulation = Simulation(200)
    neighbour = simulation.add(5, 20)
    simulation.step()
    late = simulation.enter(10)
    kv = arriving(8, delivered=1)
    simulation.load(late, kv)
    simulation.step()
    assert state_of(late) is RequestState.LOADING
    assert simulation.scheduler.load().waiting == 1
    output = neighbour.output
    simulation.step()
    assert neighbour.output == output - 1
    kv.deliver(LAYER)
    assert state_of(late) is RequestState.LOADING
    kv.deliver(LAYER)
    assert state_of(late) is RequestState.READY
    simulation.run()
    assert late.told == ["finished"]
    assert late.lost == 0


def test_who_is_late_twice_waits_for_all_layers(monkeypatch):
    monkeypatch.setattr(scheduling, "EARLY_RESTARTS", 0)
    simulation = Simulation(200)
    late = simulation.enter(10)
    kv = arriving(8)
    simulation.load(late, kv)
    simulation.step()
    for _ in range(LAYERS):
        assert late.state is RequestState.LOADING
        kv.deliver(LAYER)
    assert late.state is RequestState.READY
    simulation.run()
    assert len(simulation.runner.steps) == 2


def test_what_is_lost_is_loaded_again():
    simulation = Simulation(200)
    work = simulation.enter(10)
    kv = arriving(8, delivered=1)
    simulation.load(work, kv)
    simulation.step()
    assert simulation.loads == []
    kv.give_up()
    assert work.lost == 1
    assert simulation.loads == [work]
    simulation.load(work)
    simulation.run()
    assert work.told == ["finished"]


@pytest.mark.parametrize("end", ["came", "ready", "cancel", "close"])
def test_waiting_in_a_step_ends_when_another_request_could_run(end):
    simulation = Simulation(200)
    alone = simulation.add(10)
    simulation.scheduler.next_step()
    came = threading.Event()
    waiting = threading.Thread(target=lambda: simulation.scheduler.wait_in_step(came.is_set))
    waiting.start()
    other = simulation.enter(5)  # has no KV yet
    waiting.join(0.05)
    assert waiting.is_alive()
    if end == "came":
        came.set()
        simulation.scheduler.wake()
    elif end == "ready":
        simulation.load(other)
    elif end == "cancel":
        simulation.scheduler.cancel([alone])
    else:
        simulation.scheduler.close()
    waiting.join(30)
    assert not waiting.is_alive()


def test_nobody_waits_in_a_step_that_did_not_take_all_who_run():
    simulation = Simulation(200, max_step_tokens=5)
    simulation.add(5)
    simulation.add(5)
    simulation.scheduler.next_step()
    simulation.scheduler.wait_in_step(lambda: False)


@pytest.mark.parametrize("end", ["enter", "cancel", "close"])
def test_an_idle_engine_hears_of_what_comes(end):
    simulation = Simulation(200)
    loading = simulation.enter(5)
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(simulation.scheduler.wait(lambda: None))
    )
    waiting.start()
    if end == "enter":
        simulation.load_all()
    elif end == "cancel":
        simulation.scheduler.cancel([loading])
    else:
        simulation.scheduler.close()
    waiting.join(timeout=60)
    assert answers == [end != "close"]


def test_who_comes_while_the_engine_closes_is_refused_or_failed():
    simulation = Simulation(200)
    entered: list[Work] = []
    refused: list[EngineClosedError] = []
    begin = threading.Barrier(5)

    def flood():
        begin.wait()
        for _ in range(200):
            try:
                entered.append(simulation.enter(5, 10**6))
            except EngineClosedError as error:
                refused.append(error)

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    simulation.loop.start()
    begin.wait()
    simulation.loop.close()
    for thread in threads:
        thread.join()
    assert len(entered) + len(refused) == 800
    assert all(work.told == ["failed"] for work in entered)
    assert not simulation.loop.healthy


@examples(150)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90)), min_size=1, max_size=8),
    st.integers(130, 300),
    st.integers(1, 40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_everything_finishes_and_no_kv_is_lost(requests, slots, budget, max_running, random):
    simulation = Simulation(slots, max_step_tokens=budget, max_running=max_running)
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


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of all kinds arrive, load, arrive late, are lost, cancelled, preempted and end, in
    any order."""

    timing = Timing()
    piece_tokens = 0

    def __init__(self):
        super().__init__()
        self.growth, slots_module.GROWTH = (
            slots_module.GROWTH,
            3,
        )  # so that requests outgrow their slots
        self.simulation = Simulation(
            100,
            max_step_tokens=9,
            max_running=5,
            max_waiting=12,
            memory=2 * CHUNK_BYTES,
            timing=replace(self.timing),
            known=True,
            resident="d",
            piece_tokens=self.piece_tokens,
        )
        self.works = []
        self.kvs = []

    def enter(self, work):
        try:
            entered = self.simulation.scheduler.enter(work)
        except OverloadedError:
            assert self.simulation.scheduler.load().waiting >= 12
            assert any(other.waits for other in self.works if other.tenant == work.tenant)
        else:
            if entered is work:
                self.works += work.all_choices()

    @rule(
        length=st.integers(1, 40),
        output=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        chunks=st.sampled_from(["", "a", "ab", "bc", "d", "abc"]),
        tenant=st.sampled_from("xyz"),
        refines=st.booleans(),
    )
    def answer(self, length, output, n, chunks, tenant, refines):
        self.enter(Work(length, output, n=n, chunks=chunks, tenant=tenant, refines=refines))

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds):
        self.simulation.timing.now += seconds

    @rule(length=st.integers(1, 60), name=st.sampled_from("ab"), urgent=st.booleans())
    def chunk(self, length, name, urgent):
        self.enter(ChunkWork(length, identity=name, urgent=urgent))

    @rule(length=st.integers(1, 60))
    def variant(self, length):
        self.enter(VariantWork(length))

    @rule(length=st.integers(1, 60))
    def background(self, length):
        self.enter(BackgroundWork(length))

    @precondition(lambda self: self.simulation.loads)
    @rule(data=st.data(), delivered=st.lists(st.integers(0, LAYERS), max_size=2))
    def loaded(self, data, delivered):
        work = data.draw(st.sampled_from(self.simulation.loads))
        kvs = [arriving(1, layers) for layers in delivered][: work.length - 1]
        self.kvs += [kv for kv in kvs if not kv.complete]
        self.simulation.load(work, *kvs)

    @precondition(lambda self: self.simulation.loads)
    @rule(data=st.data())
    def failed(self, data):
        work = data.draw(st.sampled_from(self.simulation.loads))
        self.simulation.loads.remove(work)
        self.simulation.scheduler.failed(work, KVLinkerError("no KV"))

    @precondition(lambda self: self.kvs)
    @rule(data=st.data(), lost=st.booleans())
    def arrive(self, data, lost):
        kv = data.draw(st.sampled_from(self.kvs))
        if lost:
            kv.give_up()
        else:
            kv.deliver(LAYER)
        if lost or kv.complete:
            self.kvs.remove(kv)

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def cancel(self, data):
        work = data.draw(st.sampled_from(self.works))
        self.simulation.scheduler.cancel(work.choices or [work])

    @rule(steps=st.integers(1, 8))
    def compute(self, steps):
        for _ in range(steps):
            self.simulation.step()

    @invariant()
    def everything_is_where_it_should_be(self):
        self.simulation.scheduler.check_integrity()
        assert all(len(work.told) <= 1 for work in self.works)

    @invariant()
    def turns_follow_arrivals(self):
        waiting = [
            work
            for work in self.works
            if work.state in (RequestState.READY, RequestState.PREEMPTED)
        ]
        assert all(work.seconds_left >= 0 and work.turn >= work.arrived for work in waiting)

    @invariant()
    def what_is_used_fits_in_memory(self):
        holding = {hold for work in self.works if (hold := work.hold) is not None and hold.keys}
        used = CHUNK_BYTES * len({key for hold in holding for key in hold.keys})
        assert self.simulation.holds.nbytes == used
        assert used <= CHUNK_BYTES * max([2, *(len(hold.keys) for hold in holding)])

    def teardown(self):
        """Nobody has starved, whatever came: all end once KV comes and steps are taken."""
        try:
            self.let_all_end()
        finally:
            slots_module.GROWTH = self.growth

    def let_all_end(self):
        for kv in self.kvs:
            while kv.deliver(LAYER) and not kv.complete:
                pass
        for _ in range(5000):
            if self.simulation.scheduler.idle:
                break
            self.simulation.load_all()
            self.simulation.step()
        self.simulation.scheduler.check_integrity()
        assert all(len(work.told) == 1 for work in self.works)
        assert all(work.state is RequestState.FINISHED or work.choice for work in self.works)
        assert self.simulation.scheduler.idle
        assert self.simulation.slots.used == 0
        assert self.simulation.holds.nbytes == 0


class LayeredMachine(SchedulerMachine):
    """Prompts are slow, so that most are computed by pieces beside requests that decode."""

    timing = Timing(per_token=0.05, per_read=0.05)
    piece_tokens = 12


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = examples(40, stateful_step_count=40, deadline=None)
TestLayeredMachine = LayeredMachine.TestCase
TestLayeredMachine.settings = examples(40, stateful_step_count=40, deadline=None)


@pytest.mark.whole
@pytest.mark.parametrize("machine", [SchedulerMachine, LayeredMachine])
def test_the_machine_for_long(machine):
    run_state_machine_as_test(
        machine,
        settings=examples(250, stateful_step_count=40, deadline=None),
    )
