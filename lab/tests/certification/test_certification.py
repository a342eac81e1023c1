"""``kvlinker-lab certify`` on the shipped model: the certificate, its page, and a server that
requires it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.engines.embedded.model_loading import load_model
from kvlinker.llm import LLM
from kvlinker.service.audit.certificate import Agreement, Certificate
from kvlinker.settings import load_settings
from kvlinker_lab.certification import measurement
from kvlinker_lab.certification.measurement import (
    QUESTIONS,
    audit_own_chunks,
    certify,
)
from kvlinker_lab.certification.page import certificate_page
from kvlinker_lab.cli import app
from tests.toy_models import loaded_model

POLICY = "random-100"
"""Computes all tokens again, so that it agrees wherever rounding does not matter."""


def certificate(**changes: Any) -> Certificate:
    agreement = Agreement(20, 19, 0.95, 0.75, 0.99)
    row = {
        "dataset": "d",
        "task": "t",
        "n": 20,
        "metric": "f1",
        "recomputed_fraction": 0.1,
        "kl": 0.02,
    }
    scores = {"score": 0.9, "ci_low": 0.8, "ci_high": 1.0}
    fields: dict[str, Any] = {
        "model": "toy <b>",
        "fingerprint": "f" * 64,
        "policy": "query-5",
        "conditions": {"generation_context": "prefix", "codecs": ["int8"]},
        "target": 0.9,
        "passed": False,
        "agreement": agreement,
        "issued_at": 1e9,
        "command": "kvlinker-lab certify",
        "machine": {"processor": "one"},
        "versions": {"kvlinker": "0"},
        "checks": ({"name": "prefill", "meaning": "a prompt", "error": 1e-6, "passed": True},),
        "quality": tuple(row | scores | {"policy": policy} for policy in ("full", "query-5")),
        "tasks": {"d: t": agreement, "own chunks": agreement},
    }
    return Certificate(**(fields | changes))


def test_the_page_has_everything_in_it() -> None:
    page = certificate_page(certificate())
    assert page.count("<svg") == 2
    assert not re.search(r"<(script|link|img|iframe)|src=|@import|url\(http", page), (
        "nothing comes from elsewhere"
    )
    assert "toy &lt;b&gt;" in page
    for text in (
        "Not certified",
        "19 of 20 answers agree",
        "own chunks",
        "holds for generation_context &#34;prefix&#34;, codecs [&#34;int8&#34;].",
        "prefill",
        "f" * 64,
        "2001-09-09 01:46 UTC",
    ):
        assert text in page
    assert "Not certified" not in certificate_page(certificate(passed=True))


def test_what_computes_everything_needs_none() -> None:
    with pytest.raises(InvalidRequestError, match="needs no certificate"):
        certify(load_settings(policy="full"), command="")


def test_a_prompt_of_the_stores_chunks_counts_once(tmp_path: Path) -> None:
    """As many times the same answer is no evidence: two chunks make two orders."""
    settings = load_settings(state_dir=tmp_path, policy="naive", audit=1.0, disk_space=0)
    with LLM.from_model(loaded_model("llama"), settings) as llm:
        for _ in range(2):
            llm.generate_context_cache(["One text.", "Another one."])
        found = audit_own_chunks(llm, 40)
    assert found.samples == 2 * len(QUESTIONS)


def test_chunks_that_expire_meanwhile_are_left_out(tmp_path: Path) -> None:
    """The store is a live server's, and the figures of hours are not lost for one of them."""
    settings = load_settings(state_dir=tmp_path, policy="naive", audit=1.0, disk_space=0)
    with LLM.from_model(loaded_model("llama"), settings) as llm:
        caches = llm.generate_context_cache(["One text.", "Another one.", "A third one."])

        def expire_one(_what: str, done: int = 0, _total: int | None = None, /) -> None:
            if done == 2:
                llm.expire_cache(caches[0])

        found = audit_own_chunks(llm, 40, progress=expire_one)
    assert found.samples == 2 + 2 * len(QUESTIONS), "those of two others are asked about"


def test_the_page_has_another_name_than_the_certificate(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["certify", "--out", str(tmp_path / "mine.html")])
    assert run.exit_code == 2
    assert "give that of the JSON file" in run.output


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(measurement, "certify", lambda *_, **__: pytest.fail("measured"))
    run = CliRunner().invoke(app, ["certify", "--policy", POLICY])
    assert run.exit_code == 2
    assert "This needs the library matplotlib" in run.output


def test_the_folder_of_a_certificate_is_there_before_anything_is_measured(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["certify", "--out", str(tmp_path / "none" / "mine.json")])
    assert run.exit_code == 2
    assert "there is no folder" in run.output


def test_chunks_are_measured_as_one_codec_leaves_them() -> None:
    codecs: dict[str, Any] = {"disk_codec": "int4+zstd", "redis_url": "redis://a", "policy": POLICY}
    with pytest.raises(InvalidRequestError, match="but tiers have int4 and int8"):
        certify(load_settings(**codecs, redis_codec="int8"), command="")


@pytest.mark.whole
def test_a_policy_is_certified_and_then_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINKER_REQUIRE_CERTIFICATE", "true")  # as the server's operator has it
    monkeypatch.setenv("KVLINKER_KEEP_ANSWERS", "answer")
    loaded = load_model(load_settings())
    options: dict[str, Any] = {"state_dir": tmp_path, "kv_slots": 8192, "require_certificate": True}
    with pytest.raises(PolicyError, match=f"{POLICY} has no certificate .* 'kvlinker-lab certify"):
        LLM.from_model(loaded, load_settings(policy=POLICY, **options))
    with LLM.from_model(loaded, load_settings(**options | {"require_certificate": False})) as llm:
        texts = [f"Text number {number} tells of nothing else.\n\n" for number in range(5)]
        stored = llm.generate_context_cache(texts)

    arguments = [
        "--policy",
        POLICY,
        "--target",
        "0.5",
        "--limit",
        "4",
        "--prompts",
        "2",
        "--state-dir",
        str(tmp_path),
    ]
    run = CliRunner().invoke(app, ["certify", *arguments])
    assert run.exit_code == 0, run.output
    assert f"{POLICY} is certified" in run.output
    (path,) = (tmp_path / "certificates").glob("*.json")
    told = json.loads(path.read_text())
    assert (told["object"], told["policy"], told["passed"]) == ("certificate", POLICY, True)
    assert told["fingerprint"] == loaded.fingerprint
    assert told["tasks"]["own chunks"]["samples"] == 2
    assert (
        sum(task["samples"] for task in told["tasks"].values()) == told["agreement"]["samples"] == 6
    )
    assert {check["passed"] for check in told["checks"]} == {True}
    assert {row["policy"] for row in told["quality"]} == {"full", POLICY}
    assert "<svg" in path.with_suffix(".html").read_text()

    strict = [
        *arguments,
        "--target",
        "0.99",
        "--limit",
        "1",
        "--prompts",
        "0",
        "--out",
        str(tmp_path / "mine.json"),
    ]
    run = CliRunner().invoke(app, ["certify", *strict])
    assert run.exit_code == 1, run.output
    assert not Certificate.read(tmp_path / "mine.json").passed

    others: dict[str, Any]
    for others in ({"disk_codec": "int4"}, {"generation_context": "alone"}):
        with pytest.raises(PolicyError, match=f"{POLICY} has no certificate"):
            LLM.from_model(loaded, load_settings(policy=POLICY, **options, **others))
    with LLM.from_model(loaded, load_settings(policy=POLICY, **options)) as llm:
        assert {cache.id for cache in llm.list_caches().items} == {cache.id for cache in stored}
        caches = llm.generate_context_cache(["A text.\n\n"])
        messages = [{"role": "user", "content": [*caches, "So?"]}]
        llm.chat_completion(messages, max_tokens=1)
        llm.chat_completion(messages, max_tokens=1, policy="full")
        with pytest.raises(PolicyError, match=f"certified policies only: {POLICY}, full"):
            llm.chat_completion(messages, max_tokens=1, policy="naive")
