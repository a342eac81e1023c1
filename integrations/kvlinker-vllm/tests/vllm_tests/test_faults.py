"""Whatever happens to a request or its chunks, vLLM lives on, and other answers are not touched by
it."""

import itertools
import logging
import secrets

import pytest

pytest.importorskip("vllm")

from tests.engines.embedded.conftest import linked_prompt, random_tokens

from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker_vllm.protocol.signature import SIGNATURE
from kvlinker_vllm.protocol.transfer_plan import PARAM
from vllm_tests.linked_vllm import LinkedVLLM, difference, key_of, outcome_of, transfer_for

TOLERANCE = 2e-5
"""Answers are longer than those of the tests of exactness, and so are their rounding errors."""
LONG = 40
SEEDS = itertools.count()


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """Blocks for about two of the prompts below at once."""
    folder = tmp_path_factory.mktemp("faults")
    made = LinkedVLLM("llama", folder / "models", folder / "state", num_gpu_blocks_override=34)
    yield made
    made.settle()
    made.close()


@pytest.fixture
def prompt(linked):
    prompt = linked_prompt(97, 156, 61, header=5, seed=next(SEEDS))
    linked.cache(prompt)
    return prompt


@pytest.fixture(autouse=True)
def nothing_is_left(linked):
    yield
    linked.settle()


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("policy", ["naive", "random-70", "cacheblend-40-onestep", "query-10"])
def test_plain_requests_find_no_linked_kv(linked, prompt, policy, preempted):
    """Nor does one with another salt, although vLLM takes loaded blocks for exact ones. Prompts are
    prefilled in parts."""
    link = linked.refined(prompt, policy)
    for seed in range(2 * preempted):
        linked.add(random_tokens(330, seed), max_tokens=LONG)
    linked.add(prompt.tokens.tolist(), link.transfer, link.salt("a"), max_tokens=LONG)
    requests = dict(linked.scheduler.requests)
    linked.run()
    assert preempted == any(request.num_preemptions for request in requests.values())
    for salt in (None, "another"):
        plain = linked.add(prompt.tokens.tolist(), salt=salt)
        output = linked.run()[plain]
        assert output.num_cached_tokens == 0
        assert difference(output, prompt, "full", "llama") < TOLERANCE


def test_unsalted_requests_are_not_linked(linked, prompt):
    name = linked.add(prompt.tokens.tolist(), transfer_for(prompt, "naive"))
    output = linked.run()[name]
    assert difference(output, prompt, "full", "llama") < TOLERANCE
    assert output.kv_transfer_params is None


@pytest.mark.parametrize(
    "change",
    [
        {"linked": 10_000},
        {"linked": -1},
        {"linked": 330},
        {"linked": "all"},
        {"runs": ((5, 3),)},
        {"runs": ()},
        {"runs": ((0, 5), (3, 9))},
        {"placements": ()},
        {"more": 1},
    ],
)
def test_unsound_transfer_plans_are_not_followed(linked, prompt, change, monkeypatch):
    params = signed(linked, prompt)
    assert_computed_in_full(linked, prompt, params | {PARAM: params[PARAM] | change}, monkeypatch)


@pytest.mark.parametrize("signature", [None, "", "0" * 64, 7, "é"])
def test_transfer_plans_without_kvlinkers_signature_are_not_followed(
    linked, prompt, signature, monkeypatch
):
    assert_computed_in_full(
        linked, prompt, signed(linked, prompt) | {SIGNATURE: signature}, monkeypatch
    )


def test_transfer_plans_for_another_prompt_are_not_followed(linked, prompt, monkeypatch):
    other = Prompt((*prompt.segments[:-1], FreshSegment(random_tokens(11, 55))))
    assert_computed_in_full(linked, prompt, signed(linked, other), monkeypatch)


def signed(linked, prompt):
    return linked.params(transfer_for(prompt, "legolink-4"), prompt.tokens.tolist())


def assert_computed_in_full(linked, prompt, params, monkeypatch):
    monkeypatch.setattr(linked, "params", lambda *_: params)
    name = linked.add(prompt.tokens.tolist(), params, "salt")
    output = linked.run()[name]
    assert difference(output, prompt, "full", "llama") < TOLERANCE
    assert output.kv_transfer_params is None


def test_a_chunk_that_is_gone_is_computed(linked, prompt):
    linked.chunk_file(prompt.chunks[1]).unlink()
    output = linked.answer(prompt, "legolink-4")
    assert difference(output, prompt, "full", "llama") < TOLERANCE
    assert not outcome_of(output).linked


def test_a_damaged_chunk_is_computed_and_its_file_removed(linked, prompt):
    """It was in no worker's memory: an engine that has just begun reads it from its file."""
    file = linked.chunk_file(prompt.chunks[1])
    forget(linked)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    neighbour = linked_prompt(33, 44, seed=4)
    linked.cache(neighbour)
    names = [linked.submit(prompt, "legolink-4"), linked.submit(neighbour, "legolink-4")]
    outputs = linked.run()
    assert difference(outputs[names[0]], prompt, "full", "llama") < TOLERANCE
    assert not outcome_of(outputs[names[0]]).linked
    assert difference(outputs[names[1]], neighbour, "legolink-4", "llama") < TOLERANCE
    assert not file.exists()


def test_one_request_finds_all_damaged_chunks(linked, prompt, caplog):
    files = [linked.chunk_file(chunk) for chunk in prompt.chunks]
    forget(linked)
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "kvlinker"):
        assert not outcome_of(linked.answer(prompt, "naive")).linked
    for chunk, file in zip(prompt.chunks, files, strict=True):
        assert not file.exists()
        assert f"Chunk {key_of(chunk)} is gone, or was damaged" in caplog.text


def test_a_chunk_that_vanishes_between_scheduling_and_loading_is_computed(
    linked, prompt, monkeypatch
):
    """Also where it is to be placed within the request's own step, as with chunks that workers had
    in memory."""
    for in_memory in (False, True):
        if not in_memory:
            forget(linked)
        monkeypatch.setattr(linked.linking, "_is_stored", lambda key: True)
        file = linked.chunk_file(prompt.chunks[1])
        content = file.read_bytes()
        file.unlink()
        output = linked.answer(prompt, "legolink-4", salt=secrets.token_hex(4))
        assert difference(output, prompt, "full", "llama") < TOLERANCE
        assert not outcome_of(output).linked
        file.write_bytes(content)
        monkeypatch.undo()
        output = linked.answer(prompt, "legolink-4", salt=secrets.token_hex(4))
        assert difference(output, prompt, "legolink-4", "llama") < TOLERANCE


def test_a_comparison_whose_chunk_is_gone_has_everything_computed(linked, prompt, monkeypatch):
    """Whether the scheduler notices, or only the worker."""
    for vanishes in (False, True):
        if vanishes:
            forget(linked)
            monkeypatch.setattr(linked.linking, "_is_stored", lambda key: True)
        linked.chunk_file(prompt.chunks[1]).unlink(missing_ok=True)
        link = linked.refined(prompt, "cacheblend-20-onestep")
        assert not link.refinement.dropped
        assert link.usage(0, linked=True).recomputed_tokens == sum(map(len, prompt.chunks))
        assert difference(linked.follow(link), prompt, "full", "llama") < TOLERANCE


def test_a_first_pass_whose_chunk_is_gone_has_everything_computed(linked, prompt, monkeypatch):
    """Whether the scheduler notices, or only the worker."""
    for vanishes in (False, True):
        if vanishes:
            forget(linked)
            monkeypatch.setattr(linked.linking, "_is_stored", lambda key: True)
        linked.chunk_file(prompt.chunks[1]).unlink(missing_ok=True)
        link = linked.refined(prompt, "query-20")
        assert link.usage(0, linked=True).recomputed_tokens == sum(map(len, prompt.chunks))
        assert difference(linked.follow(link), prompt, "full", "llama") < TOLERANCE


def broken(*_, **__):
    raise RuntimeError("broken for a test")


@pytest.mark.parametrize("fault", ["gone", "vanishes", "breaks"])
@pytest.mark.parametrize("at_once", [True, False])
def test_what_a_first_pass_placed_is_no_answers_when_the_second_fails(
    linked, prompt, monkeypatch, fault, at_once
):
    """Nor another choice's. Blocks that were placed and not repaired would be taken for computed
    ones."""
    link = linked.refined(prompt, "query-20")
    if fault == "breaks":
        monkeypatch.setattr(worker_of(linked)._bound, "forward", broken)
    else:
        linked.chunk_file(prompt.chunks[1]).unlink()
    if fault == "vanishes":
        monkeypatch.setattr(linked.linking, "_is_stored", lambda key: True)
    if not at_once:
        forget(linked)
    for transfer in (link.transfer, link.transfer_again):
        name = linked.add(prompt.tokens.tolist(), transfer, link.salt("a"))
        output = linked.run()[name]
        assert difference(output, prompt, "full", "llama") < TOLERANCE
        monkeypatch.undo()


def forget(linked):
    """All that workers have in memory."""
    chunks = worker_of(linked)._chunks
    for key in list(chunks._memory):
        chunks._forget(key)


def worker_of(linked):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def test_an_exception_while_linking_fails_no_request(linked, prompt, monkeypatch):
    for forgotten in (True, False):
        if forgotten:
            forget(linked)
        monkeypatch.setattr(worker_of(linked)._bound, "forward", broken)
        name = linked.submit(prompt, "legolink-4", salt=secrets.token_hex(4))
        output = linked.run()[name]
        assert difference(output, prompt, "full", "llama") < TOLERANCE
        monkeypatch.undo()


def test_a_request_that_cannot_even_be_begun_is_computed(linked, prompt, monkeypatch):
    """And so is each that began in the same step, if it was to be linked at once; chunks are at
    hand here, and not."""
    for forgotten in (False, True):
        if forgotten:
            forget(linked)
        monkeypatch.setattr(worker_of(linked)._chunks, "resident", no_memory)
        names = [
            linked.submit(prompt, policy, salt=secrets.token_hex(4))
            for policy in ("naive", "legolink-4")
        ]
        outputs = linked.run()
        for name in names:
            assert difference(outputs[name], prompt, "full", "llama") < TOLERANCE
            assert not outcome_of(outputs[name]).linked
        monkeypatch.undo()


def test_chunks_that_do_not_fit_into_memory_are_linked_from_the_disk(linked, prompt, monkeypatch):
    forget(linked)
    monkeypatch.setattr(worker_of(linked)._chunks._index, "budget_bytes", 1)
    for _ in range(2):
        output = linked.answer(prompt, "legolink-4", salt=secrets.token_hex(4))
        assert difference(output, prompt, "legolink-4", "llama") < TOLERANCE
    assert not any(linked.linking._memory.holds(key_of(chunk)) for chunk in prompt.chunks)


def no_memory(*_):
    raise MemoryError("none, for a test")


@pytest.mark.parametrize("steps", range(6))
def test_aborted_requests_leave_nothing(linked, prompt, steps):
    forget(linked)
    aborted = linked.submit(prompt, "random-70", salt=secrets.token_hex(4), max_tokens=LONG)
    kept = linked.submit(prompt, "legolink-4", salt=secrets.token_hex(4), max_tokens=9)
    for _ in range(steps):
        linked.step()
    linked.abort(aborted)
    outputs = linked.run()
    assert difference(outputs[kept], prompt, "legolink-4", "llama") < TOLERANCE


def test_preempted_requests_are_linked_again(linked, prompt):
    """Their outputs grow until not all of them fit."""
    prompts = [
        prompt,
        *(Prompt((*prompt.segments, FreshSegment(random_tokens(9, [7, i])))) for i in range(3)),
    ]
    names = {}
    for each in prompts:
        for policy in ("legolink-4", "attnlink-9"):
            names[linked.submit(each, policy, salt=secrets.token_hex(4), max_tokens=LONG)] = (
                each,
                policy,
            )
    requests = dict(linked.scheduler.requests)
    outputs = linked.run()
    assert any(request.num_preemptions for request in requests.values())
    assert all(linked.linking._memory.holds(key_of(chunk)) for chunk in prompt.chunks)
    for name, (each, policy) in names.items():
        assert difference(outputs[name], each, policy, "llama") < TOLERANCE


def test_a_prompt_that_vllm_has_tells_how_much_of_it(linked, prompt):
    salt = secrets.token_hex(4)
    first, second = (outcome_of(linked.answer(prompt, "legolink-4", salt=salt)) for _ in range(2))
    assert first.found == 0
    assert second.found == len(prompt) // 32 * 32


def test_a_capture_that_the_disk_refuses_leaves_no_file(linked, monkeypatch):
    prompt = linked_prompt(50, seed=next(SEEDS))
    monkeypatch.setattr(worker_of(linked)._chunks._disk, "put", lambda *_: False)
    with pytest.raises(AssertionError):
        linked.cache(prompt)
    monkeypatch.undo()
    output = linked.answer(prompt, "naive")
    assert difference(output, prompt, "full", "llama") < TOLERANCE


def test_seeds_are_followed_where_a_prompt_is_computed_in_parts(linked):
    """The second time most of it is in vLLM's prefix cache, and its rest computed at once."""
    tokens = random_tokens(600, next(SEEDS))
    linked.add(tokens, temperature=1.0, seed=7, max_tokens=12)
    (first,) = linked.run().values()
    again = linked.add(tokens, temperature=1.0, seed=7, max_tokens=12)
    other = linked.add(tokens, temperature=1.0, seed=8, max_tokens=12)
    outputs = linked.run()
    assert outputs[again].outputs[0].token_ids == first.outputs[0].token_ids
    assert outputs[other].outputs[0].token_ids != first.outputs[0].token_ids
