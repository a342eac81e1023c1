"""``kvlinker top``: a frame of a running server, and the figures in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from prometheus_client.samples import Sample
from typer.testing import CliRunner, Result

from kvlinker.cli import app
from kvlinker.cli.top import WINDOW_SECONDS, History, Period, Snapshot, read
from kvlinker.doors.client import Client, ServerUnreachableError
from tests.doors.http.serving import Served

TIME_TO_FIRST_TOKEN = "time_to_first_token_seconds"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["top", *map(str, arguments)])


def snapshot(
    seconds: float, figures: Mapping[str, float], started_at: int = 0, **labels: str
) -> Snapshot:
    """A snapshot whose samples have these labels."""
    samples = {
        f"kvlinker:{name}": [Sample(f"kvlinker:{name}", labels, value)]
        for name, value in figures.items()
    }
    return Snapshot(seconds, {"started_at": started_at}, samples)


def observed(*counts: int) -> Snapshot:
    """A snapshot of a histogram with the bounds 1, 2, 4 and infinity, by what its buckets hold in
    all."""
    name = f"kvlinker:{TIME_TO_FIRST_TOKEN}_bucket"
    buckets = zip(("1.0", "2.0", "4.0", "+Inf"), counts, strict=True)
    return Snapshot(
        0,
        {"started_at": 0},
        {name: [Sample(name, {"le": bound}, count) for bound, count in buckets]},
    )


@pytest.mark.parametrize("options", [["--once"], []], ids=["once", "where nobody watches"])
def test_a_frame(served: Served, options: list[str]) -> None:
    served.cache("a chunk for the frame")
    body = {"prompt": "a question for the frame", "max_tokens": 2, "ignore_eos": True}
    served.post("/v1/completions", body)
    served.wait_until_idle()
    shown = run("--url", served.url, *options)
    assert (shown.exit_code, shown.stderr) == (0, "")
    status = served.get("/status").json()
    lines = [line for line in shown.stdout.splitlines() if line]
    assert re.match(rf"tiny  legolink-4  {served.url}  up .*figures since the start", lines[0])
    assert f"0 running, 0 waiting, {status['requests']['finished']} finished" in shown.stdout
    shares = {name: float(share) for share, name in re.findall(r"([\d.]+)% (\w+)", shown.stdout)}
    whole = sum(status["prompt_tokens"].values())
    expected = {
        name: pytest.approx(100 * count / whole, abs=0.1)
        for name, count in status["prompt_tokens"].items()
    }
    assert shares == expected
    assert re.search(r"first token +p50 [\d.]+ m?s, p90 [\d.]+ m?s, p99 [\d.]+ m?s", shown.stdout)
    rows = {line.split()[0]: line for line in lines}
    for tier in status["tiers"]:
        assert f" {tier['chunks']:,} " in rows[tier["name"]]


def test_a_key_is_asked_for(keyed: Served) -> None:
    refused = run("--once", "--url", keyed.url)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "API key" in refused.stderr
    assert run("--once", "--url", keyed.url, "--api-key", "key-alpha").exit_code == 0


def test_nobody_answers() -> None:
    missed = run("--once", "--url", "http://127.0.0.1:9")
    assert (missed.exit_code, missed.stdout) == (1, "")
    assert "No server answers at http://127.0.0.1:9" in missed.stderr
    assert run("--every", 0).exit_code == 2


@pytest.mark.parametrize(
    ("metrics", "status", "told"),
    [
        ("kvlinker:x 1", "<html>", "is no server of kvlinker's: Expecting value"),
        ("<html>a", {}, "is no server of kvlinker's"),
        ("", {"model": "m"}, "its status has no kv_slots, policy, requests, started_at, tiers"),
        ("", [], "its status has no"),
    ],
    ids=["a page as status", "a page as metrics", "another status", "a list"],
)
def test_something_else_answers(
    metrics: str, status: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        return httpx.Response(200, text=status if isinstance(status, str) else json.dumps(status))

    with Client("http://elsewhere") as client:
        monkeypatch.setattr(
            client,
            "_http",
            httpx.Client(base_url="http://elsewhere", transport=httpx.MockTransport(answer)),
        )
        with pytest.raises(ServerUnreachableError, match=told):
            read(client)


def test_counts_and_rates() -> None:
    period = Period(
        snapshot(10, {"requests_total": 4}, reason="stop"),
        snapshot(14, {"requests_total": 10}, reason="stop"),
    )
    assert (period.count("requests_total"), period.rate("requests_total", reason="stop")) == (
        6,
        1.5,
    )
    assert period.count("requests_total", reason="length") == period.count("evictions_total") == 0
    assert Period(period.since, period.since).rate("requests_total") == 0


QUANTILES = [
    (0.5, (0, 0, 0, 0), (2, 2, 2, 2), 0.5),
    (0.5, (0, 0, 0, 0), (0, 4, 4, 4), 1.5),
    (0.99, (0, 0, 0, 0), (0, 0, 100, 100), 3.98),
    (0.5, (5, 5, 5, 5), (5, 5, 9, 9), 3.0),
    (0.99, (0, 0, 0, 0), (0, 0, 0, 7), 4.0),
    (0.5, (3, 4, 5, 6), (3, 4, 5, 6), None),
]


def test_quantiles(subtests: pytest.Subtests) -> None:
    for share, before, after, value in QUANTILES:
        with subtests.test(str(share), before=before, after=after):
            period = Period(observed(*before), observed(*after))
            assert period.quantile(share, TIME_TO_FIRST_TOKEN) == (
                value if value is None else pytest.approx(value)
            )
            assert period.quantile(share, "load_seconds") is None


def test_the_window_moves() -> None:
    history = History()
    seconds = [0.0, 30.0, 60.0, 90.0, 200.0]
    begins = [history.add(snapshot(now, {"requests_total": now})).since.seconds for now in seconds]
    assert begins[1:] == [0.0, 0.0, 30.0, 90.0]
    assert begins[0] < 0, "the first counts from the server's start"
    assert WINDOW_SECONDS == 60


def test_a_restart_begins_anew() -> None:
    history = History()
    for now in (0.0, 2.0):
        history.add(snapshot(now, {"requests_total": 100}, started_at=1))
    period = history.add(snapshot(4.0, {"requests_total": 1}, started_at=2))
    assert period.count("requests_total") == 1
