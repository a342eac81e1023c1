"""The codecs' rows tell what files are, on KV of real text."""

import pytest

from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.format.codecs import known_codecs
from kvlinker_lab.codecs import COLUMNS, codec_rows, prose_kvs, run_codecs
from tests.toy_models import loaded_model


def test_rows_tell_room_error_and_time():
    subject = MeasuredModel("llama", "kvlinker bench …", loaded_model("llama"), {})
    kvs = prose_kvs(subject, chunks=3, chunk_tokens=64)
    assert [kv.tokens for kv in kvs] == [64, 64, 64]
    rows = {row["codec"]: row for row in codec_rows(kvs, repeat=1)}
    assert list(rows) == list(known_codecs())
    for row in rows.values():
        assert set(row) == set(COLUMNS)
        assert row["encode_ms"] > 0
        assert row["decode_ms"] > 0
    raw = rows["raw"]
    assert raw["bytes_per_token"] == sum(encode_chunk("0" * 64, kv).nbytes for kv in kvs) / (3 * 64)
    assert (raw["key_error"], raw["value_error"]) == (0, 0)
    for name in ("raw", "int8", "int4"):
        packed = rows[f"{name}+zstd"]
        assert packed["bytes_per_token"] < rows[name]["bytes_per_token"]
        assert packed["key_error"] == rows[name]["key_error"]
    assert 0 < rows["int8"]["value_error"] < rows["int4"]["value_error"] < 0.2
    assert codec_rows(kvs, repeat=1, codecs=["int8"])[0]["key_error"] == pytest.approx(
        rows["int8"]["key_error"]
    )


def test_the_report_is_of_the_models_own_kv():
    subject = MeasuredModel("llama", "kvlinker bench …", loaded_model("llama"), {})
    report = run_codecs(subject, chunks=2, chunk_tokens=32, repeat=1)
    assert [row["codec"] for row in report.rows] == list(known_codecs())
    assert report.settings["model"] == "llama"
