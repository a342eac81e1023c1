"""Settings of access and quotas, from the file, from variables and from arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvlinker.config import load_settings
from kvlinker.types.tenants import SHARED_TENANT, UNLIMITED, Quota, tenant_of_key


def test_quotas_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvlinker.toml"
    file.write_text(
        'api_keys = ["a", "b"]\nadmin_keys = ["root", "a"]\ntenant_quota_bytes = "10MB"\ntenant_quota_caches = 5\n'
        '[tenant_quotas.b]\nbytes = "20MB"\n[tenant_quotas.shared]\ncaches = 7\n'
        '[tenant_quotas.a]\npinned_bytes = "1MB"\n'
    )
    monkeypatch.setenv("KVLINKER_CONFIG", str(file))
    settings = load_settings()
    assert settings.accepted_keys == ("a", "b", "root")
    quotas = settings.quotas
    assert quotas.of("default") == Quota(10_000_000, 5)
    assert quotas.of(tenant_of_key("a")) == Quota(10_000_000, 5, 1_000_000)
    assert quotas.of(tenant_of_key("b")) == Quota(20_000_000, 5)
    assert quotas.of(SHARED_TENANT) == Quota(None, 7)


def test_quotas_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINKER_TENANT_QUOTAS", '{"a": {"caches": 1}}')
    monkeypatch.setenv("KVLINKER_ADMIN_KEYS", "a, b")
    assert load_settings().quotas.of(tenant_of_key("a")) == Quota(None, 1)


def test_without_quotas() -> None:
    assert load_settings().quotas.of("default") == load_settings().quotas.of(SHARED_TENANT) == UNLIMITED


@pytest.mark.parametrize(
    "options",
    [
        {"tenant_quotas": {"stranger": {"caches": 1}}},
        {"tenant_quotas": {"shared": {"cache": 1}}},
        {"tenant_quotas": {"shared": {"caches": -1}}},
        {"tenant_quotas": "{"},
        {"tenant_quotas": "[]"},
        {"tenant_quota_bytes": "many"},
        {"tenant_quota_caches": -1},
        {"tenant_quota_pinned_bytes": -1},
    ],
)
def test_bad_quotas(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        load_settings(**options)
    assert {str(complaint["loc"][0]) for complaint in caught.value.errors()} == set(options)


def test_secrets_are_not_shown() -> None:
    settings = load_settings(admin_keys="hush-1", tenant_quotas={"hush-1": {}}, encryption_key="hush-2")
    assert "hush" not in repr(settings)
