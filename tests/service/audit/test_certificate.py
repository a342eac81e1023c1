"""Certificates as files, and the policies that they allow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.linking import parse_policy
from kvlinker.service.audit.certificate import (
    Agreement,
    Certificate,
    CertifiedPolicies,
    certificate_path,
    conditions_of,
    lossy_codecs,
)
from kvlinker.settings import Settings, load_settings

FINGERPRINT = "ab" * 32


def settings_in(folder: Path, **others: Any) -> Settings:
    return load_settings(state_dir=folder, model="m", **others)


def write(
    folder: Path,
    policy: str,
    *,
    passed: bool = True,
    fingerprint: str = FINGERPRINT,
    conditions: dict[str, Any] | None = None,
) -> Certificate:
    agreement = Agreement(10, 10, 1.0, 0.7, 1.0)
    made = Certificate(
        model="m",
        fingerprint=fingerprint,
        policy=policy,
        conditions=conditions_of(settings_in(folder)) if conditions is None else conditions,
        target=0.5,
        passed=passed,
        agreement=agreement,
        issued_at=1.0,
        command="kvlinker-lab certify",
        machine={"cores": 2},
        versions={"torch": "2"},
        checks=({"name": "prefill", "meaning": "…", "error": 0.0, "passed": True},),
        quality=({"policy": policy, "score": 1.0},),
        tasks={"all": agreement},
    )
    made.write(certificate_path(folder, fingerprint, policy))
    return made


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = write(tmp_path, "query-5")
    assert Certificate.read(certificate_path(tmp_path, FINGERPRINT, "query-5")) == made


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"object": "certificate", "model": "m"}'])
def test_what_is_no_certificate_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=r"file\.json is no certificate"):
        Certificate.read(path)


def test_policies_that_passed_with_this_model_may_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "query-5")
    write(tmp_path, "naive", passed=False)
    write(tmp_path, "query-1", fingerprint=FINGERPRINT[:-1] + "0")
    certificate_path(tmp_path, FINGERPRINT, "broken").write_text("{")
    certified = CertifiedPolicies(settings_in(tmp_path), FINGERPRINT)
    assert certified.names == {"query-5"}
    assert "is no certificate" in caplog.text
    certified.check(parse_policy("query-5"))
    certified.check(parse_policy("full"))
    for refused in ("naive", "query-1", "query-5+legolink-4"):
        with pytest.raises(PolicyError, match="kvlinker-lab certify --model m --policy") as raised:
            certified.check(parse_policy(refused))
        assert raised.value.param == "link.policy"


def test_without_certificates_full_alone_may_be_used(tmp_path: Path) -> None:
    certified = CertifiedPolicies(settings_in(tmp_path), FINGERPRINT)
    assert certified.refusal(parse_policy("full")) is None
    assert "certified policies only: full." in (certified.refusal(parse_policy("naive")) or "")


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"generation_context": "alone"}, "generation_context 'prefix' instead of 'alone'"),
        ({"system_prompt": "Be brief."}, "system_prompt None instead of 'Be brief.'"),
        ({"disk_codec": "int4"}, r"codecs \[\] instead of \['int4'\]"),
    ],
)
def test_what_was_measured_under_other_settings_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, others: dict[str, Any], told: str
) -> None:
    write(tmp_path, "query-5")
    certified = CertifiedPolicies(settings_in(tmp_path, **others), FINGERPRINT)
    assert not certified.names
    assert re.search(f"query-5.json was measured with {told}, and does not count", caplog.text)


def test_what_another_version_measured_does_not_count(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    write(tmp_path, "query-5", conditions=conditions_of(settings) | {"kvlinker": "0.0.1"})
    assert not CertifiedPolicies(settings, FINGERPRINT).names


def test_codecs_count_where_tiers_have_them_and_they_change_chunks(tmp_path: Path) -> None:
    codecs = {"disk_codec": "raw+zstd", "redis_codec": "int8", "object_codec": "int4+zstd"}
    assert lossy_codecs(settings_in(tmp_path, **codecs)) == ()
    assert lossy_codecs(settings_in(tmp_path, **codecs, redis_url="redis://a")) == ("int8",)
    assert lossy_codecs(settings_in(tmp_path, **codecs, object_url="s3://a/b")) == ("int4",)
    assert lossy_codecs(settings_in(tmp_path, disk_codec="int8", disk_space=0)) == ()
