"""Servers that share a Redis or an object store link each other's chunks, within a tenant."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from kvlinker.base.events import ChunkLookup
from kvlinker.cli import app
from kvlinker.doors.client import Client
from kvlinker.llm import LLM, Answer
from kvlinker.settings import load_settings
from kvlinker.store import ContextCache
from tests.doors.http.serving import serving, tiny_model, tiny_settings
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE

TEXTS = [
    "The kettle stands in the kitchen, and it is green.",
    "The bicycle stands in the hall, and it is red.",
]
COMMAND = [sys.executable, "-c", "from kvlinker.cli import app; app()"]


@pytest.fixture(params=["redis", "object"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Settings that name a tier to share."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return {"redis_url": f"redis://default:not-to-be-seen@127.0.0.1:{server.port}/0"}
    return {"object_url": f"file://{tmp_path}/objects"}


@pytest.fixture
def make_llm(shared: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: object) -> LLM:
        settings = tiny_settings(tmp_path / f"state{len(made)}", **(shared | options))
        made.append(LLM.from_model(tiny_model(), settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def ask(llm: LLM, caches: Iterable[ContextCache], tenant: str = "default") -> Answer:
    content = [*caches, "Which is red?"]
    return llm.chat_completion(
        [{"role": "user", "content": content}], max_tokens=6, temperature=0, tenant=tenant
    )


def lookups(llm: LLM) -> list[ChunkLookup]:
    seen: list[ChunkLookup] = []
    llm.events.subscribe(
        lambda event: seen.append(event) if isinstance(event, ChunkLookup) else None
    )
    return seen


def test_what_one_computed_the_other_links(make_llm, shared: dict[str, str]) -> None:
    (name,) = (name.removesuffix("_url") for name in shared)
    first, second = make_llm(), make_llm()
    caches = first.generate_context_cache(TEXTS)
    expected = ask(first, caches)
    first.store.flush()
    seen = lookups(second)
    theirs = second.generate_context_cache(TEXTS)
    assert [second.caches.tier(cache) for cache in theirs] == [name, name]
    answer = ask(second, theirs)
    assert (answer.text, answer.usage) == (expected.text, expected.usage)
    assert seen == [ChunkLookup(hit=True, tier=name)] * 2
    assert [second.caches.tier(cache) for cache in theirs] == ["host", "host"]
    ask(second, theirs)
    assert seen[2:] == [ChunkLookup(hit=True, tier="host")] * 2
    second.store.flush()
    assert len(second.store.usage()[1:]) == 2
    assert [usage.chunks for usage in second.store.usage()] == [2, 2, 2]


def test_another_tenant_finds_nothing(make_llm) -> None:
    first, second = make_llm(), make_llm()
    first.generate_context_cache(TEXTS, tenant="one")
    first.store.flush()
    seen = lookups(second)
    theirs = second.generate_context_cache(TEXTS, tenant="two")
    ask(second, theirs, tenant="two")
    assert {lookup.tier for lookup in seen} <= {"host"}


def test_deleting_removes_it_from_the_shared_tier(make_llm) -> None:
    first, second = make_llm(), make_llm()
    caches = first.generate_context_cache(TEXTS)
    first.store.flush()
    for cache in caches:
        first.expire_cache(cache)
    assert [usage.chunks for usage in first.store.usage()] == [0, 0, 0]
    assert all(second.store.tier_of(cache.chunk_key) is None for cache in caches)


def test_commands_see_the_shared_tier_and_leave_others_chunks_alone(
    make_llm, shared: dict[str, str], tmp_path: Path
) -> None:
    ((name, url),) = ((name.removesuffix("_url"), url) for name, url in shared.items())
    first, second = make_llm(disk_space=0), make_llm()
    (mine,) = first.generate_context_cache(TEXTS[:1])
    (other,) = second.generate_context_cache(TEXTS[1:])
    first.close()
    second.close()

    def run(*arguments: str) -> str:
        options = ["--state-dir", str(tmp_path / "state0"), f"--{name}-url", url]
        result = CliRunner().invoke(app, ["caches", *arguments, *options])
        assert result.exit_code == 0, result.output
        assert "not-to-be-seen" not in result.output
        return result.output

    (row,) = run("ls").splitlines()[1:]
    assert row.split()[0] == mine.id
    assert row.split()[5] == name
    assert f"{name}: 2 checked, 0 damaged" in run("check", "--repair")
    run("rm", "--all", "--yes")
    third = make_llm()
    assert third.store.tier_of(mine.chunk_key) is None
    assert third.store.tier_of(other.chunk_key) == name


def test_figures_name_the_tier_and_never_the_password(make_llm, shared: dict[str, str]) -> None:
    (name,) = (name.removesuffix("_url") for name in shared)
    llm = make_llm()
    with serving(llm, llm.settings) as served:
        served.cache(*TEXTS)
        llm.store.flush()
        samples = {
            (sample.name, sample.labels.get("tier")): sample.value
            for family in text_string_to_metric_families(served.get("/metrics").text)
            for sample in family.samples
        }
        assert samples["kvlinker:store_chunks", name] == 2
        assert samples["kvlinker:store_bytes", name] > 0
        assert samples["kvlinker:tier_errors_total", name] == 0
        status = served.get("/status")
        assert [tier["name"] for tier in status.json()["tiers"]] == ["host", "disk", name]
        said = (
            status.text
            + served.get("/metrics").text
            + repr(llm.settings)
            + llm.settings.model_dump_json()
        )
        assert "not-to-be-seen" not in said


def test_usage_by_tenant_covers_the_shared_tier(
    make_llm, shared: dict[str, str], tmp_path: Path
) -> None:
    ((name, url),) = ((name.removesuffix("_url"), url) for name, url in shared.items())
    llm = make_llm()
    llm.generate_context_cache(TEXTS, tenant="one")
    llm.generate_context_cache(TEXTS[:1], tenant="two")
    llm.store.flush()
    by_tenant = {tenant: llm.caches_usage(tenant=tenant).tiers[-1] for tenant in ("one", "two")}
    assert [(by_tenant[tenant].name, by_tenant[tenant].chunks) for tenant in ("one", "two")] == [
        (name, 2),
        (name, 1),
    ]
    used = llm.store.usage()[-1].used_bytes
    of_tenants = sum(tier.used_bytes for tier in by_tenant.values())
    assert of_tenants == used or (name == "redis" and of_tenants < used), "Redis counts all its own"
    llm.close()
    options = ["--state-dir", str(tmp_path / "state0"), f"--{name}-url", url]
    result = CliRunner().invoke(app, ["caches", "usage", *options])
    header, *rows = (line.split() for line in result.output.splitlines())
    assert header[-1] == name
    assert {row[0]: int(row[-1]) for row in rows} == {
        tenant: tier.used_bytes for tenant, tier in by_tenant.items()
    }


def test_a_server_starts_and_answers_without_its_redis(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, redis_url="redis://127.0.0.1:1/0")
    with LLM.from_model(tiny_model(), settings) as llm:
        caches = llm.generate_context_cache(TEXTS)
        assert ask(llm, caches).usage.output_tokens == 6
        with serving(llm, llm.settings) as served:
            tiers = served.get("/v1/context_caches/usage").json()["tiers"]
    assert [tier["reachable"] for tier in tiers] == [True, True, False]
    assert tiers[-1] == {"name": "redis", "bytes": None, "chunks": None, "reachable": False}
    arguments = [
        "caches",
        "usage",
        "--state-dir",
        str(tmp_path),
        "--redis-url",
        "redis://127.0.0.1:1/0",
    ]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.output.split()[-1]) == (0, "unreachable")


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--redis-url", "redis://:not-to-be-seen@host:port", "redis://[user:password@]host:port"),
        ("--object-url", "nosuch://:not-to-be-seen@place", "s3://bucket/folder"),
    ],
)
def test_a_url_that_is_none_is_one_line(
    tmp_path: Path, option: str, value: str, complaint: str
) -> None:
    settings = load_settings(state_dir=tmp_path)
    with LLM.from_model(tiny_model(), settings) as llm:
        llm.generate_context_cache(TEXTS)
    result = CliRunner().invoke(app, ["caches", "ls", "--state-dir", str(tmp_path), option, value])
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert complaint in result.stderr
    assert "not-to-be-seen" not in result.output


@contextmanager
def server_process(environment: dict[str, str]) -> Iterator[str]:
    """A real server, in a process of its own, with the model in the box; yields its address."""
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stderr is not None
        said = ""
        try:
            for line in process.stderr:
                said += line
                if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                    break
            assert address, said
            assert "not-to-be-seen" not in said
            yield address[0]
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE)


@pytest.mark.whole
def test_two_server_processes_on_one_redis(redis_server: RedisServer, tmp_path: Path) -> None:
    url = f"redis://default:not-to-be-seen@127.0.0.1:{redis_server.port}/0"
    first, second = (
        {"KVLINKER_STATE_DIR": str(tmp_path / name), "KVLINKER_REDIS_URL": url} for name in "ab"
    )
    with server_process(first) as one, server_process(second) as two:
        for address in (one, two):
            with Client(address, "none") as client:
                caches = client.generate_context_cache(TEXTS)
                message = {"role": "user", "content": [*caches, "What colour is the kettle?"]}
                assert client.chat_completion([message], max_tokens=4).usage.cached_tokens > 0
        metrics = httpx.get(f"{two}/metrics").text
    found = re.search(r'chunk_lookups_total{result="hit",tier="redis"} (\d+)', metrics)
    assert found is not None
    assert int(found[1]) >= len(TEXTS)  # KV for later places is looked up, too
    assert 'result="miss"' not in metrics
