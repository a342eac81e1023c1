"""Metrics and the status route."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvlinker.base.events import ChunkDamaged, ChunkEvicted
from tests.doors.http.serving import Served


def figures(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = served.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_tell_what_requests_did(served: Served) -> None:
    def figure(name: str, **labels: str) -> float:
        return after.get((name, frozenset(labels.items())), 0.0) - before.get(
            (name, frozenset(labels.items())), 0.0
        )

    (cache_id,) = served.cache("a chunk for the metrics, not used by others")
    before = figures(served)
    body = {"prompt": [{"type": "context_cache", "id": cache_id}, {"type": "text", "text": "So?"}]}
    usage = served.post(
        "/v1/completions",
        body | {"max_tokens": 3, "ignore_eos": True, "link": {"policy": "legolink-2"}},
    ).json()["usage"]
    after = figures(served)

    details = usage["prompt_tokens_details"]
    fresh = usage["prompt_tokens"] - details["cached_tokens"] - details["recomputed_tokens"]
    assert figure("kvlinker:prompt_tokens_total", source="cached") == details["cached_tokens"] > 0
    assert (
        figure("kvlinker:prompt_tokens_total", source="recomputed")
        == details["recomputed_tokens"]
        == 2
    )
    assert figure("kvlinker:prompt_tokens_total", source="fresh") == fresh > 0
    assert figure("kvlinker:output_tokens_total") == 3
    assert figure("kvlinker:requests_total", reason="length") == 1
    assert figure("kvlinker:time_to_first_token_seconds_count") == 1
    assert figure("kvlinker:time_to_first_token_seconds_sum") > 0
    assert figure("kvlinker:chunk_lookups_total", result="hit", tier="host") == 1
    assert figure("kvlinker:load_seconds_count", tier="host") == 1


def test_gauges_are_read_when_scraped(served: Served) -> None:
    served.cache("something to be stored")
    served.wait_until_idle()
    hold = served.llm.store.hold({"a chunk": 7})
    assert hold is not None
    scraped = figures(served)
    hold.release()
    assert scraped[("kvlinker:held_bytes", frozenset())] == 7
    assert scraped[("kvlinker:requests_running", frozenset())] == 0
    assert scraped[("kvlinker:requests_waiting", frozenset())] == 0
    assert (
        scraped[("kvlinker:store_bytes", frozenset({("tier", "host")}))]
        == served.llm.store.usage()[0].used_bytes
        > 0
    )
    assert ("kvlinker:store_bytes", frozenset({("tier", "disk")})) in scraped


def test_measured_speeds_are_shown(served: Served) -> None:
    served.post(
        "/v1/completions", {"prompt": "a prompt that tells how fast the model is", "max_tokens": 1}
    )
    served.llm.store.bandwidths.note("disk", 10**12, 1.0)
    scraped = figures(served)
    status = served.get("/status").json()
    bandwidth = scraped["kvlinker:tier_bandwidth_bytes_per_second", frozenset({("tier", "disk")})]
    assert bandwidth > 0
    assert {tier["name"]: tier["bytes_per_second"] for tier in status["tiers"]} == {
        "host": None,
        "disk": bandwidth,
    }
    assert scraped["kvlinker:prefill_tokens_per_second", frozenset()] > 0
    assert status["prefill_tokens_per_second"] > 0


def test_evictions_and_damage_are_counted(served: Served) -> None:
    name = "kvlinker:evictions_total", frozenset({("tier", "host")})
    damaged = "kvlinker:damaged_chunks_total", frozenset({("tier", "disk")})
    before = figures(served)
    served.llm.events.publish(ChunkEvicted("host", 5))
    served.llm.events.publish(ChunkDamaged("disk", "key", "why"))
    after = figures(served)
    assert after[name] == before[name] + 1
    assert after[damaged] == before.get(damaged, 0) + 1


def test_status_agrees_with_metrics(served: Served) -> None:
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    served.wait_until_idle()
    status = served.get("/status").json()
    scraped = figures(served)
    for source, tokens in status["prompt_tokens"].items():
        assert tokens == scraped["kvlinker:prompt_tokens_total", frozenset({("source", source)})]
    assert status["output_tokens"] == scraped["kvlinker:output_tokens_total", frozenset()]
    finished = sum(
        value for (name, _), value in scraped.items() if name == "kvlinker:requests_total"
    )
    assert status["requests"] == {"running": 0, "waiting": 0, "finished": finished}
    assert [tier["name"] for tier in status["tiers"]] == ["host", "disk"]


def test_schema_names_every_route(served: Served) -> None:
    paths = served.get("/openapi.json").json()["paths"]
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/context_caches",
        "/v1/models",
        "/tokenize",
    } <= set(paths)
