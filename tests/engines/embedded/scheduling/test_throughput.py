"""How long prompts take, as learnt from steps."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlinker.engines.contract.cost import CostModel
from kvlinker.engines.embedded.execution.batch import Batch, OwnTokens, Run, SharedChunk, VisibleKV
from kvlinker.engines.embedded.kv_cache.pool import SlotSpan
from kvlinker.engines.embedded.scheduling.throughput import (
    ComputeThroughput,
    TokenCost,
    throughput_name,
)
from kvlinker.store import Speeds
from kvlinker.store.loading.arriving import ArrivingKV
from tests.toy_models import loaded_model

PER_TOKEN, PER_PAIR = 2e-4, 5e-8


class Cost(CostModel):
    """Attention that is as fast as the rest would make a = ``PER_TOKEN`` and b = a tenth of
    ``PER_PAIR``."""

    per_token = PER_TOKEN * 1e12
    per_pair = PER_PAIR * 1e11

    def __init__(self) -> None:
        """Skip the counting of weights: there is no model."""


def truth(*ranges):
    return sum(
        PER_TOKEN * (end - begin) + PER_PAIR * (end - begin) * (begin + end + 1) / 2
        for begin, end in ranges
    )


def batch(*ranges, shared=(), **options):
    own = np.concatenate([np.arange(*each) for each in ranges])
    runs = tuple(
        Run(np.arange(end - begin), begin, np.zeros(end - begin, dtype=np.int64), **options)
        for begin, end in ranges
    )
    return Batch(
        runs, {None: VisibleKV(shared, (SlotSpan(0, len(own)),), own, OwnTokens(own, shared))}
    )


def decoding(*positions, beside=()):
    """A step in which requests decode at ``positions``, ``beside`` a prompt of these ranges."""
    runs = [
        Run(np.arange(1), at, np.zeros(1, dtype=np.int64), wants_logits=True, owner=number)
        for number, at in enumerate(positions)
    ]
    runs += [
        Run(np.arange(end - begin), begin, np.zeros(end - begin, dtype=np.int64), owner="prompt")
        for begin, end in beside
    ]
    own = np.arange(1)
    visible = VisibleKV((), (SlotSpan(0, 1),), own, OwnTokens(own, ()))
    return Batch(tuple(runs), {run.owner: visible for run in runs})


def prefill_seconds(throughput: ComputeThroughput, tokens: int) -> float:
    """Return what is expected of a prompt, once something was measured."""
    seconds = throughput.prefill_seconds(tokens)
    assert seconds is not None
    return seconds


def test_nothing_is_known_before_the_first_step():
    throughput = ComputeThroughput(Cost())
    assert throughput.prefill_seconds(100) is None
    urgency = throughput.urgency([(0, 10)], cached=100)
    assert (urgency.compute, urgency.prefill, urgency.decided) == (0, float("inf"), False)


def test_the_first_step_sets_the_rate_and_arithmetic_the_shape():
    throughput = ComputeThroughput(Cost())
    throughput.note(batch((0, 1000)), 1.0)
    assert throughput.prefill_seconds(1000) == pytest.approx(1.0)
    flops = [Cost.per_token * n + Cost.per_pair * n * (n + 1) / 2 for n in (1000, 8000)]
    assert throughput.prefill_seconds(8000) == pytest.approx(flops[1] / flops[0])


def test_long_prompts_take_more_than_their_share():
    throughput = ComputeThroughput(Cost())
    throughput.note(batch((0, 512)), 0.1)
    for length in (100, 1000, 10_000):
        assert prefill_seconds(throughput, 2 * length) > 2 * prefill_seconds(throughput, length)


def test_steps_of_several_lengths_teach_both_coefficients():
    throughput = ComputeThroughput(Cost())
    for turn in range(300):
        ranges = [(0, 512), (3584, 4096), (0, 2048), (1000, 1600)][turn % 4]
        throughput.note(batch(ranges), truth(ranges))
    for length in (512, 2048, 8192):
        assert throughput.prefill_seconds(length) == pytest.approx(truth((0, length)), rel=0.03)
    urgency = throughput.urgency([(0, 10), (50, 90)], cached=4096, decided=True, alone=True)
    assert urgency.compute == pytest.approx(truth((0, 10), (50, 90)), rel=0.03)
    assert urgency.prefill == pytest.approx(truth((0, 4096)), rel=0.03)
    assert urgency.decided
    assert urgency.alone


def test_expectations_follow_the_machine():
    throughput = ComputeThroughput(Cost())
    for _ in range(20):
        throughput.note(batch((0, 512)), 1.0)
    throughput.note(batch((0, 512)), 3.0)
    assert prefill_seconds(throughput, 512) < 1.2  # one says little
    for _ in range(60):
        throughput.note(batch((0, 512)), 3.0)
    assert throughput.prefill_seconds(512) == pytest.approx(3.0, rel=0.05)


def test_steps_of_few_tokens_say_little():
    throughput = ComputeThroughput(Cost())
    for _ in range(20):
        throughput.note(batch((0, 512)), 1.0)
    for _ in range(20):
        throughput.note(batch((0, 8)), 10 * truth((0, 8)) / truth((0, 512)))
    assert throughput.prefill_seconds(512) == pytest.approx(1.0, rel=0.1)


def test_steps_that_are_all_alike_leave_the_shape_as_it_is():
    throughput = ComputeThroughput(Cost())
    for turn in range(200):
        ranges = [(0, 512), (3584, 4096)][turn % 2]
        throughput.note(batch(ranges), truth(ranges))
    for _ in range(500):
        throughput.note(batch((0, 512)), truth((0, 512)))
    assert throughput.prefill_seconds(8192) == pytest.approx(truth((0, 8192)), rel=0.03)


@given(st.lists(st.tuples(st.integers(8, 5000), st.floats(1e-6, 1e3)), min_size=1, max_size=20))
@example([(8, 417.0), (249, 1e-6)])
def test_expectations_are_never_negative(steps):
    throughput = ComputeThroughput(Cost())
    for tokens, seconds in steps:
        throughput.note(batch((0, tokens)), seconds)
    assert 0 <= prefill_seconds(throughput, 1000) < float("inf")


def test_steps_that_tell_nothing_of_prompts_do_not_count():
    throughput = ComputeThroughput(Cost())
    throughput.note(batch((0, 512)), 1.0)
    throughput.note(decoding(*[200] * 64, beside=[(0, 4)]), 50.0)
    throughput.note(batch((0, 4)), 50.0)
    throughput.note(batch((0, 512), refinement=object()), 50.0)
    kv = ArrivingKV(layer_count=2, tokens=5)
    throughput.note(batch((5, 512), shared=(SharedChunk(kv, 0, 0, 0, 5),)), 50.0)
    assert throughput.prefill_seconds(512) == pytest.approx(1.0)


def test_what_another_process_measured_is_where_this_one_begins(tmp_path):
    speeds = Speeds(tmp_path / "speeds.json")
    ComputeThroughput(Cost(), speeds, "one").note(batch((0, 512)), 1.0)
    speeds.close()
    again = Speeds(tmp_path / "speeds.json")
    assert ComputeThroughput(Cost(), again, "one").prefill_seconds(512) == pytest.approx(1.0)
    assert ComputeThroughput(Cost(), again, "another").prefill_seconds(512) is None
    again.note("prefill one", [1.0])  # not two numbers: as if nothing was measured
    assert ComputeThroughput(Cost(), again, "one").prefill_seconds(512) is None


def test_a_name_tells_models_apart():
    one, other = loaded_model("llama"), loaded_model("qwen3")
    assert throughput_name(one) != throughput_name(other)
    assert one.fingerprint in throughput_name(one)
    assert "float32" in throughput_name(one)


CONSTANT = 0.05


def taught(strain=1.0):
    """Throughput that has seen prompts alone, decoding alone, and both together, ``strain`` times
    as slow."""
    throughput = ComputeThroughput(Cost())
    for turn in range(300):
        ranges = [(0, 512), (3584, 4096), (0, 2048), (1000, 1600)][turn % 4]
        throughput.note(batch(ranges), CONSTANT + truth(ranges))
        throughput.note(decoding(turn), CONSTANT + truth((turn, turn + 1)))
        beside = (turn, turn + 64)
        alone = CONSTANT + truth((500, 501))
        throughput.note(decoding(500, beside=[beside]), alone + strain * truth(beside))
    return throughput


def test_decoding_teaches_what_reading_the_weights_takes():
    throughput = ComputeThroughput(Cost())
    assert throughput.decode_seconds([(5, 6)]) is None
    throughput.note(decoding(5), CONSTANT)
    assert throughput.decode_seconds([(5, 6)]) == pytest.approx(CONSTANT)
    throughput = taught()
    for positions in ([(900, 901)], [(at, at + 1) for at in range(100, 900, 100)]):
        assert throughput.decode_seconds(positions) == pytest.approx(
            CONSTANT + truth(*positions), rel=0.05
        )
    assert throughput.seconds([(0, 512)]) == pytest.approx(CONSTANT + truth((0, 512)), rel=0.05)


@pytest.mark.parametrize("strain", [0.5, 1.0, 2.5])
def test_steps_of_both_teach_what_prompts_take_beside_decoding(strain):
    throughput = taught(strain)
    cost = throughput.cost_beside_decoding
    assert cost is not None
    assert cost.of([(300, 364)]) == pytest.approx(strain * truth((300, 364)), rel=0.1)
    assert throughput.prefill_seconds(2048) == pytest.approx(
        CONSTANT + truth((0, 2048)), rel=0.05
    ), "it stays"


def test_disturbed_steps_do_not_change_what_decoding_takes():
    throughput = ComputeThroughput(Cost())
    for seconds in (CONSTANT, 5 * CONSTANT, 0.9 * CONSTANT, 4 * CONSTANT, CONSTANT):
        throughput.note(decoding(5), seconds)
    assert throughput.decode_seconds([(5, 6)]) == pytest.approx(CONSTANT)


def test_a_disturbed_step_says_little():
    throughput = taught()
    before = throughput.decode_seconds([(500, 501)]), throughput.cost_beside_decoding
    throughput.note(decoding(500), 1e3)
    throughput.note(decoding(500, beside=[(0, 64)]), 1e3)
    assert throughput.decode_seconds([(500, 501)]) < 2 * before[0]
    assert throughput.cost_beside_decoding.per_token < 2 * before[1].per_token


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 900)), max_size=6),
    st.floats(0, 5),
    st.sampled_from([TokenCost(PER_TOKEN, PER_PAIR), TokenCost(0.01, 0.0), TokenCost(0.0, 1e-5)]),
)
def test_what_is_affordable_is_as_much_as_fits(parts, budget, cost):
    ranges, start = [], 0
    for gap, length in parts:
        ranges.append((start + gap, start + gap + length))
        start = ranges[-1][1]
    count = cost.affordable(ranges, budget)
    positions = [position for begin, end in ranges for position in range(begin, end)]
    taken, more = ([(p, p + 1) for p in positions[:n]] for n in (count, count + 1))
    assert 0 <= count <= len(positions)
    assert cost.of(taken) <= budget * (1 + 1e-6) + 1e-9
    assert count == len(positions) or cost.of(more) >= budget * (1 - 1e-6)
