"""The scheduler side against a vLLM that only counts and takes its time."""

import random
import statistics

import pytest

from kvlinker_vllm.protocol.signature import SIGNATURE, PlanSigner
from kvlinker_vllm.protocol.steps import StepReport
from kvlinker_vllm.protocol.transfer_plan import (
    PARAM,
    PlacedChunk,
    TransferPlan,
    outcome_of,
)
from kvlinker_vllm.protocol.worker_memory import KNOWN, KnownMemory
from kvlinker_vllm.scheduler import transfer_scheduler
from kvlinker_vllm.scheduler.transfer_scheduler import (
    FORGET,
    LATER,
    StepLimits,
    TransferScheduler,
)
from kvlinker_vllm.scheduler.transfer_throttle import MOST_WAITING, TransferThrottle
from kvlinker_vllm.scheduler.window_blocks import Room

PLAIN, COMPUTED, PLACED, PASS = 0.03, 0.003, 3e-5, 0.02
SIGNER = PlanSigner(b"key")


def transfer_of(placed, runs, key="0" * 64):
    linked = max([placed, *(end for _, end in runs)])
    chunk = PlacedChunk(key=key, start=0, first=0, last=placed, rotary_start=0)
    return TransferPlan(linked=linked, placements=(chunk,) if placed else (), runs=tuple(runs))


class VLLM:
    """One worker, and ``decoders`` requests that decode all the time."""

    def __init__(self, decoders=1, **limits):
        defaults = {"slice_tokens": 256, "step_tokens": 2048, "runs": 256, "layers": 24}
        self.looked_at = []
        self.scheduler = TransferScheduler(
            limits=StepLimits(**(defaults | limits)), signer=SIGNER, is_stored=self.is_stored
        )
        self.scheduler._throttle = TransferThrottle(256, slowdown=1.4, clock=lambda: self.now)
        self.decoders = decoders
        self.gone = set()
        self.now = 0.0
        self.gaps = []
        self.prompts = {}
        self.new = []
        self.first_steps = []
        self.ended = {}

    def is_stored(self, key):
        self.looked_at.append(key)
        return key not in self.gone

    def add(self, name, transfer, own=8):
        tokens = [0] * (transfer.linked + own)
        self.scheduler.admit(name, SIGNER.params(transfer, tokens), tokens, salt="salt")
        self.prompts[name] = tokens
        self.new.append(name)

    def step(self):
        prefilled = 0
        for name in self.first_steps:
            prefilled += len(self.prompts[name]) - self.scheduler._requests[name].plan.linked
            self.end(name)
        self.first_steps = []
        for name in self.new:
            external, waits = self.scheduler.match(name, 0, len(self.prompts[name]))
            assert external is not None
            self.scheduler.begin_transfer(
                name, self.prompts[name], [range(1000)], external=external
            )
            if not waits:
                prefilled += len(self.prompts[name]) - external
                self.end(name)
        self.new = []
        transfers = self.scheduler.plan_step(
            scheduled_tokens=self.decoders + prefilled, prefilled_tokens=prefilled
        )
        placed = sum(part.last - part.first for each in transfers.slices for part in each.parts)
        computed = sum(end - begin for each in transfers.slices for begin, end in each.runs)
        seconds = (
            PLAIN + placed * PLACED + (computed + prefilled) * COMPUTED + (PASS if computed else 0)
        )
        self.now += seconds
        self.gaps.append(seconds)
        waiting = [started for started in transfers.started if started.waits]
        self.scheduler.note_report(
            StepReport(
                loaded={started.request_id: 1 for started in waiting},
                held=frozenset((key, 0) for started in waiting for key in started.plan.keys),
            )
        )
        received = [
            each.request_id
            for each in transfers.slices
            if each.is_last and each.request_id not in self.ended
        ]
        self.scheduler.note_received(received)
        self.first_steps += received
        return transfers

    def end(self, name):
        self.ended[name] = len(self.gaps)

    def run(self, steps=5000):
        for _ in range(steps):
            if len(self.ended) == len(self.prompts):
                return
            self.step()
        raise AssertionError("not all requests come to an end")


@pytest.fixture
def vllm():
    """Some steps old, so that it knows what they take."""
    made = VLLM()
    for _ in range(20):
        made.step()
    made.add("first", transfer_of(512, [(500, 564)]), own=32)
    made.run()
    while made.scheduler._throttle.tokens == 0:
        made.step()
    made.step()
    return made


@pytest.mark.parametrize("own", [32, 64])
@pytest.mark.parametrize(
    "runs", [(), tuple((512 * chunk, 512 * chunk + 16) for chunk in range(1, 8))]
)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_neighbours_wait_longer_only_by_a_share_for_each_that_is_linked(vllm, count, runs, own):
    """Nor is what nobody used before saved for them."""
    for _ in range(20):
        vllm.step()
    begin = len(vllm.gaps)
    for index in range(count):
        vllm.add(f"r{index}", transfer_of(4096, runs), own=own)
    vllm.run()
    vllm.step()
    gaps = vllm.gaps[begin:]
    assert sum(gaps) / len(gaps) <= (1 + 0.5 * min(count, MOST_WAITING)) * PLAIN


def test_users_who_ask_again_and_again_are_linked_together():
    """Although there never is a step without linking to measure, unless linking pauses."""
    vllm, lengths = VLLM(decoders=0), random.Random(1)
    begun: dict[str, float] = {}
    decoding: dict[str, int] = {}
    waited: list[float] = []
    passes = 0
    runs = tuple((512 * chunk, 512 * chunk + 16) for chunk in range(1, 4))
    for _ in range(16):
        begun[f"r{len(begun)}"] = vllm.now
        vllm.add(f"r{len(begun) - 1}", transfer_of(2048, runs), own=60)
    while len(waited) < 100:
        passes += any(each.runs for each in vllm.step().slices)
        for name in vllm.ended.keys() - decoding.keys():
            waited.append(vllm.now - begun[name])
            decoding[name] = lengths.randint(16, 48)
        vllm.decoders = 0
        for name, left in list(decoding.items()):
            decoding[name] = left - 1
            vllm.decoders += left > 1
            if left == 1:
                begun[f"r{len(begun)}"] = vllm.now
                vllm.add(f"r{len(begun) - 1}", transfer_of(2048, runs), own=60)
    assert statistics.median(waited[16:]) < 6
    assert passes < 2 * len(waited)


def test_transfers_that_compare_cost_what_the_first_layers_do(vllm):
    transfer = transfer_of(4096, [(0, 4096)])
    vllm.add("full", transfer)
    vllm.add("compared", transfer.model_copy(update={"measure": "deviation"}))
    computed: dict[str, list[int]] = {"full": [], "compared": []}
    while len(vllm.ended) < len(vllm.prompts):
        for each in vllm.step().slices:
            computed[each.request_id] += [end - begin for begin, end in each.runs]
    most, least = (max(computed[name][:-1]) for name in ("compared", "full"))
    assert most == pytest.approx(12 * least, rel=0.1)


def test_what_a_first_pass_placed_is_not_computed_upon_when_a_chunk_is_gone(vllm):
    second = transfer_of(512, [(100, 116)]).model_copy(update={"second_pass": True})
    vllm.add("here", second)
    assert vllm.scheduler.match("here", 256, 520)[0] == 256
    vllm.gone.update(second.keys)
    vllm.add("second", second)
    assert vllm.scheduler.match("second", 256, 520) == (None, False)
    assert vllm.scheduler.match("second", 0, 520) == (0, False)


def test_none_is_overtaken_by_those_that_come_later(vllm):
    """Neither while time is saved for its end."""
    vllm.add("small", transfer_of(256, [(100, 116)]), own=60)
    for index in range(200):
        vllm.add(
            f"large {index}",
            transfer_of(4096, [(512 * chunk, 512 * chunk + 64) for chunk in range(1, 8)]),
            own=60,
        )
        vllm.step()
    assert min(vllm.ended, key=lambda name: (vllm.ended[name], name == "first")) == "first"
    assert sorted(vllm.ended, key=vllm.ended.__getitem__)[1] == "small"


def test_small_transfers_are_linked_at_once_but_not_all_at_the_same_time(vllm):
    for index in range(6):
        vllm.add(f"r{index}", transfer_of(32, [(10, 13)]), own=4)
    transfers = vllm.step()
    at_once = [started.request_id for started in transfers.started if not started.waits]
    assert 0 < len(at_once) < 6
    vllm.run()


def test_where_nothing_else_runs_all_is_done_at_once(vllm):
    vllm.decoders = 0
    vllm.step()
    vllm.add("r", transfer_of(4096, [(512, 1500)]))
    transfers = vllm.step()
    assert [started.waits for started in transfers.started] == [False]
    assert transfers.slices[0].is_last


def test_what_was_decided_when_matched_holds_when_allocated(vllm):
    """A preempted request has become longer meanwhile."""
    transfer = transfer_of(32, [(10, 13)])
    vllm.add("r", transfer, own=2)
    for tokens in (34, 500):
        external, waits = vllm.scheduler.match("r", 0, tokens)
        vllm.scheduler.begin_transfer("r", [0] * tokens, [range(9)], external=external)
        assert vllm.scheduler._started[-1].waits == waits == (tokens == 500)


class Windows:
    """Blocks for windowed layers, of which there are ``room`` or not."""

    are_needed = True

    def __init__(self, room=Room.NOW):
        self.room = room
        self.released = []

    def room_for(self, plan, begin, tokens):
        return self.room

    def complete(self, request_id, plan, begin, held, request):
        return ((1, 2),)

    def release(self, request_id):
        self.released.append(request_id)


def with_windows(vllm, **options):
    windows = Windows(**options)
    vllm.scheduler.lend(windows)
    return windows


def test_with_windows_every_request_waits_and_gives_its_blocks_back(vllm):
    vllm.decoders = 0
    windows = with_windows(vllm)
    vllm.add("r", transfer_of(32, [(10, 13)]))
    assert vllm.scheduler.match("r", 0, 40) == (32, True)
    vllm.scheduler.begin_transfer("r", [0] * 40, [range(9), [0, 0, 3]], external=32)
    assert vllm.scheduler._started[-1].block_ids == ((1, 2),)
    vllm.scheduler.note_received(["r"])
    assert windows.released == ["r"]


def test_blocks_of_an_aborted_request_are_given_back_once_workers_have_ended_it(vllm):
    windows = with_windows(vllm)
    vllm.add("r", transfer_of(32, [(10, 13)]))
    vllm.step()
    vllm.scheduler.finish("r")
    assert windows.released == []
    vllm.scheduler.note_received(["r"])
    assert windows.released == ["r"]


def test_without_blocks_for_windows_requests_wait_a_while_and_are_computed_in_full_then(
    vllm, monkeypatch
):
    windows = with_windows(vllm, room=Room.LATER)
    for name in ("r", "s"):
        vllm.add(name, transfer_of(32, [(10, 13)]))
        assert vllm.scheduler.match(name, 0, 40) == LATER
    windows.room = Room.NEVER
    assert vllm.scheduler.match("r", 0, 40) == (0, False)
    windows.room = Room.LATER
    monkeypatch.setattr(transfer_scheduler, "MOST_SECONDS_WITHOUT_BLOCKS", 0)
    assert vllm.scheduler.match("s", 0, 40) == (0, False)
    outcome = outcome_of(vllm.scheduler.finish("s"))
    assert outcome is not None
    assert not outcome.linked


def test_with_windows_a_second_pass_places_everything_again(vllm):
    """What windows have seen of the first pass is not in vLLM's blocks."""
    with_windows(vllm)
    plan = transfer_of(64, [(10, 13)]).model_copy(update={"second_pass": True})
    vllm.add("r", plan)
    assert vllm.scheduler.match("r", 32, 72) == FORGET
    assert vllm.scheduler.match("r", 0, 72) == (64, True)


def test_evicted_chunks_are_waited_for(vllm):
    transfer = transfer_of(32, [(10, 13)])
    for held, evicted, waits in (
        (True, True, False),
        (False, True, True),
        (True, False, False),
        (False, False, False),
    ):
        at = frozenset({(transfer.keys[0], 0)})
        vllm.scheduler.note_report(
            StepReport(held=at if held else frozenset(), evicted=at if evicted else frozenset())
        )
        vllm.scheduler.admit("r", SIGNER.params(transfer, [0] * 34), [0] * 34, salt="salt")
        assert vllm.scheduler.match("r", 0, 34) == (32, waits)
        vllm.scheduler.finish("r")


def test_chunks_are_resident_where_all_workers_have_them():
    made = VLLM(decoders=0, workers=2)
    transfer = transfer_of(32, [(10, 13)])
    made.scheduler.admit("r", SIGNER.params(transfer, [0] * 34), [0] * 34, salt="salt")
    for rank, waits in ((0, True), (0, True), (1, False)):
        made.scheduler.note_report(StepReport(held=frozenset({(transfer.keys[0], rank)})))
        assert made.scheduler.match("r", 0, 34) == (32, waits)


def test_outcomes_tell_what_is_in_memory_beyond_what_is_known():
    made = VLLM(decoders=0)
    transfer = transfer_of(32, [(10, 13)])
    front = KnownMemory()

    def told():
        params = SIGNER.params(transfer, [0] * 34) | {KNOWN: front.change_numbers()}
        made.scheduler.admit("r", params, [0] * 34, salt="salt")
        outcome = outcome_of(made.scheduler.finish("r"))
        assert outcome is not None
        assert outcome.memory is not None
        front.note(outcome.memory)
        return outcome.memory

    assert told().whole
    at = frozenset({(transfer.keys[0], 0)})
    made.scheduler.note_report(StepReport(held=at))
    assert told().held == transfer.keys
    assert told().held == ()
    assert front.keys() == {*transfer.keys}
    made.scheduler.note_report(StepReport(evicted=at))
    assert told().gone == transfer.keys
    assert front.keys() == frozenset()


def test_vanished_chunks_are_not_waited_for(vllm):
    transfer = transfer_of(32, [(10, 13)])
    vllm.gone.add(transfer.keys[0])
    vllm.scheduler.admit("r", SIGNER.params(transfer, [0] * 34), [0] * 34, salt="salt")
    assert vllm.scheduler.match("r", 0, 34) == (0, False)
    assert vllm.scheduler.finish("r")[PARAM]["linked"] is False


@pytest.mark.parametrize(("external", "placed"), [(32, 29), (22, 19), (20, 19), (19, 19), (0, 0)])
def test_only_what_comes_from_chunks_counts_as_such(vllm, external, placed):
    transfer = transfer_of(32, [(10, 13)])
    vllm.scheduler.admit("r", SIGNER.params(transfer, [0] * 34), [0] * 34, salt="salt")
    assert vllm.scheduler.placed_tokens("r", external=external) == placed


def test_no_file_is_looked_at_while_a_request_waits(vllm):
    transfer = transfer_of(32, [(10, 13)])
    vllm.scheduler.admit("r", SIGNER.params(transfer, [0] * 34), [0] * 34, salt="salt")
    vllm.looked_at.clear()
    for _ in range(3):
        vllm.scheduler.match("r", 0, 34)
    assert not vllm.looked_at


@pytest.mark.parametrize("signature", ["é", "\ud800", None, 7, ["0"]])
def test_signatures_may_be_anything(vllm, signature):
    transfer = transfer_of(32, [(10, 13)])
    vllm.scheduler.admit(
        "r", SIGNER.params(transfer, [0] * 34) | {SIGNATURE: signature}, [0] * 34, salt="salt"
    )
    assert vllm.scheduler.match("r", 0, 34) == (0, False)
    assert vllm.scheduler.finish("r") is None


def test_aborted_requests_leave_nothing(vllm):
    for steps in range(6):
        vllm.add("r", transfer_of(4096, [(512, 600)]))
        for _ in range(steps):
            vllm.step()
        assert vllm.scheduler.finish("r")
        assert "r" not in vllm.scheduler._waiting
        del vllm.prompts["r"]
        vllm.new.clear()
        vllm.step()
    assert not vllm.scheduler._requests.keys() & {"r"}
