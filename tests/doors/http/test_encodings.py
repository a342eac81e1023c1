"""Compressed bodies are read as what they hold, and no more of them than a body may have."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import httpx
import pytest
import zstandard
from starlette.exceptions import HTTPException

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import LEAST_PROMPT_BODY_BYTES
from kvlinker.doors.http.edge.bodies import EXPANDERS, expand
from tests.doors.http.serving import Served

TOKENIZE = "/tokenize"
BODY = json.dumps({"text": "The cat sat on the mat. " * 20}).encode()


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


COMPRESSED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("gzip", lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstandard.compress),
    ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress),
]


def send(served: Served, body: bytes, encoding: str, path: str = TOKENIZE) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return served.http.post(path, content=body, headers=headers)


def test_all_encodings_are_tried() -> None:
    assert {encoding for encoding, _ in COMPRESSED} == EXPANDERS.keys()


def test_compressed_bodies_are_served(served: Served, subtests: pytest.Subtests) -> None:
    plain = served.post(TOKENIZE, json.loads(BODY)).json()
    for number, (encoding, compress) in enumerate(COMPRESSED):
        with subtests.test(encoding, number=number):
            answer = send(served, compress(BODY), encoding.upper())
            assert answer.json() == plain
    assert send(served, BODY, "identity").json() == plain


def test_damaged_bodies_are_refused(subtests: pytest.Subtests) -> None:
    for number, (encoding, compress) in enumerate(COMPRESSED):
        whole = compress(BODY)
        for damaged in (BODY, whole[:-1], whole[: len(whole) // 2], b"\0" + whole):
            with subtests.test(encoding, number=number, begins=damaged[:4]):
                with pytest.raises(InvalidRequestError, match=encoding) as raised:
                    expand(encoding, damaged, 2**20)
                assert raised.value.code == "invalid_encoding"


def test_a_damaged_body_is_the_clients_mistake(served: Served) -> None:
    answer = send(served, BODY, "gzip")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_encoding"
    assert send(served, gzip.compress(b"{no JSON"), "gzip").json()["error"]["code"] == (
        "invalid_json"
    )


def test_what_a_body_holds_is_limited(subtests: pytest.Subtests) -> None:
    most = 2**16
    for number, (encoding, compress) in enumerate(COMPRESSED):
        with subtests.test(encoding, number=number):
            assert len(expand(encoding, compress(bytes(most)), most)) == most
            for size in (most + 1, 2**24):
                with pytest.raises(HTTPException) as raised:
                    expand(encoding, compress(bytes(size)), most)
                assert raised.value.status_code == 413


def test_a_small_body_may_not_hold_much(served: Served) -> None:
    bomb = gzip.compress(b" " * (LEAST_PROMPT_BODY_BYTES + 1))
    answer = send(served, bomb, "gzip", "/v1/chat/completions")
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert f"{LEAST_PROMPT_BODY_BYTES:,} bytes" in answer.json()["error"]["message"]


def test_other_encodings_are_named(served: Served) -> None:
    for encoding in ("br", "gzip, gzip", "x" * 1000):
        answer = send(served, BODY, encoding)
        assert answer.status_code == 415
        assert answer.headers["accept-encoding"] == "gzip, x-gzip, deflate, zstd"
        error = answer.json()["error"]
        assert error["code"] == "unsupported_encoding"
        assert "gzip, x-gzip, deflate, zstd" in error["message"]
    refused = send(served, BODY, "br", "/v1/messages").json()
    assert refused["error"]["type"] == "invalid_request_error"
