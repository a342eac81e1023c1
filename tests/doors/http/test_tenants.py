"""Several tenants on one server: usage, quotas, pins, shared context caches, and deletion by
metadata."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvlinker import AsyncClient, Client
from kvlinker.base.errors import (
    ContextCacheNotFoundError,
    InvalidRequestError,
    PermissionDeniedError,
    PinLimitError,
    QuotaExceededError,
)
from kvlinker.base.types.tenants import tenant_of_key
from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings

CACHES = "/v1/context_caches"
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Keys anna, bert (with a quota of three context caches), carl (with 100 kB), and root, an
    admin's."""
    settings = tiny_settings(
        tmp_path_factory.mktemp("tenants"),
        api_keys="anna,bert,carl",
        admin_keys="root",
        host_memory="512KiB",
        disk_space="1MiB",
        tenant_quota_caches=1000,
        tenant_quotas={"bert": {"caches": 3}, "carl": {"bytes": "100kB", "pinned_bytes": "50kB"}},
    )
    with serving(LLM.from_model(tiny_model(dtype="float32"), settings), settings) as running:
        yield running


@pytest.fixture(autouse=True)
def clean(tenants: Served) -> Iterator[None]:
    yield
    for key in ("anna", "bert", "carl", "root"):
        for scope in ("private", "shared") if key == "root" else ("private",):
            while data := call(
                tenants, key, "GET", CACHES, params={"limit": 100, "scope": scope}
            ).json()["data"]:
                for entry in data:
                    call(tenants, key, "DELETE", f"{CACHES}/{entry['id']}")


def call(served: Served, key: str, method: str, path: str, **options: Any) -> httpx.Response:
    return served.http.request(method, path, headers={"Authorization": f"Bearer {key}"}, **options)


def create(served: Served, key: str, *chunks: str, **fields: Any) -> list[dict[str, Any]]:
    answer = call(served, key, "POST", CACHES, json={"chunks": chunks, **fields})
    assert answer.status_code == 200, answer.text
    entries: list[dict[str, Any]] = answer.json()["data"]
    return entries


def usage(served: Served, key: str, **params: str) -> dict[str, Any]:
    answer = call(served, key, "GET", f"{CACHES}/usage", params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_usage(tenants: Served) -> None:
    nothing = usage(tenants, "anna")
    assert nothing == {
        "object": "context_cache.usage",
        "scope": "private",
        "caches": 0,
        "chunks": 0,
        "tokens": 0,
        "bytes": 0,
        "pinned_bytes": 0,
        "quota": {"caches": 1000, "bytes": None, "pinned_bytes": None},
        "tiers": [
            {"name": name, "bytes": 0, "chunks": 0, "reachable": True} for name in ("host", "disk")
        ],
    }
    one, two, _ = create(tenants, "anna", "The cat sat.", "A dog", "A dog")
    create(tenants, "bert", "The cat sat.", "not anna's")
    tenants.llm.store.flush()
    used = usage(tenants, "anna")
    tokens = one["tokens"] + two["tokens"]
    per_token = tenants.llm.engine.kv_bytes_per_token
    assert (used["caches"], used["chunks"], used["tokens"], used["bytes"]) == (
        3,
        2,
        tokens,
        tokens * per_token,
    )
    assert [(tier["name"], tier["chunks"]) for tier in used["tiers"]] == [("host", 2), ("disk", 2)]
    assert all(tier["bytes"] >= used["bytes"] for tier in used["tiers"])
    assert usage(tenants, "bert")["quota"] == {"caches": 3, "bytes": None, "pinned_bytes": None}
    assert usage(tenants, "carl")["quota"] == {
        "caches": 1000,
        "bytes": 100_000,
        "pinned_bytes": 50_000,
    }
    for entry in (one, two):
        call(tenants, "anna", "DELETE", f"{CACHES}/{entry['id']}")
    assert usage(tenants, "anna")["chunks"] == 1


def test_listing_and_deletion_by_metadata(tenants: Served) -> None:
    a = create(
        tenants, "anna", *(f"a {n}" for n in range(5)), metadata={"project": "a", "lang": "en"}
    )
    b = create(tenants, "anna", "b", metadata={"project": "b", "lang": "en"})
    create(tenants, "bert", "bert's", metadata={"project": "a"})

    def listed(key: str = "anna", **pairs: str) -> list[str]:
        params = {f"metadata[{name}]": value for name, value in pairs.items()} | {
            "order": "asc",
            "limit": "3",
        }
        page = call(tenants, key, "GET", CACHES, params=params).json()
        ids = [entry["id"] for entry in page["data"]]
        while page["has_more"]:
            page = call(
                tenants, key, "GET", CACHES, params=params | {"after": page["last_id"]}
            ).json()
            ids += [entry["id"] for entry in page["data"]]
        return ids

    assert listed(project="a") == [entry["id"] for entry in a]
    assert listed(lang="en") == [entry["id"] for entry in (*a, *b)]
    assert listed(project="b", lang="en") == [b[0]["id"]]
    assert listed(project="b", lang="de") == []
    answer = call(tenants, "anna", "DELETE", CACHES, params={"metadata[project]": "a"})
    assert (answer.status_code, answer.json()) == (
        200,
        {"object": "context_cache.deletion", "deleted": 5},
    )
    assert listed() == [b[0]["id"]]
    assert len(listed("bert")) == 1
    assert (
        call(tenants, "anna", "DELETE", CACHES, params={"metadata[project]": "a"}).json()["deleted"]
        == 0
    )


BAD_FILTERS = [
    ("DELETE", "", "metadata", "invalid_value"),
    ("DELETE", "scope=private", "metadata", "invalid_value"),
    ("DELETE", "project=a", "project", "unknown_parameter"),
    ("DELETE", "metadata[project]=a&limit=1", "limit", "unknown_parameter"),
    ("DELETE", "metadata.project=a", "metadata", "invalid_value"),
    ("DELETE", "metadata[project]=a&metadata[project]=b", "metadata[project]", "invalid_value"),
    ("GET", "metadata=a", "metadata", "invalid_value"),
    ("GET", "metadata[a", "metadata", "invalid_value"),
    ("GET", "&".join(f"metadata[k{n}]=a" for n in range(17)), "metadata", "invalid_value"),
    ("GET", "scope=public", "scope", "invalid_value"),
]


def test_bad_filters(tenants: Served, subtests: pytest.Subtests) -> None:
    create(tenants, "anna", "stays", metadata={"project": "a"})
    for method, query, param, code in BAD_FILTERS:
        with subtests.test(f"{method} {query[:50]}"):
            assert refusal(call(tenants, "anna", method, f"{CACHES}?{query}")) == (400, code, param)
            assert usage(tenants, "anna")["caches"] == 1


def test_quota_of_caches(tenants: Served) -> None:
    kept = create(tenants, "bert", "one", "two")
    answer = call(tenants, "bert", "POST", CACHES, json={"chunks": ["three", "four"]})
    assert refusal(answer) == (403, "quota_exceeded", None)
    assert answer.json()["error"]["type"] == "insufficient_quota"
    assert "quota of 3 context caches" in answer.json()["error"]["message"]
    assert usage(tenants, "bert")["caches"] == 2
    (expired,) = create(tenants, "bert", "three")
    tenants.expire(expired["id"], tenant=tenant_of_key("bert"))
    create(tenants, "bert", "in the place of the expired one")
    call(tenants, "bert", "DELETE", f"{CACHES}/{kept[0]['id']}")
    create(tenants, "bert", "four")


def test_quota_of_bytes(tenants: Served) -> None:
    text = "x" * (100_000 // tenants.llm.engine.kv_bytes_per_token)
    create(tenants, "carl", text)
    create(tenants, "carl", text)
    assert 0 < usage(tenants, "carl")["bytes"] <= 100_000
    keys = tenants.llm.store.keys()
    assert refusal(call(tenants, "carl", "POST", CACHES, json={"chunks": ["y"]})) == (
        403,
        "quota_exceeded",
        None,
    )
    assert tenants.llm.store.keys() == keys, "what is refused is not computed"


def test_requests_at_once_do_not_exceed_a_quota(tenants: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda n: call(tenants, "bert", "POST", CACHES, json={"chunks": [f"text {n}"]}),
                range(12),
            )
        )
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [403] * 9
    assert usage(tenants, "bert")["caches"] == 3
    tenants.llm.store.flush()
    assert tenants.llm.store.keys() == tenants.llm.catalog.chunk_keys().keys(), (
        "no KV of refused ones remains"
    )


def test_pinned_kv_outlives_others(tenants: Served) -> None:
    (pinned,) = create(tenants, "anna", "p" * 100, pinned=True)
    (loose,) = create(tenants, "anna", "q" * 100)
    assert (pinned["pinned"], loose["pinned"]) == (True, False)
    for number in range(2 * MEBIBYTE // (600 * tenants.llm.engine.kv_bytes_per_token)):
        create(tenants, "anna", chr(65 + number) * 600)
    tenants.llm.store.flush()
    tiers = [
        call(tenants, "anna", "GET", f"{CACHES}/{entry['id']}").json()["tier"]
        for entry in (pinned, loose)
    ]
    assert tiers == ["host", None]
    url = f"{CACHES}/{pinned['id']}"
    assert call(tenants, "anna", "PATCH", url, json={"pinned": False}).json()["pinned"] is False
    assert call(tenants, "anna", "PATCH", url, json={"name": "p"}).json()["pinned"] is False
    assert call(tenants, "anna", "PATCH", url, json={"pinned": True}).json()["pinned"] is True
    assert call(tenants, "anna", "PATCH", url, json={"pinned": None}).json()["pinned"] is False


def test_pins_have_a_limit(tenants: Served) -> None:
    tokens = MEBIBYTE // 2 // tenants.llm.engine.kv_bytes_per_token
    create(tenants, "anna", "a" * (tokens // 2), pinned=True)
    (other,) = create(tenants, "bert", "b" * (tokens // 2 + 1))
    refused = [
        call(tenants, "bert", "PATCH", f"{CACHES}/{other['id']}", json={"pinned": True}),
        call(
            tenants,
            "bert",
            "POST",
            CACHES,
            json={"chunks": ["c" * (tokens // 2 + 2)], "pinned": True},
        ),
    ]
    for answer in refused:
        assert refusal(answer) == (403, "pin_limit_exceeded", "pinned")
        assert f"{MEBIBYTE // 2:,}" in answer.json()["error"]["message"]
    assert usage(tenants, "bert")["caches"] == 1


def test_pins_of_one_tenant_have_a_limit_of_their_own(tenants: Served) -> None:
    tokens = 50_000 // tenants.llm.engine.kv_bytes_per_token
    (pinned,) = create(tenants, "carl", "a" * (tokens // 2), pinned=True)
    (other,) = create(tenants, "carl", "b" * (tokens // 2 + 10))
    used = usage(tenants, "carl")["pinned_bytes"]
    assert 0 < used < 50_000
    for answer in (
        call(tenants, "carl", "PATCH", f"{CACHES}/{other['id']}", json={"pinned": True}),
        call(
            tenants,
            "carl",
            "POST",
            CACHES,
            json={"chunks": ["b" * (tokens // 2 + 10)], "pinned": True},
        ),
    ):
        assert refusal(answer) == (403, "pin_limit_exceeded", "pinned")
        assert answer.json()["error"]["type"] == "insufficient_quota"
        assert all(f"{number:,}" in answer.json()["error"]["message"] for number in (50_000, used))
    assert usage(tenants, "carl")["pinned_bytes"] == used
    create(tenants, "carl", "a" * (tokens // 2), pinned=True)  # the same chunk
    create(tenants, "anna", "c" * tokens, pinned=True)
    assert (
        call(tenants, "carl", "PATCH", f"{CACHES}/{pinned['id']}", json={"name": "p"}).status_code
        == 200
    )


def test_shared_caches_are_used_by_all_and_written_by_admins(tenants: Served) -> None:
    refused = call(
        tenants, "anna", "POST", CACHES, json={"chunks": ["mine for all"], "scope": "shared"}
    )
    assert refusal(refused) == (403, "permission_denied", "scope")
    (shared,) = create(
        tenants, "root", "A corpus that all may use.", scope="shared", metadata={"corpus": "1"}
    )
    assert shared["scope"] == "shared"
    url = f"{CACHES}/{shared['id']}"
    prompt = {
        "prompt": [{"type": "context_cache", "id": shared["id"]}, {"type": "text", "text": "So?"}]
    }
    keys = tenants.llm.store.keys()
    answers = []
    for key in ("anna", "bert", "root"):
        assert call(tenants, key, "GET", url).json() == shared
        listed = call(tenants, key, "GET", CACHES, params={"scope": "shared"}).json()["data"]
        assert listed == [shared]
        assert call(tenants, key, "GET", CACHES).json()["data"] == []
        answer = call(
            tenants,
            key,
            "POST",
            "/v1/completions",
            json=prompt | {"max_tokens": 3, "temperature": 0},
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        answers.append(answer.json()["choices"])
    assert answers[0] == answers[1] == answers[2]
    assert tenants.llm.store.keys() == keys, "all used the same KV"
    assert usage(tenants, "anna")["bytes"] == usage(tenants, "root")["bytes"] == 0
    assert usage(tenants, "anna", scope="shared")["caches"] == 1
    assert usage(tenants, "anna", scope="shared")["quota"] == {
        "caches": None,
        "bytes": None,
        "pinned_bytes": None,
    }
    for answer in (
        call(tenants, "anna", "PATCH", url, json={"name": "mine"}),
        call(tenants, "anna", "DELETE", url),
    ):
        assert refusal(answer) == (403, "permission_denied", "id")
        assert "'scope'" not in answer.json()["error"]["message"], "it is not in the request"
    answer = call(
        tenants, "anna", "DELETE", CACHES, params={"metadata[corpus]": "1", "scope": "shared"}
    )
    assert refusal(answer) == (403, "permission_denied", "scope")
    assert (
        call(tenants, "anna", "DELETE", CACHES, params={"metadata[corpus]": "1"}).json()["deleted"]
        == 0
    )
    assert call(tenants, "root", "PATCH", url, json={"name": "ours"}).json()["name"] == "ours"
    answer = call(
        tenants, "root", "DELETE", CACHES, params={"metadata[corpus]": "1", "scope": "shared"}
    )
    assert answer.json()["deleted"] == 1
    assert refusal(call(tenants, "anna", "GET", url)) == (404, "context_cache_not_found", "id")


def test_the_same_text_private_and_shared_is_two_chunks(tenants: Served) -> None:
    create(tenants, "root", "one text", scope="shared")
    create(tenants, "root", "one text")
    create(tenants, "anna", "one text")
    tenants.llm.store.flush()
    keys = tenants.llm.catalog.chunk_keys().keys()
    assert len(keys) == 3
    assert all(set(keys) <= set(tier.keys()) for tier in tenants.llm.store._tiers)


def test_clients(tenants: Served) -> None:
    with (
        Client(tenants.url, "anna") as anna,
        Client(tenants.url, "bert") as bert,
        Client(tenants.url, "root") as root,
    ):
        caches = anna.generate_context_cache(["a", "b", "c"], metadata={"k": "v"}, pinned=True)
        assert all(cache.pinned and cache.scope == "private" for cache in caches)
        page = anna.list_caches(limit=2, order="asc", metadata={"k": "v"})
        assert (page.items, page.has_more) == (caches[:2], True)
        assert anna.list_caches(after=page.items[-1], order="asc").items == caches[2:]
        changed = anna.update_cache(caches[0], pinned=False, ttl=50, name="new")
        assert (changed.pinned, changed.name) == (False, "new")
        with pytest.raises(ContextCacheNotFoundError, match=caches[0].id):
            bert.update_cache(caches[0], pinned=False)
        with pytest.raises(PermissionDeniedError):
            anna.generate_context_cache(["d"], scope="shared")
        root.generate_context_cache(["d"], scope="shared", metadata={"k": "v"})
        assert [cache.scope for cache in anna.list_caches(scope="shared").items] == ["shared"]
        assert anna.caches_usage()["caches"] == 3
        assert anna.caches_usage(scope="shared")["caches"] == 1
        with pytest.raises(QuotaExceededError):
            bert.generate_context_cache(list("wxyz"))
        with pytest.raises(PinLimitError):
            anna.generate_context_cache(["x" * 2000] * 2 + ["y" * 1900], pinned=True)
        with pytest.raises(InvalidRequestError, match="at least one pair"):
            anna.expire_caches({})
        assert anna.expire_caches({"k": "v"}) == 3
        assert root.expire_caches({"k": "v"}, scope="shared") == 1


async def test_async_client(tenants: Served) -> None:
    async with AsyncClient(tenants.url, "anna") as anna:
        (cache,) = await anna.generate_context_cache(["a"], metadata={"ä[": "ö&="})
        assert (await anna.update_cache(cache, pinned=True)).pinned
        assert (await anna.list_caches(metadata={"ä[": "ö&="})).items[0].id == cache.id
        assert (await anna.caches_usage())["caches"] == 1
        assert await anna.expire_caches({"ä[": "ö&="}) == 1


def test_schema_tells_of_filters(tenants: Served) -> None:
    schema = tenants.get("/openapi.json").json()
    for method in ("get", "delete"):
        parameters = {each["name"]: each for each in schema["paths"][CACHES][method]["parameters"]}
        assert parameters["metadata"]["style"] == "deepObject"
        assert "scope" in parameters
    assert f"{CACHES}/usage" in schema["paths"]
    assert {"pinned", "scope"} <= schema["components"]["schemas"]["CreateContextCachesRequest"][
        "properties"
    ].keys()
