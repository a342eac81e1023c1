"""Predictions against figures that are known, and against what must hold of them."""

import pytest

from kvlinker_lab.roofline import GPUS, MODELS, passes_of, predict


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("70b", 70.55)])
def test_weights_are_those_of_llama_3(name, billions):
    """But for norms, which are a thousandth."""
    model = MODELS[name]
    whole = model.products + 2 * model.vocabulary * model.hidden
    assert whole / 1e9 == pytest.approx(billions, rel=1e-3)


def test_kv_is_that_of_llama_3():
    assert MODELS["8b"].kv_bytes == 128 << 10
    assert MODELS["70b"].kv_bytes == 320 << 10


def test_pairs_are_those_of_a_mask():
    """Of queries and keys that see each other, counted one by one."""
    chunks, tokens, fresh = 3, 40, 5
    length = chunks * tokens + fresh
    counted = passes_of(chunks, tokens, fresh)
    assert counted["full"][0].pairs == pytest.approx(sum(range(length + 1)), rel=0.05)
    assert counted["naive"][0].pairs == pytest.approx(
        sum(range(length - fresh + 1, length + 1)), rel=0.05
    )
    assert [each.tokens for each in counted["legolink-16"]] == [(chunks - 1) * 16, fresh]
    again = (chunks - 1) * tokens * 5 // 100
    assert [each.tokens for each in counted["query-5"]] == [fresh, again, fresh]


def test_a_single_chunk_is_exact_where_it_is():
    counted = passes_of(1, 512, 64)
    assert counted["legolink-16"] == counted["naive"]
    assert len(counted["query-5"]) == 2


def test_who_computes_less_is_sooner_and_copying_costs():
    for gpu in GPUS.values():
        rows = {row["policy"]: row for row in predict(MODELS["8b"], gpu, 32, 512, 64)}
        times = [rows[name]["resident_ms"] for name in ("naive", "legolink-16", "query-5", "full")]
        assert times == sorted(times)
        copied = rows["naive"]["host_gb"] / gpu.link * 1e12
        waited = rows["naive"]["host_ms"] - rows["naive"]["resident_ms"]
        assert waited == pytest.approx(copied)
        assert rows["full"]["host_ms"] == rows["full"]["resident_ms"]
        hidden = rows["legolink-16"]["resident_ms"] + copied - rows["legolink-16"]["host_ms"]
        own_pass = rows["legolink-16"]["resident_ms"] - rows["naive"]["resident_ms"]
        assert hidden == pytest.approx(min(own_pass, copied * 28 / 32))
