"""kvlinker's engine over vLLM: the embedded engine's answers, and the embedded engine's chunks."""

import collections
import queue
import time
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("vllm")

import numpy as np
from tests.engines.embedded.conftest import linked_prompt, random_tokens
from tests.waiting import wait_until

from kvlinker.base.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
    PolicyError,
)
from kvlinker.base.events import ChunkLookup, RequestFinished
from kvlinker.base.types.answers import Delta
from kvlinker.base.types.chunks import Chunk, GenerationContext, chunk_key, place_keys
from kvlinker.base.types.messages import TokenIds
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import Finished, GenerationRequest
from kvlinker.engines.contract.places import circles
from kvlinker.linking import Link, parse_policy
from kvlinker.llm import LLM
from kvlinker.store import StoreError
from kvlinker_vllm.frontend.linker import StoredLink
from kvlinker_vllm.protocol.transfer_plan import TransferOutcome
from vllm_tests.conftest import embedded_settings

TOLERANCE = 1e-4
TEXTS = [
    "The cat sat on the mat, and it was fine. " * 4,
    "A dog and a small text. " * 3,
    "Yes, yes. " * 9,
]
POLICIES = [
    "full",
    "naive",
    "naive-unpositioned",
    "legolink-4",
    "attnlink-5",
    "random-30",
    "prefix",
]
POLICIES += [
    "cacheblend-40-onestep",
    "cacheblend-30-onestep-k+legolink-2",
    "query-10",
    "query-5+cacheblend-20-onestep",
]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 3}


@pytest.fixture(scope="module")
def llm(served):
    return served.llm


@pytest.fixture(scope="module")
def embedded(vllm_settings):
    """The embedded engine on the same model and the same state directory; without variants, which
    vLLM has none of."""
    settings = embedded_settings(vllm_settings, max_variants=0)
    with LLM.from_settings(settings) as made:
        yield made


def question(ids, text="What do they have in common?"):
    return [{"role": "user", "content": [ids[1], ids[0], "And here: ", ids[2], text]}]


def assert_same(answer, other):
    assert answer.token_ids == other.token_ids
    assert answer.text == other.text
    assert answer.usage == other.usage
    assert answer.finish_reason == other.finish_reason
    for one, two in zip(answer.logprobs, other.logprobs, strict=True):
        assert (one.token_id, one.text) == (two.token_id, two.text)
        assert one.logprob == pytest.approx(two.logprob, abs=TOLERANCE)
        assert [entry.logprob for entry in one.top] == pytest.approx(
            [e.logprob for e in two.top], abs=TOLERANCE
        )


def lookups(llm):
    """Tiers of the lookups from now on."""
    tiers = []
    llm.events.subscribe(
        lambda event: tiers.append(event.tier) if isinstance(event, ChunkLookup) else None
    )
    return tiers


@pytest.mark.parametrize("cached_by", ["vllm", "embedded"])
def test_either_engine_answers_alike_over_the_others_chunks(llm, embedded, cached_by):
    assert llm.engine.fingerprint == embedded.engine.fingerprint
    assert llm.engine.kv_bytes_per_token == embedded.engine.kv_bytes_per_token
    texts = [f"{cached_by}: {text}" for text in TEXTS]
    ids = (llm if cached_by == "vllm" else embedded).generate_context_cache(texts)
    embedded.store.flush()
    looked = lookups(llm), lookups(embedded)
    for policy in POLICIES:
        assert_same(
            llm.chat_completion(question(ids), policy=policy, **GREEDY),
            embedded.chat_completion(question(ids), policy=policy, **GREEDY),
        )
    assert "none" not in {*looked[0], *looked[1]}


def test_rows_of_chunks_are_alike(llm, embedded):
    """What either engine computes in idle time for later places, as the mean over all contexts."""
    texts = [f"row {number}: {text}" for number, text in enumerate(TEXTS)]
    ids = llm.generate_context_cache(texts)
    chunks = [llm.builder.encode_chunk(text, GenerationContext.PREFIX) for text in texts]
    keys = [
        placed
        for chunk in chunks
        for placed in place_keys(
            chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant="default")
        )[: len(chunks) - 1]
    ]
    ask = partial(question, ids)
    kvs, answers = [], []
    for each in (llm, embedded):
        first = each.chat_completion(ask(), policy="row", **GREEDY)
        assert first.usage.recomputed_tokens > 0
        wait_until(partial(each.store.tier_of, keys[0]))  # uses are noted in a thread
        each.settle()
        answers.append(each.chat_completion(ask(), policy="row", **GREEDY))
        assert answers[-1].usage.recomputed_tokens == 0
        kvs.append([each.store.get_computed(key) for key in keys])
        if each is llm:
            for key in keys:
                each.store.delete(key)
    for ours, theirs in zip(*kvs, strict=True):
        assert ours.contexts == theirs.contexts == circles(len(chunks)) > 1
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            for part, expected in zip(layer.parts, other.parts, strict=True):
                np.testing.assert_allclose(part, expected, atol=1e-4)
    assert_same(*answers)
    for policy in ("row+query-10", "row+query-10-sensitive", "row+cacheblend-30-onestep"):
        assert_same(
            llm.chat_completion(question(ids, policy), policy=policy, **GREEDY),
            embedded.chat_completion(question(ids, policy), policy=policy, **GREEDY),
        )


def test_scores_of_chunks_are_alike(llm, embedded):
    """And so is what the policies make of them. A chunk's key knows its generation context."""
    texts = [
        "numbers 1 2 3 and more words: alpha. " * 5,
        "user assistant system question. " * 7,
        TEXTS[2],
    ]
    chunks = [llm.builder.encode_chunk(text, GenerationContext.PREFIX) for text in texts]
    keys = [
        chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant="default") for chunk in chunks
    ]
    for key, chunk in zip(keys, chunks, strict=True):
        llm.engine.cache_chunk(chunk, tenant="default").result(timeout=60)
        ours = llm.store.get(key).scores
        llm.store.delete(key)
        embedded.store.delete(key)
        embedded.engine.cache_chunk(chunk, tenant="default").result(timeout=60)
        theirs = embedded.store.get(key).scores
        assert ours.contextualization.tokens == theirs.contextualization.tokens
        assert ours.contextualization.intra == pytest.approx(
            theirs.contextualization.intra, abs=1e-4
        )
        np.testing.assert_allclose(ours.inter, theirs.inter, atol=1e-4)
        np.testing.assert_allclose(ours.received, theirs.received, atol=1e-4)
        np.testing.assert_allclose(ours.sensitivity, theirs.sensitivity, rtol=1e-3)
    ids = llm.generate_context_cache(texts)
    for policy in (
        "h2o-20",
        "cachecraft-0.7",
        "cachecraft-1+legolink-2+query-5",
        "query-20-sensitive",
    ):
        answers = [
            each.chat_completion(question(ids), policy=policy, **GREEDY) for each in (llm, embedded)
        ]
        assert_same(*answers)
        assert answers[0].usage.recomputed_tokens


@pytest.mark.parametrize("reason", ["no room", "a text that a prompt brought", "a failure"])
def test_a_chunk_is_stored_where_its_sensitivity_is_not_measured(llm, monkeypatch, reason):
    chunks, client = llm.engine._chunks, llm.engine.client
    chunk = Chunk(
        random_tokens(60, len(reason)),
        random_tokens(5, 2),
        scored=reason != "a text that a prompt brought",
    )
    run_transfer, asked = client.run_transfer, []

    async def failing(transfer, tokens):
        asked.append(transfer.unrelated)
        return (
            TransferOutcome(linked=False)
            if transfer.unrelated
            else await run_transfer(transfer, tokens)
        )

    monkeypatch.setattr(client, "run_transfer", failing)
    if reason == "no room":
        monkeypatch.setattr(chunks, "_longest", 65 + len(chunks._unrelated) - 1)
    assert llm.engine.cache_chunk(chunk, tenant="default").result(timeout=60)
    scores = llm.store.get(chunks.key(chunk, "default")).scores
    assert scores.received.shape == (60,)
    assert scores.sensitivity is None
    assert asked == ([(5, 5 + len(chunks._unrelated)), None] if reason == "a failure" else [None])


def test_explanations_are_alike(llm, embedded):
    ids = llm.generate_context_cache(TEXTS)
    # what is not in memory, and takes longer to load than to compute, would be computed
    wait_until(lambda: all(embedded.store.get(cache.chunk_key) is not None for cache in ids))
    for policy in (
        "full",
        "legolink-4",
        "random-30",
        "cacheblend-40-onestep-v",
        "query-10+legolink-2",
    ):
        ours, theirs = (each.explain(question(ids), policy=policy) for each in (llm, embedded))
        for one, other in zip(ours.scores, theirs.scores, strict=True):
            assert (one.name, one.layer) == (other.name, other.layer)
            np.testing.assert_array_equal(one.positions, other.positions)
            np.testing.assert_allclose(one.values, other.values, rtol=1e-3)
        assert replace(ours, scores=()) == replace(theirs, scores=())


def test_an_answer_does_not_explain_itself(llm):
    request = GenerationRequest(
        llm.read_completion(("The cat",)).prompt, parse_policy("naive"), explains=True
    )
    with pytest.raises(
        InvalidRequestError, match="does not explain a prompt with its answer"
    ) as refused:
        llm.engine.generate(request, print)
    assert refused.value.param == "link.explain"


def test_sampling_follows_its_parameters(llm):
    prompt = "The cat sat on"
    seeded = [
        llm.completion(prompt, seed=5, max_tokens=20, ignore_eos=True).token_ids for _ in range(2)
    ]
    assert (
        seeded[0]
        == seeded[1]
        != llm.completion(prompt, seed=6, max_tokens=20, ignore_eos=True).token_ids
    )
    one = llm.completion(prompt, top_k=1, max_tokens=9, ignore_eos=True).token_ids
    assert one == llm.completion(prompt, top_p=0, max_tokens=9, ignore_eos=True).token_ids
    assert one == llm.completion(prompt, temperature=0, max_tokens=9, ignore_eos=True).token_ids
    repeated = llm.completion(
        prompt, temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=50
    )
    assert len(set(repeated.token_ids)) == 20


def test_stop_strings_end_the_answer(llm, embedded):
    options = GREEDY | {"max_tokens": 30}
    whole = llm.completion("The cat", **options)
    stop = whole.text[8:10]
    cut = llm.completion("The cat", stop=stop, **options)
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert_same(cut, embedded.completion("The cat", stop=stop, **options))


class Sink:
    """Takes the events of a request, and hands them out choice by choice."""

    def __init__(self):
        self._queues = collections.defaultdict(queue.SimpleQueue)

    def put(self, choice, event):
        self._queues[choice].put((time.monotonic(), event))

    def timed(self, choice=0):
        return self._queues[choice].get(timeout=60)

    def get(self, choice=0):
        return self.timed(choice)[1]

    def rest(self, choice=0):
        """All events of a choice until its last one."""
        events = [self.get(choice)]
        while isinstance(events[-1], Delta):
            events.append(self.get(choice))
        return events


def tokens_of(events):
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def request(llm, tokens=700, n=1, **sampling):
    prompt = llm.read_completion(TokenIds(tuple(random_tokens(20, 3)))).prompt
    return GenerationRequest(
        prompt,
        parse_policy("naive"),
        SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling),
        n=n,
    )


def test_cancelled_requests_free_their_room(served, llm):
    sinks = [Sink() for _ in range(3)]
    handles = [llm.engine.generate(request(llm), sink.put) for sink in sinks]
    assert isinstance(sinks[0].get(), Delta)
    assert llm.current_load().running == 3
    for handle in handles:
        handle.cancel()
        handle.cancel()
    for sink in sinks:
        *_, last = sink.rest()
        assert isinstance(last, Finished)
        assert last.reason == "cancelled"
    served.wait_until_idle()


def test_a_full_queue_refuses(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "_max_running", 1)
    monkeypatch.setattr(llm.engine, "_max_waiting", 1)
    handles = [llm.engine.generate(request(llm), Sink().put) for _ in range(2)]
    with pytest.raises(OverloadedError):
        llm.engine.generate(request(llm), Sink().put)
    for handle in handles:
        handle.cancel()


def test_a_request_that_is_checked_while_the_engine_closes_is_refused(llm, monkeypatch):
    def checked(given):
        closing.setattr(llm.engine, "_closing", True)
        return 4

    with monkeypatch.context() as closing:
        closing.setattr(llm.engine, "_check", checked)
        with pytest.raises(EngineClosedError):
            llm.engine.generate(request(llm), Sink().put)
    assert llm.current_load().running == 0


def linked_choices(llm, prompt, n, policy="legolink-4", **sampling):
    """A request for ``n`` choices over a linked prompt: its sink, the vLLM requests that it makes,
    and its handle."""
    client, made = llm.engine.client, []
    stream = client.stream

    def noted(name, *arguments, **options):
        made.append((time.monotonic(), options["transfer"], options["salt"]))
        return stream(name, *arguments, **options)

    client.stream = noted
    sink = Sink()
    params = SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | sampling))
    handle = llm.engine.generate(
        GenerationRequest(prompt, parse_policy(policy), params, n=n), sink.put
    )
    return sink, made, handle, lambda: setattr(client, "stream", stream)


def test_choices_are_linked_once_and_each_has_its_own_seed(llm, monkeypatch):
    prompt = linked_prompt(160, 97, fresh=9, seed=31)
    for chunk in prompt.chunks:
        llm.engine.cache_chunk(chunk, tenant="default").result(timeout=60)
    linked = []
    link = llm.engine._linker.link

    def noted(request):
        linked.append(request)
        return link(request)

    monkeypatch.setattr(llm.engine._linker, "link", noted)
    sink, made, _, restore = linked_choices(llm, prompt, 4, seed=11)
    try:
        first_token, first = sink.timed(0)
        answers = [[*tokens_of([first]), *tokens_of(sink.rest(0))]]
        answers += [tokens_of(sink.rest(choice)) for choice in (1, 2, 3)]
    finally:
        restore()
    assert len(linked) == 1
    assert len(made) == 4
    assert len({(str(transfer), salt) for _, transfer, salt in made}) == 1
    assert all(began >= first_token for began, *_ in made[1:])
    for choice, tokens in enumerate(answers):
        alone = llm.chat_completion(
            prompt, policy="legolink-4", seed=11 + choice, max_tokens=8, ignore_eos=True
        )
        assert tokens == list(alone.token_ids), choice
    assert len({tuple(tokens) for tokens in answers}) == 4


def test_choices_have_the_prompts_usage_and_it_counts_once(llm):
    prompt = linked_prompt(64, 33, fresh=9, seed=32)
    llm.chat_completion(prompt, policy="naive", max_tokens=1)  # computes its chunks
    finished = []
    llm.events.subscribe(
        lambda event: finished.append(event) if isinstance(event, RequestFinished) else None
    )
    sink, _, _, restore = linked_choices(llm, prompt, 3, temperature=0)
    restore()
    usages = [sink.rest(choice)[-1].usage for choice in range(3)]
    assert len(set(usages)) == 1
    assert usages[0].prompt_tokens == len(prompt)
    assert usages[0].output_tokens == 8
    assert sorted(event.fresh_tokens for event in finished) == [0, 0, 9]
    assert [event.output_tokens for event in finished] == [8, 8, 8]


def test_cancelling_ends_all_choices(served, llm):
    sink = Sink()
    handle = llm.engine.generate(request(llm, n=3), sink.put)
    assert isinstance(sink.get(2), Delta)
    assert llm.current_load().running == 3
    handle.cancel()
    for choice in range(3):
        assert sink.rest(choice)[-1].reason == "cancelled"
    waiting = Sink()
    llm.engine.generate(request(llm, n=3), waiting.put).cancel()  # before the first one has begun
    assert [waiting.rest(choice)[-1].reason for choice in range(3)] == ["cancelled"] * 3
    served.wait_until_idle()


def test_all_choices_are_admitted_or_none(served, llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "_max_running", 2)
    monkeypatch.setattr(llm.engine, "_max_waiting", 3)
    sink = Sink()
    handle = llm.engine.generate(request(llm, n=3), sink.put)
    with pytest.raises(
        OverloadedError, match="3 requests are queued already, and there is room for 5"
    ):
        llm.engine.generate(request(llm, n=3), Sink().put)
    other = llm.engine.generate(request(llm, tokens=2, n=2), Sink().put)
    with pytest.raises(InvalidRequestError, match=r"n is 6, .* room for 5"):
        llm.engine.generate(request(llm, n=6), Sink().put)
    for each in (handle, other):
        each.cancel()
    served.wait_until_idle()
    llm.engine.generate(request(llm, tokens=1, n=5), sink.put)
    served.wait_until_idle()


def test_many_requests_of_many_choices_all_succeed_or_are_refused(served, llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "_max_running", 8)
    monkeypatch.setattr(llm.engine, "_max_waiting", 8)
    prompt = linked_prompt(40, 33, fresh=9, seed=33)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    sinks, refused = [], 0
    for _ in range(8):
        sink = Sink()
        try:
            llm.engine.generate(
                GenerationRequest(prompt, parse_policy("naive"), params, n=8), sink.put
            )
            sinks.append(sink)
        except OverloadedError:
            refused += 1
    assert len(sinks) >= 2
    assert len(sinks) + refused == 8
    assert {type(sink.rest(choice)[-1]) for sink in sinks for choice in range(8)} == {Finished}
    served.wait_until_idle()


def test_a_sink_that_fails_for_one_choice_leaves_the_others(served, llm):
    sink = Sink()

    def put(choice, event):
        if choice == 0:
            raise RuntimeError("nobody listens to the first")
        sink.put(choice, event)

    llm.engine.generate(request(llm, tokens=5, n=2), put)
    assert sink.rest(1)[-1].reason == "length"
    served.wait_until_idle()


@pytest.mark.parametrize(
    ("policy", "lacks"),
    [
        ("cacheblend-15", "dropping tokens in every layer"),
        ("cacheblend-auto-onestep", "a forecast"),
        ("cachecraft-1-focus", "the question's attention on chunks"),
        ("query-5+cacheblend-15", "dropping tokens in every layer"),
    ],
)
def test_policies_that_decide_on_the_way_are_refused(served, llm, policy, lacks):
    ids = llm.generate_context_cache(TEXTS)
    assert lacks in llm.engine.unsupported(parse_policy(policy))
    assert llm.engine.unsupported(parse_policy("legolink-4")) is None
    with pytest.raises(PolicyError, match="vllm engine"):
        llm.chat_completion(question(ids), policy=policy)
    body = {"messages": [{"role": "user", "content": "Hi"}], "link": {"policy": policy}}
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "vllm engine" in answer.json()["error"]["message"]


def test_what_cannot_be_done_says_so(llm):
    with pytest.raises(InvalidRequestError, match="vllm engine"):
        llm.score("The cat sat on the mat.")
    with pytest.raises(ContextLengthError):
        llm.completion("a", max_tokens=5000)
    with pytest.raises(InvalidRequestError, match="Token id"):
        llm.completion([1, 10**6])
    long = Chunk(random_tokens(llm.max_model_len - 1, 1))
    with pytest.raises(ContextLengthError, match="at most"):
        llm.engine.cache_chunk(long, tenant="default").result(timeout=60)


def test_a_chunk_is_computed_once_however_many_ask(llm, monkeypatch):
    client = llm.engine.client
    asked = []
    stream = client.stream

    def counted(name, *arguments, **options):
        asked.append(name)
        return stream(name, *arguments, **options)

    monkeypatch.setattr(client, "stream", counted)
    chunk = Chunk(random_tokens(200, 17))
    sizes = {
        future.result(timeout=60)
        for future in [llm.engine.cache_chunk(chunk, tenant="t") for _ in range(5)]
    }
    assert len(sizes) == len(asked) == 1
    assert sizes == {
        llm.store.nbytes(chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant="t"))
    }


def test_a_chunk_that_vanishes_when_it_was_written_is_no_error(llm, monkeypatch):
    run_transfer = llm.engine.client.run_transfer

    async def deleted(transfer, tokens):
        outcome = await run_transfer(transfer, tokens)
        for captured in transfer.captures:
            llm.store.delete(captured.key)
        return outcome

    monkeypatch.setattr(llm.engine.client, "run_transfer", deleted)
    prompt = linked_prompt(40, 30, seed=23)
    assert llm.engine.cache_chunk(prompt.chunks[0], tenant="default").result(timeout=60) == 0
    answer = llm.chat_completion(prompt, policy="naive", **GREEDY)
    monkeypatch.undo()
    assert_same(answer, llm.chat_completion(prompt, policy="full", **GREEDY))


def test_what_vllm_still_has_of_a_prompt_counts_as_cached(llm):
    prompt = linked_prompt(64, 33, fresh=40, seed=34)
    llm.chat_completion(prompt, policy="legolink-4", max_tokens=1)  # computes its chunks
    first, second = (
        llm.chat_completion(prompt, policy="legolink-4", tenant="again", max_tokens=1).usage
        for _ in range(2)
    )
    assert first.exact_cached_tokens == 0
    found = len(prompt) // 32 * 32
    assert second.exact_cached_tokens == found
    assert second.recomputed_tokens == 0
    assert second.fresh_tokens == len(prompt) - found
    assert second.prompt_tokens == first.prompt_tokens == len(prompt)


def test_vllms_own_figures_stay(served):
    figures = served.get("/metrics").text
    assert "vllm:num_requests_running" in figures
    assert "kvlinker:store_bytes" in figures


def test_evicted_chunks_are_computed_again(llm):
    prompt = linked_prompt(60, 40, seed=21)
    first, cached = (llm.chat_completion(prompt, policy="naive", **GREEDY) for _ in range(2))
    for chunk in prompt.chunks:
        llm.store.delete(chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant="default"))
    assert_same(llm.chat_completion(prompt, policy="naive", **GREEDY), first)
    assert cached.token_ids == first.token_ids
    assert (first.usage.cached_tokens, cached.usage.cached_tokens) == (0, 100)


def test_tenants_share_nothing(llm):
    prompt = linked_prompt(60, 40, seed=22)
    first = llm.chat_completion(prompt, policy="naive", tenant="a", **GREEDY)
    second = llm.chat_completion(prompt, policy="naive", tenant="b", **GREEDY)
    assert first.token_ids == second.token_ids
    for chunk in prompt.chunks:
        keys = [
            chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant=tenant)
            for tenant in ("a", "b")
        ]
        assert [llm.store.tier_of(key) for key in keys] == ["disk", "disk"]
    linked = StoredLink(
        Link.begin(prompt, parse_policy("naive")), layers=2, keys=("0" * 64, "1" * 64)
    )
    assert linked.salt("a") != linked.salt("b")


def test_many_at_once(llm):
    """Creations, links and plain requests, all at the same time."""
    prompts = [linked_prompt(30 + 7 * index, 50, fresh=20, seed=index) for index in range(8)]
    sinks = {}
    for index, prompt in enumerate(prompts):
        for policy in ("naive", "full", "legolink-4"):
            sinks[index, policy] = Sink()
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            llm.engine.generate(
                GenerationRequest(prompt, parse_policy(policy), params), sinks[index, policy].put
            )
    answers = {}
    for name, sink in sinks.items():
        *deltas, last = sink.rest()
        assert isinstance(last, Finished), last
        answers[name] = [token for delta in deltas for token in delta.token_ids]
    for (index, policy), tokens in answers.items():
        alone = llm.chat_completion(
            prompts[index], policy=policy, temperature=0, max_tokens=5, ignore_eos=True
        )
        assert list(alone.token_ids) == tokens


def test_without_room_for_chunks_prompts_are_computed_and_creation_says_so(llm, monkeypatch):
    ids = llm.generate_context_cache([f"No room: {text}" for text in TEXTS])
    expected = llm.chat_completion(question(ids), policy="full", **GREEDY)
    for cache in ids:
        llm.store.delete(cache.chunk_key)
    monkeypatch.setattr(llm.store, "make_room", lambda *_: False)
    with pytest.raises(StoreError, match="no room for chunk"):
        llm.generate_context_cache(["This one is new, and there is no room for it either. "])
    for policy in ("legolink-4", "h2o-20", "cacheblend-40-onestep"):
        answer = llm.chat_completion(question(ids), policy=policy, **GREEDY)
        assert answer.text == expected.text
        assert answer.usage.cached_tokens == 0
        assert answer.usage.recomputed_tokens == sum(cache.tokens for cache in ids)
    monkeypatch.undo()
    assert llm.chat_completion(question(ids), policy="naive", **GREEDY).usage.recomputed_tokens == 0
