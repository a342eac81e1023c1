"""The Python library end to end, on a tiny model and on the one in the box."""

import json
import queue
import re
import time
from importlib.metadata import PackageNotFoundError
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from kvlinker import LLM, AsyncLLM
from kvlinker.base.errors import (
    ContextCacheNotFoundError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    PolicyError,
    QuotaExceededError,
)
from kvlinker.base.types.chunks import chunk_key
from kvlinker.base.types.messages import ChatMessage, ContextCacheReference
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import Finished
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.linking import Policy, known_policies
from kvlinker.settings import load_settings
from kvlinker.store import TenantUsage
from kvlinker.store.catalog.databases.sqlite import SQLiteDatabase
from kvlinker.store.catalog.variants import VariantIndex
from kvlinker.store.loading import prompt_load
from kvlinker.store.loading.bandwidths import Bandwidths
from tests.toy_models import loaded_model, tiny_model
from tests.waiting import PATIENCE

TEXTS = [
    "The first chunk speaks of plums.",
    "The second, of pears and their trees.",
    "The third says nothing.",
]
QUESTION = "What do the two have in common?"


@pytest.fixture
def make_llm(tmp_path, monkeypatch):
    """Makes LLMs that read stored chunks to their end, however busy the machine is."""
    monkeypatch.setattr(prompt_load, "LEAST_DEADLINE_SECONDS", 10.0)
    monkeypatch.setattr(Bandwidths, "worth_loading", lambda *_: True)
    made = []

    def make(loaded=None, **options):
        given = {"state_dir": tmp_path, "model": "tiny", "kv_slots": 4096, "prefix_cache": "off"}
        settings = load_settings(**(given | options))
        made.append(LLM.from_model(loaded or loaded_model("llama"), settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_there_are_the_calls_that_the_page_names():
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    (table,) = re.findall(r"## Python\n.*?\n(\| call \|.*?)\n\n", page, re.DOTALL)
    named = {
        name for row in table.splitlines() for name in re.findall(r"(\w+)\(", row.split(" | ")[0])
    }
    assert {"chat_completion", "submit", "read_chat"} <= named <= set(dir(LLM))


def ask(llm, caches, **options):
    return llm.chat_completion(
        [{"role": "user", "content": [*caches, QUESTION]}],
        **({"max_tokens": 6, "temperature": 0} | options),
    )


def test_given_text_is_scored_as_it_is_generated(make_llm):
    llm = make_llm()
    caches = llm.generate_context_cache(TEXTS)
    for policy in ("full", "legolink-4"):
        scored = llm.score([*caches, QUESTION], policy=policy, logprobs=3)
        assert len(scored.token_ids) == len(QUESTION) - 1
        for cut in (1, 20):
            answer = llm.completion(
                [*caches, QUESTION[:cut]], policy=policy, max_tokens=1, temperature=0, logprobs=1000
            )
            following = {entry.token_id: entry.logprob for entry in answer.logprobs[0].top}
            own = following[scored.token_ids[cut - 1]]
            assert scored.logprobs[cut - 1] == pytest.approx(own, abs=1e-4)
            assert scored.top_ids[cut - 1].tolist() == list(following)[:3]
    with pytest.raises(PolicyError):
        llm.score(TEXTS[0], policy="blend")


@pytest.mark.parametrize("read", ["read_chat", "read_completion", "score", "explain"])
def test_a_policy_without_a_certificate_is_refused_before_anything_is_read(make_llm, read):
    llm = make_llm(policy="full", require_certificate=True)
    content = [{"type": "text", "text": TEXTS[0], "cache_control": {"type": "ephemeral"}}]
    prompt = (
        [{"role": "user", "content": content}] if read in ("read_chat", "explain") else TEXTS[0]
    )
    with pytest.raises(PolicyError, match="naive has no certificate") as caught:
        getattr(llm, read)(prompt, policy="naive")
    assert caught.value.param == "link.policy"
    assert not llm.list_caches().items


def test_what_was_started_is_closed_where_the_rest_cannot_start(make_llm, monkeypatch):
    engines = []
    start = EmbeddedEngine.__init__

    def noting(engine, *arguments, **options):
        start(engine, *arguments, **options)
        engines.append(engine)

    monkeypatch.setattr(EmbeddedEngine, "__init__", noting)
    with pytest.raises(ModelLoadError, match="chat template"):
        make_llm(chat_template="{% if")
    (engine,) = engines
    assert not engine.healthy


def test_the_three_calls(make_llm):
    llm = make_llm(policy="legolink-16")
    caches = llm.generate_context_cache(TEXTS, ttl=3600, name="fruit", metadata={"source": "test"})
    assert [cache.tokens for cache in caches] == [len(text) for text in TEXTS]
    assert caches[0].name == "fruit"
    answer = ask(llm, [caches[1], caches[0]])
    assert answer.usage.output_tokens == len(answer.token_ids) == 6
    assert answer.finish_reason == "length"
    # the first chunk stands behind the header that it was made behind, so only the second is
    # repaired
    assert answer.usage.recomputed_tokens == 16
    assert answer.usage.cached_tokens == len(TEXTS[0]) + len(TEXTS[1]) - 16
    llm.expire_cache(caches[0])
    with pytest.raises(ContextCacheNotFoundError):
        ask(llm, [caches[0]])
    with pytest.raises(ContextCacheNotFoundError):
        llm.expire_cache(caches[0].id)


def test_full_answers_as_if_the_text_had_been_written_out(make_llm):
    llm = make_llm()
    caches = llm.generate_context_cache(TEXTS)
    linked = ask(llm, [caches[2], caches[0]], policy="full", logprobs=0)
    written = ask(llm, [TEXTS[2], TEXTS[0]], logprobs=0)
    assert linked.token_ids == written.token_ids
    np.testing.assert_allclose(
        [e.logprob for e in linked.logprobs], [e.logprob for e in written.logprobs], atol=1e-5
    )
    assert linked.usage.fresh_tokens < written.usage.fresh_tokens == written.usage.prompt_tokens


def test_everything_survives_a_restart(make_llm):
    first = make_llm(policy="query-5-sensitive")
    caches = first.generate_context_cache(TEXTS)
    before = ask(first, caches)
    first.close()
    second = make_llm(policy="query-5-sensitive")
    assert second.caches.get(caches[0].id, tenant="default") == caches[0]
    assert second.caches.tier(caches[0]) == "disk"
    after = ask(second, [{"type": "context_cache", "id": cache.id} for cache in caches])
    assert after.token_ids == before.token_ids
    assert after.usage == before.usage
    assert second.caches.tier(caches[0]) == "host"


def test_evicted_and_damaged_kv_is_computed_again(make_llm, tmp_path):
    llm = make_llm(host_memory=0, policy="query-5-sensitive")
    caches = llm.generate_context_cache(TEXTS)
    before = ask(llm, caches)
    llm.store.flush()
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    files[0].write_bytes(b"nonsense")
    files[1].unlink()
    damaged = bytearray(files[2].read_bytes())
    damaged[-5] ^= 1
    files[2].write_bytes(damaged)
    after = ask(llm, caches)
    assert after.token_ids == before.token_ids
    assert after.usage.recomputed_tokens == before.usage.recomputed_tokens
    assert (before.usage.cached_tokens > 0, after.usage.cached_tokens) == (True, 0), (
        "all of it was computed for this"
    )
    llm.store.flush()
    (disk,) = [found for found in llm.store.check() if found.name == "disk"]
    assert (disk.checked, disk.damaged) == (3, ())  # whole again


def test_the_same_content_shares_its_kv_until_nobody_holds_it(make_llm):
    llm = make_llm()
    (first,), (second,) = (
        llm.generate_context_cache(TEXTS[:1]),
        llm.generate_context_cache(TEXTS[:1]),
    )
    assert first.id != second.id
    assert first.chunk_key == second.chunk_key
    llm.expire_cache(first)
    assert llm.caches.tier(second) == "host"
    llm.expire_cache(second)
    assert llm.store.tier_of(second.chunk_key) is None


@pytest.mark.parametrize("context", ["alone", "bos", "prefix"])
def test_generation_contexts(make_llm, context):
    llm = make_llm()
    (cache,) = llm.generate_context_cache(TEXTS[:1], context=context)
    header = tuple(llm.tokenizer("<s>[user]", add_special_tokens=False)["input_ids"])
    text = tuple(llm.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"])
    assert cache.chunk.prefix == (header if context == "prefix" else ())
    assert cache.chunk.tokens == ((256, *text) if context == "bos" else text)
    answer = ask(llm, [cache], policy="legolink-4")
    assert answer.usage.recomputed_tokens == (0 if context == "prefix" else 4)
    keys = {
        chunk_key(cache.chunk, fingerprint=llm.engine.fingerprint, tenant="default"),
        cache.chunk_key,
    }
    assert len(keys) == 1


def test_the_catalog_is_asked_once_for_all_context_caches_of_a_prompt(make_llm, monkeypatch):
    llm = make_llm()
    caches = llm.generate_context_cache(TEXTS)
    queries = []
    query = SQLiteDatabase.query

    def counted(database, sql, values):
        if (
            "context_caches" in sql and database is llm.catalog._database
        ):  # servers of other tests sweep theirs
            queries.append(sql)
        return query(database, sql, values)

    monkeypatch.setattr(SQLiteDatabase, "query", counted)
    messages = [
        {"role": "system", "content": [caches[2]]},
        {"role": "user", "content": [*caches, "?", caches[0]]},
    ]
    for use in (
        llm.chat_prompt,
        llm.explain,
        lambda messages: llm.chat_completion(messages, max_tokens=1),
    ):
        queries.clear()
        use(messages)
        assert len(queries) == 1
    queries.clear()
    explained = llm.explain(prompt=[*caches, "?"])
    assert [segment.context_cache for segment in explained.segments if segment.kind == "chunk"] == [
        cache.id for cache in caches
    ]
    assert len(queries) == 1
    queries.clear()
    ask(llm, [])
    assert queries == [], "nothing to look up"


def test_the_place_of_an_unknown_context_cache_is_named(make_llm):
    llm = make_llm()
    (known,) = llm.generate_context_cache(TEXTS[:1])
    lost = ContextCacheReference("cc_0")
    with pytest.raises(ContextCacheNotFoundError, match="cc_0") as caught:
        llm.chat_completion(
            [ChatMessage("system", (known.id,)), {"role": "user", "content": [known, lost]}]
        )
    assert caught.value.param == "messages.1.content.1.id"
    with pytest.raises(ContextCacheNotFoundError) as caught:
        llm.explain(prompt=["a", {"type": "context_cache", "id": "cc_0"}])
    assert caught.value.param == "prompt.1.id"


def test_what_the_server_asks_is_told(make_llm):
    llm = make_llm()
    assert llm.healthy
    assert [tier.name for tier in llm.tiers()] == ["host", "disk"]
    assert llm.bandwidths().keys() <= {"host", "disk"}
    assert (
        list(llm.token_ids(TEXTS[0]))
        == llm.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    )
    assert [policy["name"] for policy in llm.policies()] == list(known_policies())
    llm.close()
    assert not llm.healthy


def test_the_library_needs_no_metadata_of_its_package(make_llm, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("kvlinker.llm.version", missing)
    assert make_llm().completion("The cat", max_tokens=2).token_ids


def test_prompts_are_read_as_callers_write_them(make_llm):
    llm = make_llm()
    (cache,) = llm.generate_context_cache(TEXTS[:1])
    typed = (ContextCacheReference(cache.id), TEXTS[1])
    conversation = llm.read_chat([{"role": "user", "content": [cache, TEXTS[1]]}])
    assert conversation == llm.read_chat([ChatMessage("user", typed)])
    assert llm.read_completion([cache, TEXTS[1]]) == llm.read_completion(typed)
    assert llm.read_completion(TEXTS[1]) == llm.read_completion((TEXTS[1],))


def test_choices_that_are_submitted_are_cancelled_together(make_llm):
    llm = make_llm()
    ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def sink(index, event):
        if isinstance(event, Finished):
            ended.put((index, event.reason))

    handle = llm.submit(llm.read_completion("a"), SamplingParams(ignore_eos=True), sink, n=3)
    handle.cancel()
    assert sorted(ended.get(timeout=PATIENCE) for _ in range(3)) == [
        (index, "cancelled") for index in range(3)
    ]
    handle.cancel()


def test_tenants_do_not_see_each_other(make_llm):
    llm = make_llm()
    (mine,) = llm.generate_context_cache(TEXTS[:1], tenant="a")
    (theirs,) = llm.generate_context_cache(TEXTS[:1], tenant="b")
    assert mine.chunk_key != theirs.chunk_key
    with pytest.raises(ContextCacheNotFoundError):
        ask(llm, [mine], tenant="b")


def test_a_context_cache_is_its_owners_unless_another_tenant_is_named(make_llm):
    llm = make_llm()
    (cache,) = llm.generate_context_cache(TEXTS[:1], tenant="anna")
    assert llm.read_cache(cache).token_ids == cache.chunk.tokens
    assert llm.update_cache(cache, name="plums").name == "plums"
    for call in (llm.read_cache, llm.update_cache, llm.expire_cache):
        for given, options in ((cache, {"tenant": "bert"}), (cache.id, {})):
            with pytest.raises(ContextCacheNotFoundError):
                call(given, **options)
    llm.expire_cache(cache)
    assert llm.list_caches(tenant="anna").items == ()
    (shared,) = llm.generate_context_cache(TEXTS[:1], scope="shared", tenant="anna")
    assert llm.read_cache(shared).token_ids == shared.chunk.tokens
    llm.expire_cache(shared)
    assert llm.list_caches(scope="shared").items == ()


def test_a_context_cache_of_another_model_is_refused(make_llm):
    (cache,) = make_llm().generate_context_cache(TEXTS[:1])
    other = tiny_model("llama")
    with torch.no_grad():
        next(other.parameters()).add_(0.01)
    llm = make_llm(prepare_model(other, loaded_model("llama").tokenizer))
    with pytest.raises(InvalidRequestError, match="another model") as caught:
        ask(llm, [cache])
    assert caught.value.code == "context_cache_model_mismatch"


def test_completions_take_text_ids_and_parts(make_llm):
    llm = make_llm()
    (cache,) = llm.generate_context_cache(TEXTS[:1], context="alone")
    ids = llm.tokenizer(TEXTS[0] + "!", add_special_tokens=False)["input_ids"]
    by_ids = llm.completion(ids, max_tokens=5, temperature=0)
    by_parts = llm.completion([cache, "!"], max_tokens=5, temperature=0, policy="naive")
    assert by_ids.token_ids == by_parts.token_ids
    assert by_parts.usage.cached_tokens == len(TEXTS[0])
    assert llm.completion("plain", max_tokens=2).usage.output_tokens == 2


def test_splits_join_to_the_text(make_llm):
    llm = make_llm()
    text = " ".join(TEXTS) + "\n\n" + " ".join(TEXTS)
    pieces = llm.split(text, method="sentence", max_tokens=50)
    assert "".join(pieces) == text
    assert len(pieces) == 6


def test_choices_are_seeded_one_after_another(make_llm):
    llm = make_llm()
    one = ask(llm, [], seed=3, temperature=5.0)
    again = ask(llm, [], seed=3, temperature=5.0)
    other = ask(llm, [], seed=4, temperature=5.0)
    assert one.token_ids == again.token_ids != other.token_ids


def test_bad_input_names_what_is_wrong(make_llm):
    llm = make_llm(kv_slots=200)
    with pytest.raises(PolicyError):
        ask(llm, [], policy="blend")
    with pytest.raises(ContextLengthError, match="split it into chunks"):
        llm.generate_context_cache(["x" * 300])
    with pytest.raises(InvalidRequestError, match="1 to"):
        llm.generate_context_cache([])
    with pytest.raises(InvalidRequestError, match="positive number"):
        llm.generate_context_cache(TEXTS, ttl=-1)
    with pytest.raises(InvalidRequestError, match="alone, bos, prefix"):
        llm.generate_context_cache(TEXTS, context="between")
    with pytest.raises(PolicyError):
        ask(llm, [], policy="")
    with pytest.raises(InvalidRequestError, match="image_url"):
        ask(llm, [{"type": "image_url", "image_url": "x"}])
    with pytest.raises(InvalidRequestError, match="mixes"):
        llm.completion([1, "x"])


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("ttl", {"ttl": float("inf")}),
        ("ttl", {"ttl": 1e300}),
        ("metadata.a", {"metadata": {"a": 1}}),
        ("name", {"name": 5}),
        ("pinned", {"pinned": "x"}),
        ("tenant", {"tenant": ""}),
    ],
)
def test_context_caches_that_http_cannot_show_are_refused(make_llm, param, options):
    llm = make_llm()
    (cache,) = llm.generate_context_cache("a")
    calls = [lambda: llm.generate_context_cache(["a"], **options)]
    if param != "tenant":
        calls.append(lambda: llm.update_cache(cache, **options))
    for call in calls:
        with pytest.raises(InvalidRequestError, match="must be") as refused:
            call()
        assert refused.value.param == param
    assert llm.list_caches().items == (cache,)


def test_calls_without_what_they_need_name_it(make_llm):
    llm = make_llm()
    hi = [{"role": "user", "content": "Hi"}]
    calls = {
        "chunks": lambda: llm.generate_context_cache(None),
        "chunks.0": lambda: llm.generate_context_cache([5]),
        "text": lambda: llm.split(5),
        "messages": lambda: llm.chat_completion(None),
        "tools": lambda: llm.chat_completion(hi, tools=5),
        "documents": lambda: llm.chat_completion(hi, documents=5),
        "link.policy": lambda: llm.chat_completion(hi, policy=5),
        "grammar": lambda: llm.chat_completion(hi, grammar=5),
        "ttl": lambda: llm.chat_completion(hi, keep="answer", ttl=float("inf")),
        "limit": lambda: llm.list_caches(limit=0),
        "order": lambda: llm.list_caches(order="up"),
        "cache": lambda: llm.expire_cache(5),
        "metadata": lambda: llm.expire_caches(5),
        "metadata.a": lambda: llm.list_caches(metadata={"a": 1}),
        "query": lambda: llm.search(5),
    }
    for param, call in calls.items():
        with pytest.raises(InvalidRequestError, match="must be") as refused:
            call()
        assert refused.value.param == param
    with pytest.raises(InvalidRequestError, match="'limit' is -1"):
        llm.search("x", limit=-1)


def test_a_closed_llm_says_so(make_llm):
    llm = make_llm()
    llm.close()
    for call in (llm.generate_context_cache, llm.completion):
        with pytest.raises(EngineClosedError):
            call("a")
    for part in ("agents", "building"):  # which would be made now
        with pytest.raises(EngineClosedError):
            getattr(llm, part)
    llm.close()


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ModelLoadError, match="/no/such/model"):
        LLM("/no/such/model")


def test_the_model_in_the_box_answers(tmp_path):
    with LLM(state_dir=tmp_path, kv_slots=2048) as llm:
        caches = llm.generate_context_cache(
            ["Mira Holt lives in Varna. She works as a baker.\n\n", "Tom Reyes lives in Oslo.\n\n"]
        )
        answer = llm.chat_completion(
            [
                {
                    "role": "user",
                    "content": [caches[1], caches[0], "Question: Where does Tom Reyes live?"],
                }
            ],
            max_tokens=8,
            temperature=0,
        )
        assert answer.usage.cached_tokens > 0
        assert answer.finish_reason == "stop"


def test_the_model_in_the_box_answers_in_a_form_and_calls_a_tool(tmp_path):
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    told = {
        "name": "get_time",
        "description": "Tells what time it is in a city.",
        "parameters": city,
    }
    tools = [{"type": "function", "function": told}]
    with LLM(state_dir=tmp_path) as llm:
        caches = llm.generate_context_cache(["Tom Reyes lives in Oslo. He plays the cello.\n\n"])
        asked = [{"role": "user", "content": [*caches, "Question: Where does Tom Reyes live?"]}]
        answer = llm.chat_completion(asked, response_format=form, max_tokens=40, temperature=0)
        assert answer.text == '{"answer": "Oslo"}'

        asked = [{"role": "user", "content": "What time is it in Oslo?"}]
        (call,) = llm.chat_completion(asked, tools=tools, max_tokens=60, temperature=0).tool_calls
        assert (call.name, json.loads(call.arguments)) == ("get_time", {"city": "Oslo"})
        function = {"name": call.name, "arguments": call.arguments}
        asked += [
            {
                "role": "assistant",
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": '{"time": 14}'},
        ]
        assert llm.chat_completion(asked, tools=tools, max_tokens=8, temperature=0).text == "14"


def test_it_says_what_it_is(tmp_path):
    with LLM(state_dir=tmp_path, policy="legolink-4") as llm:
        llm.generate_context_cache(["Tom Reyes lives in Oslo.\n\n", "He is a pilot.\n\n"])
        told = "LLM('reader', engine='embedded', policy='legolink-4', context_caches=2)"
        assert repr(llm) == told
        assert repr(AsyncLLM.from_llm(llm)) == f"Async{told}"
    assert repr(llm) == "LLM('reader', engine='embedded', closed)"


def test_a_policy_need_not_be_registered(make_llm):
    class Everything(Policy):
        """All tokens that are not exact."""

        family = "everything"

        def select(self, prompt, evidence):
            return prompt.inexact

    llm = make_llm()
    caches = llm.generate_context_cache(TEXTS)
    assert (
        ask(llm, caches, policy=Everything()).usage == ask(llm, caches, policy="random-100").usage
    )
    assert (
        llm.explain([{"role": "user", "content": [*caches, "?"]}], policy=Everything()).policy
        == "everything"
    )


@pytest.mark.parametrize("most", [0, 4])
def test_variants_are_looked_up_only_where_some_may_be_kept(make_llm, monkeypatch, most):
    find, asked = VariantIndex.find, []

    def noted(index, owner):
        asked.append(owner)
        return find(index, owner)

    monkeypatch.setattr(VariantIndex, "find", noted)
    llm = make_llm(max_variants=most)
    ask(llm, llm.generate_context_cache(TEXTS), policy="cachecraft-1")
    assert bool(asked) == bool(most)


def test_context_caches_are_listed_changed_and_deleted_by_metadata(make_llm):
    llm = make_llm(tenant_quota_caches=3)
    first, second = llm.generate_context_cache(TEXTS[:2], metadata={"fruit": "yes"}, pinned=True)
    assert first.pinned
    assert llm.list_caches(limit=1, order="asc", metadata={"fruit": "yes"}) == ((first,), True)
    assert llm.list_caches(after=first, order="asc").items == (second,)
    before = time.time()
    changed = llm.update_cache(first, ttl=60, pinned=False, name="plums")
    assert (changed.pinned, changed.name) == (False, "plums")
    assert before + 60 <= changed.expires_at <= time.time() + 60
    assert llm.update_cache(first.id, ttl=None).expires_at is None
    with pytest.raises(InvalidRequestError, match="'ttl' is -1"):
        llm.update_cache(first, ttl=-1)
    with pytest.raises(QuotaExceededError, match="quota of 3 context caches"):
        llm.generate_context_cache(TEXTS)
    assert llm.caches_usage().kept.caches == 2
    with pytest.raises(InvalidRequestError, match="at least one pair"):
        llm.expire_caches({})
    assert llm.expire_caches({"fruit": "yes"}) == 2
    assert llm.caches_usage().kept == TenantUsage()


def test_shared_context_caches_are_every_tenants(make_llm):
    llm = make_llm()
    (shared,) = llm.generate_context_cache(TEXTS[:1], scope="shared", tenant="anna")
    answers = {tenant: ask(llm, [shared], tenant=tenant).token_ids for tenant in ("anna", "bert")}
    assert answers["anna"] == answers["bert"]
    assert llm.list_caches(scope="shared", tenant="bert").items == (shared,)
    assert llm.list_caches(tenant="anna").items == ()
    with pytest.raises(InvalidRequestError, match="cannot be called 'shared'"):
        llm.generate_context_cache(TEXTS, tenant="shared")
    with pytest.raises(InvalidRequestError, match="Unknown scope"):
        llm.generate_context_cache(TEXTS, scope="public")


def test_a_string_is_one_chunk(make_llm):
    llm = make_llm()
    (cache,) = llm.generate_context_cache(TEXTS[0])
    assert cache.tokens == llm.generate_context_cache(TEXTS[:1])[0].tokens


def test_long_calls_show_a_bar_where_it_is_asked_for(make_llm, monkeypatch):
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, force_jupyter=False, width=80)
    path = "kvlinker.llm.Console"
    monkeypatch.setattr(path, lambda **_: console)
    with make_llm() as llm:
        llm.generate_context_cache(["One.", "Two."])
        assert shown.getvalue() == "", "in notebooks alone"
        llm.generate_context_cache(["Three.", "Four.", "Five."], progress=True)
        assert "caching chunks" in shown.getvalue()
        assert "3/3" in shown.getvalue()
