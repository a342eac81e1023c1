"""Texts become chunks on the way: marked parts and documents, over HTTP on the real engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import TEMPLATE, Served, serving, tiny_model, tiny_settings

CHAT = "/v1/chat/completions"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
QUESTION = "\nWhere is the cat?"
TEMPLATE_WITH_DOCUMENTS = (
    "{% for d in documents or [] %}[{{ d.title }}|{{ d.source }}|{{ d.text }}]{% endfor %}"
    + TEMPLATE
)


def text(name: str, words: int = 40) -> str:
    """A text of its own, of so many words of five letters."""
    return " ".join(f"{name}{number:03d}" for number in range(words))


def part(text: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, **(mark or {})}


def body(*parts: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    called = turns(*parts) if role == "tool" else [{"role": role, "content": list(parts)}]
    messages = [*called, {"role": "user", "content": QUESTION}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def turns(*parts: Any, call_id: str = "c1") -> list[dict[str, Any]]:
    """A call of a tool, and its result, of these parts."""
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "look", "arguments": '{"at": "cats"}'},
    }
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": list(parts)},
    ]


def ask(
    served: Served, *parts: Any, headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    answer = served.post(CHAT, body(*parts, **fields), headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def created(answer: dict[str, Any]) -> list[bool]:
    return [cache["created"] for cache in answer["link"]["context_caches"]]


def ids(answer: dict[str, Any]) -> list[str]:
    return [cache["id"] for cache in answer["link"]["context_caches"]]


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def server(folder: Path, **options: Any) -> Any:
    settings = tiny_settings(folder, **{"prefix_cache": "on"} | options)
    return serving(LLM.from_model(tiny_model(), settings), settings)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without prefix reuse, so that what is cached comes from chunks."""
    with server(tmp_path_factory.mktemp("state"), prefix_cache="off") as running:
        yield running


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with prefix reuse."""
    with server(tmp_path_factory.mktemp("state")) as running:
        yield running


MARKS = [EPHEMERAL, BREAKPOINT, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]


def test_marked_parts_are_found_by_content_in_any_order(
    apart: Served, subtests: pytest.Subtests
) -> None:
    for role, mark in product(("user", "system", "tool", "assistant"), MARKS):
        with subtests.test(role, mark=mark):
            a, b = text(f"{role[0]}a{len(str(mark))}"), text(f"{role[0]}b{len(str(mark))}")
            first = ask(apart, part(a, mark), part(b, mark), role=role)
            second = ask(apart, part("Listen: "), part(b, mark), part(a, mark), role=role)
            assert created(first) == [True, True]
            assert created(second) == [False, False]
            assert ids(second) == ids(first)[::-1], "in the order of the prompt"
            sizes = [apart.post("/tokenize", {"text": each}).json()["count"] for each in (a, b)]
            assert [cache["tokens"] for cache in first["link"]["context_caches"]] == sizes
            assert first["link"]["policy"] == "legolink-4"
            assert cached(first) == 0, "this request computed it"
            assert cached(second) > sum(sizes) - 20


def test_marks_answer_as_ids_do(apart: Served) -> None:
    a, b = text("ia"), text("ib")
    marked = ask(apart, part(a, EPHEMERAL), part(b, EPHEMERAL))
    named = ask(apart, *({"type": "context_cache", "id": each} for each in ids(marked)))
    assert marked["choices"][0]["message"] == named["choices"][0]["message"]
    assert marked["usage"]["prompt_tokens"] == named["usage"]["prompt_tokens"]
    assert (cached(marked), cached(named) > 100) == (0, True)
    assert ids(named) == ids(marked)
    assert created(named) == [False, False]


def test_a_context_cache_that_was_created_by_name_is_found(apart: Served) -> None:
    a = text("na")
    (cache_id,) = apart.cache(a)
    assert ids(ask(apart, part(a, EPHEMERAL))) == [cache_id]
    assert apart.get(f"/v1/context_caches/{cache_id}").json()["implicit"] is False


def test_without_marks_nothing_becomes_a_chunk(apart: Served) -> None:
    answer = ask(apart, part(text("pl")), part(text("pm")))
    assert "link" not in answer
    assert cached(answer) == 0


def test_documents_become_chunks(apart: Served) -> None:
    a, b = text("da"), text("db")
    first = ask(apart, part("Think."), documents=[{"text": a, "title": "One"}, {"text": b}])
    second = ask(apart, part("Think."), documents=[{"text": b}, {"text": a, "title": "One"}])
    assert (created(first), created(second)) == ([True, True], [False, False])
    assert cached(second) > len(a)
    plain = ask(apart, part(f"One\n{a}\n\n{b}\n\nThink."))
    assert plain["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


def test_documents_without_a_user_are_refused(apart: Served) -> None:
    asked = {"messages": [{"role": "system", "content": "Hi"}], "documents": [{"text": "a"}]}
    answer = apart.post(CHAT, asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")


def test_documents_stand_where_the_template_puts_them(tmp_path: Path) -> None:
    a = text("ta")
    documents = [{"text": a, "title": "One", "source": "web"}]
    with server(tmp_path, chat_template=TEMPLATE_WITH_DOCUMENTS) as served:
        tokens = {}
        for implicit in ("marked", "off"):
            asked = body(part("Think."), documents=documents, link={"implicit": implicit})
            tokens[implicit] = served.post(CHAT, asked).json()["usage"]["prompt_tokens"]
        messages = {"messages": body(part("Think."))["messages"], "documents": documents}
        ids = served.post("/tokenize", messages).json()["tokens"]
    assert tokens["marked"] == tokens["off"] == len(ids)
    assert served.llm.tokenizer.decode(ids).startswith(f"[One|web|{a}]")


def test_completions_take_marks(apart: Served) -> None:
    a = text("ca")
    asked = {"prompt": [part("Read: "), part(a, EPHEMERAL), part("\nSo")], "max_tokens": 2}
    first, second = (apart.post("/v1/completions", asked).json() for _ in range(2))
    assert (created(first), created(second)) == ([True], [False])
    assert cached(second) > 0


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_streams_tell_of_the_link_once(apart: Served, path: str) -> None:
    a = text(f"s{len(path)}")
    asked: dict[str, Any] = {"max_tokens": 3, "stream": True, "ignore_eos": True}
    asked |= (
        {"prompt": [part(a, EPHEMERAL)]}
        if path != CHAT
        else {"messages": body(part(a, EPHEMERAL))["messages"]}
    )
    events = [
        line[6:] for line in apart.post(path, asked).text.splitlines() if line.startswith("data: {")
    ]
    links = [chunk["link"] for event in events if "link" in (chunk := json.loads(event))]
    assert "link" in json.loads(events[0])
    assert [[cache["created"] for cache in link["context_caches"]] for link in links] == [[True]]


@pytest.mark.parametrize(
    ("mark", "param"),
    [
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": "30h"}}, "cache_control.ttl"),
        ({"prompt_cache_breakpoint": {"mode": "auto"}}, "prompt_cache_breakpoint.mode"),
    ],
)
def test_marks_of_other_forms_are_refused(apart: Served, mark: dict[str, Any], param: str) -> None:
    answer = apart.post(CHAT, body(part("a", mark)))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages.0.content.0.{param}"


def test_an_empty_part_is_no_chunk(apart: Served) -> None:
    assert "link" not in ask(apart, part("", EPHEMERAL), part("Hi"))


LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["cats", "dogs"]}},
            "required": ["at"],
        }
        | {"additionalProperties": False},
    },
}
FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "seen",
        "schema": {
            "type": "object",
            "properties": {"cats": {"type": "boolean"}},
            "required": ["cats"],
        }
        | {"additionalProperties": False},
    },
}
TEMPLATE_WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    + TEMPLATE_WITH_DOCUMENTS.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function |"
        " tojson }}{% endfor %}{{ message.tool_call_id }}",
    )
)


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE_WITH_TOOLS])
def test_results_of_tools_are_chunks_beside_documents_and_forms(
    tmp_path: Path, template: str
) -> None:
    """Whether the chat template shows tools and documents or not."""
    a, b = text("ra"), text("rb")
    asked: dict[str, Any] = {
        "tools": [LOOK],
        "documents": [{"text": b}],
        "response_format": FORM,
        "tool_choice": "none",
    }
    with server(tmp_path, chat_template=template, prefix_cache="off") as served:
        first, second = (
            ask(served, part(a, EPHEMERAL), role="tool", max_tokens=100, **asked) for _ in range(2)
        )
        plain = ask(served, part(a), role="tool", max_tokens=100, link={"implicit": "off"}, **asked)
    assert (created(first), created(second)) == ([True, True], [False, False])
    assert "link" not in plain
    assert first["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert cached(second) > len(a)
    for answer in (first, second, plain):
        assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"cats"}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_follow_marked_results(apart: Served, stream: bool) -> None:
    """Both the chunks and the call are told, in one piece or in a stream."""
    a = text(f"rc{stream:d}")
    fields = {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "look"}}}
    asked = body(part(a, EPHEMERAL), role="tool", **fields) | {"max_tokens": 200, "stream": stream}
    answer = apart.post(CHAT, asked)
    assert answer.status_code == 200, answer.text
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    told = chunks if stream else [answer.json()]
    said = [chunk["choices"][0]["delta" if stream else "message"] for chunk in told]
    calls = [call["function"] for piece in said for call in piece.get("tool_calls") or ()]
    assert [call["name"] for call in calls if call.get("name")] == ["look"]
    arguments = "".join(call.get("arguments") or "" for call in calls)
    assert json.loads(arguments)["at"] in ("cats", "dogs")
    assert told[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [created(chunk) for chunk in told if "link" in chunk] == [[True]]


def test_results_of_tools_are_recognised(apart: Served) -> None:
    a = lines("result")
    fields: dict[str, Any] = {"max_tokens": 4, "tools": [LOOK], **AUTO}
    answers = []
    for number in range(3):
        messages = turns(part(f"Found {number}:\n{a}"), call_id=f"c{number}")
        answer = apart.post(CHAT, {"messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
    assert ["link" in answer for answer in answers] == [False, True, True]
    assert [created(answer) for answer in answers[1:]] == [[True], [False]]
    assert cached(answers[2]) > 0.8 * answers[2]["link"]["context_caches"][0]["tokens"]


def test_an_echo_says_marked_texts_as_they_are(apart: Served) -> None:
    a = text("ea")
    asked = {"prompt": [part("Read: "), part(a, EPHEMERAL)], "max_tokens": 0, "echo": True}
    assert apart.post("/v1/completions", asked).json()["choices"][0]["text"] == f"Read: {a}"


def test_implicit_off(apart: Served) -> None:
    answer = ask(
        apart,
        part(text("of"), EPHEMERAL),
        documents=[{"text": text("og")}],
        link={"implicit": "off"},
    )
    assert "link" not in answer
    assert apart.post(CHAT, body(part("a"), link={"implicit": "some"})).status_code == 400


def test_what_is_marked_lives_on_with_every_use(tmp_path: Path) -> None:
    a, b, short = text("la"), text("lb"), {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    with server(tmp_path, implicit_ttl=2000) as served:
        begun = time.time()
        long_id, short_id = ids(ask(served, part(a, EPHEMERAL), part(b, short)))

        def life(cache_id: str) -> float:
            expires: float = served.get(f"/v1/context_caches/{cache_id}").json()["expires_at"]
            return expires - begun

        assert life(long_id) == pytest.approx(2000, abs=20)
        assert life(short_id) == pytest.approx(300, abs=20)
        catalog = served.llm.catalog
        with catalog._database.transaction() as connection:  # as if time had passed
            connection.execute("UPDATE context_caches SET expires_at = expires_at - 200")
        ask(served, part(a, EPHEMERAL), part(b, short))
        assert life(long_id) == pytest.approx(2000, abs=20)
        assert life(short_id) == pytest.approx(300, abs=20)
        ask(served, part(b, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}))
        assert life(short_id) == pytest.approx(3600, abs=20)
        changed = served.http.patch(f"/v1/context_caches/{short_id}", json={"ttl": 60}).json()
        assert changed["implicit"] is False
        ask(served, part(b, EPHEMERAL))
        assert life(short_id) == pytest.approx(60, abs=20), "who sets a time has it"


def test_the_quota_never_makes_a_request_fail(tmp_path: Path) -> None:
    with server(tmp_path, tenant_quota_caches=2) as served:
        served.cache(text("qa"))
        first = ask(served, part(text("qb"), EPHEMERAL), part(text("qc"), EPHEMERAL))
        assert created(first) == [True], "the other is text"
        second = ask(served, part(text("qd"), EPHEMERAL))
        assert created(second) == [True], "the one that was used longest ago makes room"
        assert served.get(f"/v1/context_caches/{ids(first)[0]}").status_code == 404
        refused = served.post("/v1/context_caches", {"chunks": [text("qx"), text("qy")]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota_exceeded")
        assert served.get(f"/v1/context_caches/{ids(second)[0]}").status_code == 200, (
            "nothing goes for what cannot fit"
        )
        served.cache(text("qe"))
        assert served.get(f"/v1/context_caches/{ids(second)[0]}").status_code == 404, (
            "names come first"
        )
        third = ask(served, part(text("qf"), EPHEMERAL))
        assert "link" not in third
        assert served.post("/v1/context_caches", {"chunks": ["a"]}).status_code == 403


def test_a_tenant_has_so_many_implicit_ones(tmp_path: Path) -> None:
    with server(tmp_path, implicit_caches=3) as served:
        named = served.cache(*(text(f"e{number}") for number in range(5)))
        for number in range(6):
            ask(served, part(text(f"m{number}"), EPHEMERAL))
        kept = served.get("/v1/context_caches").json()["data"]
        assert [each["implicit"] for each in kept] == [True] * 3 + [False] * 5
        assert {each["id"] for each in kept[3:]} == set(named)
        assert all(each["tier"] for each in kept[3:]), "their KV is there, too"


def test_one_computation_for_all_who_bring_the_same_text(tmp_path: Path) -> None:
    a = text("pa", words=150)
    with server(tmp_path, prefix_cache="off") as served:
        builder = served.llm.engine._chunks
        computed: list[str] = []
        put = served.llm.store.put

        def counted(key: str, kv: Any) -> Any:
            computed.append(key)
            return put(key, kv)

        builder._store.put = counted
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda _: ask(served, part(a, EPHEMERAL)), range(6)))
        assert len({each for answer in answers for each in ids(answer)}) == 1
        assert sum(sum(created(answer)) for answer in answers) == 1
        assert len(computed) == 1
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_chunks_bear_no_traces_of_the_prompt_they_came_in(tmp_path: Path) -> None:
    """An implicit chunk's KV is the same bits as that of one which was created by name, whatever
    stood before it."""
    import torch

    a = text("ha")
    kvs = []
    for folder, before in (("one", "A secret about Anna."), ("two", "Something else entirely.")):
        with server(tmp_path / folder) as served:
            (cache_id,) = ids(ask(served, part(before), part(a, EPHEMERAL)))
            cache = served.llm.caches.get(cache_id, tenant="default")
            kvs.append(served.llm.store.get(cache.chunk_key))
            assert cache.chunk.prefix == served.llm.builder.prefix, (
                "the header, not the conversation"
            )
    with server(tmp_path / "three") as served:
        (cache_id,) = served.cache(a)
        kvs.append(
            served.llm.store.get(served.llm.caches.get(cache_id, tenant="default").chunk_key)
        )
    for kv in kvs[1:]:
        assert kv is not None
        for mine, theirs in zip(kvs[0].layers, kv.layers, strict=True):
            assert torch.equal(mine.key, theirs.key)
            assert torch.equal(mine.value, theirs.value)


def test_tenants_share_nothing(keyed: Served) -> None:
    a = text("xa")
    alpha, beta = ({"Authorization": f"Bearer key-{name}"} for name in ("alpha", "beta"))
    first = ask(keyed, part(a, EPHEMERAL), headers=alpha)
    second = ask(keyed, part(a, EPHEMERAL), headers=beta)
    assert (created(first), created(second)) == ([True], [True])
    assert set(ids(first)).isdisjoint(ids(second))
    caches = keyed.llm.catalog
    from kvlinker.base.types.tenants import tenant_of_key

    keys = {name: caches.keys_of(tenant_of_key(f"key-{name}")) for name in ("alpha", "beta")}
    assert keys["alpha"].isdisjoint(keys["beta"])
    assert keyed.get(f"/v1/context_caches/{ids(first)[0]}", headers=beta).status_code == 404


def test_a_policy_for_what_nobody_named(tmp_path: Path) -> None:
    a = text("fa")
    with server(tmp_path, implicit_policy="naive") as served:
        unnamed = ask(served, part(a, EPHEMERAL))
        assert unnamed["link"]["policy"] == "naive"
        (cache_id,) = ids(unnamed)
        named = ask(served, {"type": "context_cache", "id": cache_id}, part(text("fb"), EPHEMERAL))
        assert named["link"]["policy"] == "legolink-4"
        chosen = ask(served, part(a, EPHEMERAL), link={"policy": "legolink-8"})
        assert chosen["link"]["policy"] == "legolink-8"


def test_full_keeps_answers_exact_and_reuses_what_begins_alike(tmp_path: Path) -> None:
    a, b = text("ga"), text("gb")
    with server(tmp_path, implicit_policy="full") as served:
        plain = ask(served, part(a), part(b), link={"implicit": "off"})
        marked = ask(served, part(a, EPHEMERAL), part(b, EPHEMERAL))
        assert "link" not in marked
        assert marked["choices"] == plain["choices"]
        details = marked["usage"]["prompt_tokens_details"]
        assert details["exact_cached_tokens"] == details["cached_tokens"] > len(a)
        assert served.get("/v1/context_caches").json()["data"] == []


def test_tokenize_and_explain_see_what_an_answer_does(apart: Served) -> None:
    a = text("ka")
    asked = body(part("Listen: "), part(a, EPHEMERAL))["messages"]
    before = apart.get("/v1/context_caches/usage").json()["caches"]
    count = apart.post("/tokenize", {"messages": asked}).json()["count"]
    assert apart.get("/v1/context_caches/usage").json()["caches"] == before, "nothing is entered"
    explained = apart.post("/v1/link/explain", {"messages": asked}).json()
    answer = ask(apart, part("Listen: "), part(a, EPHEMERAL))
    assert count == explained["tokens"] == answer["usage"]["prompt_tokens"]
    (chunk,) = (segment for segment in explained["segments"] if segment["type"] == "chunk")
    assert [chunk["context_cache"]] == ids(answer)


def test_tokenize_heeds_how_a_request_links(apart: Served) -> None:
    """Where a chunk ends, tokens are cut that a text as a whole has in one."""
    words = "the cat and the dog " * 12
    cut = words.rindex("the") + 1
    seam: Any = [part(words[:cut], EPHEMERAL), part(words[cut:])]
    asked = {"messages": [{"role": "user", "content": seam}]}

    def tokens(**link: Any) -> Any:
        return apart.post("/tokenize", asked | {"link": link}).json()["tokens"]

    assert tokens(implicit="off") == tokens(policy="full") != tokens(implicit="marked") == tokens()
    refused = apart.post("/tokenize", asked | {"link": {"policy": "no"}})
    assert refused.json()["error"]["code"] == "invalid_policy"


def test_a_template_that_drops_a_marked_text_answers_all_the_same(tmp_path: Path) -> None:
    template = "{{ messages[-1]['content'] }}"
    with server(tmp_path, chat_template=template) as served:
        answer = ask(served, part(text("va"), EPHEMERAL))
        assert "link" not in answer
        assert (
            answer["usage"]["prompt_tokens"]
            == served.post("/tokenize", {"text": QUESTION}).json()["count"]
        )


def test_python_says_the_same(apart: Served) -> None:
    a = text("ya")
    messages = [{"role": "user", "content": [{"type": "text", "text": a, **EPHEMERAL}, QUESTION]}]
    first = apart.llm.chat_completion(messages, documents=[{"text": text("yb")}], max_tokens=2)
    second = apart.llm.chat_completion(messages, max_tokens=2)
    assert [each.created for each in first.context_caches] == [True, True]
    assert [each.created for each in second.context_caches] == [False]
    assert second.usage.cached_tokens > 0
    assert apart.llm.chat_completion(messages, implicit="off", max_tokens=2).context_caches == ()


AUTO: dict[str, Any] = {"link": {"implicit": "auto"}}


def lines(name: str) -> str:
    return "\n".join(
        f"Line {number} of document {name}, as it is retrieved." for number in range(8)
    )


def joined(*documents: str, question: str = "Who?") -> str:
    return "Use the context:\n\n" + "\n\n".join(documents) + f"\n\nQuestion: {question}"


def test_unmarked_texts_become_chunks_at_their_second_sight(apart: Served) -> None:
    a, b, c = (lines(f"auto-{name}") for name in "abc")
    first = ask(apart, part(joined(a, b, c)), **AUTO)
    second = ask(apart, part(joined(c, b, a)), **AUTO)
    third = ask(apart, part(joined(b, c, a)), role="tool", **AUTO)
    assert "link" not in first
    assert created(second) == [True] * 3
    assert created(third) == [False] * 3
    assert [ids(second)[index] for index in (1, 0, 2)] == ids(third)
    assert cached(third) > 0.8 * sum(cache["tokens"] for cache in third["link"]["context_caches"])
    assert "link" not in ask(apart, part(joined(c, a, b))), "only where it is asked for"


def test_known_texts_are_recognised_inside_strings(apart: Served) -> None:
    a = text("known")
    (cache_id,) = apart.cache(a)
    asked = {
        "messages": [{"role": "user", "content": f"Read this: {a}\nWho?"}],
        "max_tokens": 2,
        **AUTO,
    }
    answer = apart.post(CHAT, asked).json()
    assert (ids(answer), created(answer)) == ([cache_id], [False])
    prompt = {"prompt": f"Read this: {a}\nWho?", "max_tokens": 2, **AUTO}
    assert ids(apart.post("/v1/completions", prompt).json()) == [cache_id]


def test_known_texts_are_shrunk_to_the_tokens_that_they_have_in_a_prompt(apart: Served) -> None:
    """A space before it is in one token with its first word, and one at its end with the word
    behind it."""
    import torch

    a = text("shrunk") + " "
    (whole,) = apart.cache(a)
    asked = {
        "messages": [{"role": "user", "content": f"Read this: {a}sat. Who?"}],
        "max_tokens": 2,
    }
    plain = apart.post(CHAT, asked).json()
    answers = [apart.post(CHAT, asked | AUTO).json() for _ in range(2)]
    assert [created(answer) for answer in answers] == [[True], [False]]
    assert len({answer["usage"]["prompt_tokens"] for answer in (plain, *answers)}) == 1
    (cache_id,) = ids(answers[0])
    tokens = answers[0]["link"]["context_caches"][0]["tokens"]
    assert cache_id != whole
    assert cached(answers[0]) > 0.9 * tokens, "nothing of it was computed"
    kvs = [
        apart.llm.store.get(apart.llm.caches.get(each, tenant="default").chunk_key)
        for each in (whole, cache_id)
    ]
    assert kvs[0] is not None
    assert kvs[1] is not None
    assert (kvs[0].tokens, kvs[1].tokens) == (tokens + 2, tokens)
    for one, other in zip(kvs[0].layers, kvs[1].layers, strict=True):
        assert torch.equal(one.value[:, 1:-1], other.value)


def test_a_conversation_that_goes_on_makes_no_chunks(talking: Served) -> None:
    turns: list[dict[str, str]] = []
    for turn in range(3):
        turns.append({"role": "user", "content": lines(f"turn-{turn}")})
        asked = {"messages": turns, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **AUTO}
        answer = talking.post(CHAT, asked).json()
        assert "link" not in answer
        if turn:
            assert answer["usage"]["prompt_tokens_details"]["exact_cached_tokens"] > 0
        turns.append(answer["choices"][0]["message"])
        turns[-1] = {name: turns[-1][name] for name in ("role", "content")}


def test_other_tenants_texts_are_not_recognised(keyed: Served) -> None:
    a = lines("of-a-tenant")
    alpha, beta = ({"Authorization": f"Bearer key-{name}"} for name in ("alpha", "beta"))
    for question in ("Who?", "Why?", "Where?"):
        told = ask(keyed, part(f"{question}\n{joined(a)}"), headers=alpha, **AUTO)
    assert created(told) == [False]
    assert "link" not in ask(keyed, part(joined(a)), headers=beta, **AUTO)


def test_recognised_chunks_bear_no_traces_either(tmp_path: Path) -> None:
    """What was joined with other texts is computed alone, as if it had been created by name."""
    import torch

    a, kvs = lines("hb"), []
    with server(tmp_path / "one") as served:
        ask(served, part(joined("A secret about Anna.", a)), **AUTO)
        told = ask(served, part(joined(a, "Something else entirely.")), **AUTO)
        kvs.append(
            served.llm.store.get(served.llm.caches.get(ids(told)[0], tenant="default").chunk_key)
        )
    with server(tmp_path / "two") as served:
        (cache_id,) = served.cache(a)
        kvs.append(
            served.llm.store.get(served.llm.caches.get(cache_id, tenant="default").chunk_key)
        )
    mine, theirs = kvs
    assert mine is not None
    assert theirs is not None
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        assert torch.equal(one.key, other.key)
        assert torch.equal(one.value, other.value)


def test_a_prompt_that_is_asked_again_is_reused_as_it_was_computed(talking: Served) -> None:
    asked = joined(*(lines(f"again-{name}") for name in "ab"))
    answers = [ask(talking, part(asked), **AUTO) for _ in range(3)]
    for answer in answers:
        assert "link" not in answer
        assert answer["choices"] == answers[0]["choices"]
    details = answers[2]["usage"]["prompt_tokens_details"]
    assert details["exact_cached_tokens"] == answers[2]["usage"]["prompt_tokens"] - 1


def test_what_a_request_computes_is_not_counted_as_cached(apart: Served) -> None:
    a, b = text("nc"), text("nd")
    first = ask(apart, part(a, EPHEMERAL), part(a, EPHEMERAL), link={"policy": "naive"})
    size = first["link"]["context_caches"][0]["tokens"]
    assert cached(first) == size, "the second place is linked with what the first one needed"
    mixed = ask(apart, part(b, EPHEMERAL), part(a, EPHEMERAL), link={"policy": "naive"})
    assert cached(mixed) == size
    again = ask(apart, part(b, EPHEMERAL), part(a, EPHEMERAL), link={"policy": "naive"})
    assert cached(again) == size + mixed["link"]["context_caches"][0]["tokens"]
    assert again["usage"]["prompt_tokens"] == mixed["usage"]["prompt_tokens"]


def test_what_was_evicted_is_counted_as_fresh(apart: Served) -> None:
    a = text("ne")
    (cache_id,) = apart.cache(a)
    named = {"type": "context_cache", "id": cache_id}
    key = apart.llm.caches.get(cache_id, tenant="default").chunk_key
    apart.llm.store.delete(key)
    assert cached(ask(apart, named)) == 0
    assert cached(ask(apart, named)) > 0


def test_metrics_tell_of_texts_and_of_what_they_take_up(tmp_path: Path) -> None:
    def figures(served: Served) -> dict[str, float]:
        shown = (
            line.rsplit(" ", 1)
            for line in served.get("/metrics").text.splitlines()
            if line.startswith("kvlinker:implicit")
        )
        return {
            name.removeprefix("kvlinker:implicit_"): float(value)
            for name, value in shown
            if "_created" not in name
        }

    with server(tmp_path, implicit_caches=2) as served:
        assert set(figures(served).values()) == {0.0}
        a, b = text("ma"), lines("metrics")
        ask(served, part(a, EPHEMERAL))
        ask(
            served,
            part("Listen."),
            part(a, EPHEMERAL),
            documents=[{"text": a}, {"text": text("mb")}],
        )
        ask(served, part(b), **AUTO)
        found = ask(served, part(f"Hm.\n{b}"), part(a, EPHEMERAL), **AUTO)
        told = figures(served)
        tokens = sum(cache["tokens"] for cache in found["link"]["context_caches"])
        assert told["bytes"] == tokens * served.llm.engine.kv_bytes_per_token
    assert told["caches"] == 2
    assert told["evictions_total"] == 1
    assert {name: value for name, value in told.items() if name.startswith("texts") and value} == {
        'texts_total{result="created",source="mark"}': 1,
        'texts_total{result="hit",source="mark"}': 1,
        'texts_total{result="created",source="document"}': 1,
        'texts_total{result="created",source="recognition"}': 1,
        'texts_total{result="hit",source="document"}': 1,
    }


def test_search_leaves_them_out(apart: Served) -> None:
    a, search = "Aardvarks dig. " + text("sa"), "/v1/context_caches/search"
    (cache_id,) = ids(ask(apart, part(a, EPHEMERAL)))
    apart.llm.caches.sweep()
    assert apart.post(search, {"query": "aardvarks"}).json()["data"] == []
    apart.http.patch(f"/v1/context_caches/{cache_id}", json={"ttl": 60})
    apart.llm.caches.sweep()
    assert [hit["id"] for hit in apart.post(search, {"query": "aardvarks"}).json()["data"]] == [
        cache_id
    ]


def test_auto_may_be_the_servers_setting(tmp_path: Path) -> None:
    a, b = lines("set-a"), lines("set-b")
    with server(tmp_path, implicit="auto") as served:
        ask(served, part(joined(a, b)))
        assert created(ask(served, part(joined(b, a)))) == [True, True]
        for name in "cdefgh":
            ask(served, part(joined(lines(f"churn-{name}"))))
        assert len(served.get("/v1/context_caches").json()["data"]) == 2, (
            "what is seen once is not kept"
        )
        ask(served, part("Hi"), link={"implicit": "marked"})
        count = served.post("/tokenize", {"messages": body(part(joined(a, b)))["messages"]}).json()[
            "count"
        ]
        assert count == ask(served, part(joined(a, b)))["usage"]["prompt_tokens"]
    with server(tmp_path, implicit="auto") as served:
        told = ask(served, part(joined(b, a)))
        assert created(told) == [False, False], "they are known after a restart"


def test_documents_in_any_order_are_reused_as_they_were_linked(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, prefix_cache="on")
    documents = [{"text": text(name)} for name in ("aa", "bb", "cc")]
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        first = ask(served, documents=documents, link={"order": "any"})
        ids = [each["id"] for each in first["link"]["context_caches"]]
        again = ask(served, documents=documents[::-1], link={"order": "any"})
        assert [each["id"] for each in again["link"]["context_caches"]] == ids
        assert again["usage"]["prompt_tokens_details"]["recomputed_tokens"] == 0
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        given = ask(served, documents=documents[::-1])
        assert [each["id"] for each in given["link"]["context_caches"]] == ids[::-1]
        assert given["usage"]["prompt_tokens_details"]["recomputed_tokens"] > 0
        parts = [part(document["text"], EPHEMERAL) for document in documents]
        whole = ask(served, *parts, link={"order": "any"})
        turned = ask(served, *parts[::-1], link={"order": "any"})
        assert turned["link"] == whole["link"]
