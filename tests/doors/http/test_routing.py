"""HEAD, Allow, unknown query parameters and slashes, on every route."""

from __future__ import annotations

import re
from itertools import product

import pytest

from kvlinker.doors.http.edge.guards import OWN_PATHS
from tests.doors.http.serving import Served

CACHES = "/v1/context_caches"


def test_head_is_get_without_a_body(served: Served, subtests: pytest.Subtests) -> None:
    for path in ("/", "/health", "/status", "/metrics", "/v1/models", "/v1/models/tiny", CACHES):
        with subtests.test(path):
            read, head = served.get(path), served.http.head(path)
            assert head.status_code == read.status_code == 200
            assert head.content == b""
            assert head.headers["content-type"] == read.headers["content-type"]
            assert int(head.headers["content-length"]) > 0
            assert served.get(path).status_code == 200, "the connection goes on"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/other", 404),
        (f"{CACHES}/cc_1/content", 404),
        ("/nowhere", 404),
        ("/v1/chat/completions", 405),
        ("/tokenize", 405),
        ("/v1/models/load", 405),
        ("/v1/models/load/other", 404),
        ("/v1/responses/input_tokens", 405),
    ],
)
def test_head_where_get_fails(served: Served, path: str, status: int) -> None:
    head = served.http.head(path)
    assert (head.status_code, head.content) == (status, b"")


def test_files_take_any_query(served: Served) -> None:
    assert served.get("/static/page.css?v=1").status_code == 200


ALLOWED = [
    (CACHES, "DELETE, GET, HEAD, POST"),
    (f"{CACHES}/cc_1", "DELETE, GET, HEAD, PATCH"),
    (f"{CACHES}/usage", "GET, HEAD"),
    (f"{CACHES}/search", "POST"),
    (f"{CACHES}/split", "POST"),
    (f"{CACHES}/cc_1/content", "GET, HEAD"),
    ("/v1/chat/completions", "POST"),
    ("/v1/models/tiny", "GET, HEAD"),
    ("/v1/models/known", "GET, HEAD"),
    ("/v1/models/load", "POST"),
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/resp_1", "DELETE, GET, HEAD"),
    ("/openapi.json", "GET, HEAD"),
    ("/", "GET, HEAD"),
]


def test_allow_lists_all_methods_of_the_path(served: Served, subtests: pytest.Subtests) -> None:
    for (path, allowed), method in product(ALLOWED, ("PUT", "OPTIONS", "NONSENSE")):
        with subtests.test(f"{method} {path}"):
            answer = served.http.request(method, path)
            assert answer.status_code == 405
            assert answer.headers["allow"] == allowed
            assert answer.json()["error"]["code"] == "method_not_allowed"


def test_unknown_query_parameters_are_refused_by_name_on_kvlinkers_own_routes(
    served: Served,
) -> None:
    document = served.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            url = re.sub(r"{\w+}", "x", path)
            body = (
                {"content": b"{}", "headers": {"Content-Type": "application/json"}}
                if method == "post"
                else {}
            )
            answer = served.http.request(method, url, params={"wrong": "1"}, **body)  # type: ignore[arg-type]
            if not path.startswith(OWN_PATHS):
                assert "'wrong'" not in answer.text
            elif "requestBody" not in operations[method]:
                assert answer.status_code == 400, (method, path, answer.text)
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("unknown_parameter", "wrong")


@pytest.mark.parametrize(
    ("method", "query", "param"),
    [
        ("GET", "limt=5", "limt"),
        ("GET", "limit=5&order=asc&after_id=cc_1", "after_id"),
        ("DELETE", "metadata[a]=b&limit=5", "limit"),
        ("GET", "=1", ""),
    ],
)
def test_the_first_unknown_query_parameter_is_named(
    served: Served, method: str, query: str, param: str
) -> None:
    error = served.http.request(method, f"{CACHES}?{query}").json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", param)


def test_what_is_meant_is_told(served: Served) -> None:
    message = served.get(f"{CACHES}?limt=5").json()["error"]["message"]
    assert "'limt'" in message
    assert "Did you mean 'limit'?" in message


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_is_redirected(served: Served, method: str) -> None:
    answer = served.http.request(method, f"{CACHES}/")
    assert answer.status_code == 404
    assert "location" not in answer.headers
    assert "slash" in answer.json()["error"]["message"]
