import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.embedded.conftest import linked_prompt

from kvlinker.base.errors import InvalidRequestError
from kvlinker.linking import Evidence, make_plan, parse_policy
from kvlinker.linking.link import probe_plan
from kvlinker_vllm.protocol.signature import SIGNATURE, PlanSigner
from kvlinker_vllm.protocol.steps import StepBudget, TransferProgress
from kvlinker_vllm.protocol.transfer_plan import (
    PARAM,
    PlacedChunk,
    TransferPlan,
    pack_figures,
    plan_capture,
    plan_row,
    plan_transfer,
    unpack_figures,
)

KEY = "0" * 64
POLICIES = [
    "full",
    "naive",
    "naive-unpositioned",
    "legolink-4",
    "attnlink-5",
    "random-30",
    "random-100",
    "prefix",
]

prompts = st.builds(
    lambda lengths, header, middle, fresh: linked_prompt(
        *lengths, header=header, middle=middle, fresh=fresh
    ),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 5),
)


def transfer_for(prompt, policy):
    plan = make_plan(prompt, parse_policy(policy), Evidence())
    return plan, plan_transfer(plan, (KEY,) * len(plan.placements))


def read_again(transfer, prompt_tokens):
    signer, tokens = PlanSigner(b"key"), range(prompt_tokens)
    return signer.verify(signer.params(transfer, tokens), tokens)


def positions_of(prompt_length, ranges):
    held = [0] * prompt_length
    for begin, end in ranges:
        for position in range(begin, end):
            held[position] += 1
    return held


@given(prompts, st.sampled_from(POLICIES))
def test_a_transfer_plan_and_the_last_run_are_the_plan(prompt, policy):
    plan, transfer = transfer_for(prompt, policy)
    assert (*transfer.runs, (transfer.linked, len(prompt))) == plan.runs
    assert read_again(transfer, len(prompt)) == transfer


@given(prompts, st.sampled_from(["query-5", "query-0+legolink-3", "query-100"]))
def test_a_second_pass_leaves_to_vllm_what_the_first_ones_last_run_computed(prompt, policy):
    parsed = parse_policy(policy)
    first = probe_plan(prompt, parsed)
    keys = (KEY,) * len(first.placements)
    observation = plan_transfer(first, keys, linked=first.length, measure="attention")
    assert (observation.linked, observation.runs) == (len(prompt), first.runs)
    attention = np.random.default_rng(0).random((2, len(prompt)), dtype=np.float32)
    again = unpack_figures(pack_figures(attention), tokens=len(prompt))
    np.testing.assert_array_equal(again, attention)
    second = make_plan(prompt, parsed, Evidence(attention=attention))
    transfer = plan_transfer(second, keys, linked=first.runs[-1][0], second_pass=True)
    assert read_again(transfer, len(prompt)) == transfer
    computed = [*transfer.runs, (transfer.linked, len(prompt))]
    assert positions_of(len(prompt), computed) == positions_of(len(prompt), second.runs)


@given(
    prompts,
    st.sampled_from(POLICIES),
    st.integers(0, 60),
    st.integers(1, 30),
    st.integers(1, 3),
    st.booleans(),
)
def test_slices_do_all_of_a_transfer_plan_once_and_in_order(
    prompt, policy, begin, tokens, runs, second_pass
):
    """A second pass computes all runs, wherever vLLM's own KV ends, which the first one placed."""
    _, transfer = transfer_for(prompt, policy)
    transfer = transfer.model_copy(update={"second_pass": second_pass})
    progress = TransferProgress("r", transfer, begin=begin)
    placed: list[tuple[int, int]] = []
    computed: list[tuple[int, int]] = []
    done = False
    while not done:
        budget = StepBudget(tokens, runs, 16)
        fits = progress.fits(budget)
        part = progress.take(budget)
        assert part.is_last or not fits
        assert budget.computed == sum(end - first for first, end in part.runs)
        assert budget.placed == sum(each.last - each.first for each in part.parts)
        assert len(part.runs) <= runs
        assert sum(end - first for first, end in part.runs) <= tokens
        assert budget.tokens > -1
        assert not (part.parts and computed), "a token is computed before all is placed"
        placed += [
            (
                transfer.placements[each.placement].start + each.first,
                transfer.placements[each.placement].start + each.last,
            )
            for each in part.parts
        ]
        computed += part.runs
        done = part.is_last
    assert computed == sorted(computed)
    own = 0 if second_pass else begin
    wanted = [(max(first, own), last) for first, last in transfer.runs if last > own]
    assert positions_of(len(prompt), computed) == positions_of(len(prompt), wanted)
    wanted = [
        (max(each.begin, begin), each.end) for each in transfer.placements if each.end > begin
    ]
    assert positions_of(len(prompt), placed) == positions_of(len(prompt), wanted)


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 60), st.integers(1, 30))
def test_a_prompt_is_computed_without_its_unrelated_text_and_then_with_it(
    prefix, unrelated, chunk, tokens
):
    begin, end = prefix + unrelated, prefix + unrelated + chunk
    transfer = plan_capture(KEY, begin=begin, end=end, unrelated=unrelated)
    assert read_again(transfer, end + 1) == transfer
    assert transfer.alone == plan_capture(KEY, begin=prefix, end=prefix + chunk)
    progress = TransferProgress("r", transfer)
    lines: list[list[tuple[int, int]]] = [[]]
    done = False
    while not done:
        budget = StepBudget(tokens, 1, 16)
        assert progress.cost(budget) == 2 * prefix + unrelated + 2 * chunk - sum(
            last - first for line in lines for first, last in line
        )
        fits = progress.fits(budget)
        part = progress.take(budget)
        assert part.is_last == fits
        if part.begins_again:
            lines.append([])
        lines[-1] += part.runs
        done = part.is_last
    for line, length in zip(lines, (prefix + chunk, end), strict=True):
        assert positions_of(end, line) == [1] * length + [0] * (end - length)
        assert line == sorted(line)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"linked": 9}, "neither placed nor computed"),
        ({"linked": 4}, "within the first 4"),
        ({"runs": [[0, 2], [1, 3]]}, "overlap"),
        ({"runs": [[2, 2]]}, "not ranges"),
        ({"placements": []}, "position 2 is neither"),
        (
            {
                "placements": [
                    {"key": "../../etc", "start": 0, "first": 0, "last": 8, "rotary_start": 0}
                ]
            },
            "pattern",
        ),
        (
            {"placements": [{"key": KEY, "start": -1, "first": 0, "last": 8, "rotary_start": 0}]},
            "greater than",
        ),
        ({"captures": [{"key": KEY, "begin": 3, "end": 9}]}, "captures"),
        ({"unrelated": [0, 2]}, "unrelated text"),
        ({"unrelated": [0, 2], "captures": [{"key": KEY, "begin": 2, "end": 8}]}, "unrelated text"),
        (
            {
                "unrelated": [1, 1],
                "captures": [{"key": KEY, "begin": 1, "end": 8}],
                "placements": [],
            },
            "unrelated text",
        ),
        ({"more": 1}, "Extra"),
    ],
)
def test_unsound_transfer_plans_are_refused_with_the_reason(change, word):
    placed = PlacedChunk(key=KEY, start=2, first=0, last=6, rotary_start=2)
    transfer = TransferPlan(linked=8, placements=(placed,), runs=((0, 2),))
    with pytest.raises(InvalidRequestError, match=word):
        PlanSigner(b"key").verify({PARAM: transfer.model_dump(mode="json") | change}, range(20))


def test_a_transfer_plan_leaves_the_last_token_to_vllm():
    transfer = plan_capture(KEY, begin=2, end=8)
    assert read_again(transfer, 9) == transfer
    with pytest.raises(InvalidRequestError, match="8 tokens of a prompt of 8"):
        read_again(transfer, 8)
    assert PlanSigner(b"key").verify(None, range(8)) is None
    assert PlanSigner(b"key").verify({"other": 1}, range(8)) is None


def test_a_row_is_computed_once_for_all_of_its_chunks():
    keys = [KEY, "b" * 64]
    transfer = read_again(plan_row(keys, [(5, 9), (9, 20)]), 21)
    assert transfer.runs == ((0, 20),)
    assert [(each.key, each.begin, each.end) for each in transfer.captures] == [
        (KEY, 5, 9),
        ("b" * 64, 9, 20),
    ]
    assert not transfer.scored
    with pytest.raises(ValueError, match="captures"):
        plan_row([KEY], [(4, 4)])


def test_a_signature_is_for_one_transfer_plan_and_one_prompt(tmp_path):
    signer, again = PlanSigner.of(tmp_path / "state"), PlanSigner.of(tmp_path / "state")
    transfer, other = (plan_capture(KEY, begin=begin, end=3) for begin in (0, 1))
    params = signer.params(transfer, [1, 2, 3, 4])
    assert again.verify(params, [1, 2, 3, 4]) == transfer
    assert signer.verify({}, [1]) is None
    for forged, tokens in (
        (params, [1, 2, 3, 5]),
        (params | {PARAM: signer.params(other, [1, 2, 3, 4])[PARAM]}, [1, 2, 3, 4]),
        ({PARAM: params[PARAM]}, [1, 2, 3, 4]),
        (PlanSigner.of(tmp_path / "other").params(transfer, [1, 2, 3, 4]), [1, 2, 3, 4]),
    ):
        with pytest.raises(InvalidRequestError, match="signature"):
            signer.verify(forged, tokens)
    assert (tmp_path / "state" / "signing.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["signing.key"]
    assert SIGNATURE in params


def test_what_fits_is_taken_to_the_last_token():
    """Placing takes a sixteenth of a token's room: what is left of one has room for more."""
    _, transfer = transfer_for(linked_prompt(1, 15, header=0, fresh=1), "naive")
    progress = TransferProgress("r", transfer)
    budget = StepBudget(1, 1, 16)
    assert progress.fits(budget)
    assert progress.take(budget).is_last
