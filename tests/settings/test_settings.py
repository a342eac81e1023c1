"""Settings of access and quotas, from the file, from variables and from arguments."""

from __future__ import annotations

from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.base.types.tenants import SHARED_TENANT, UNLIMITED, Quota, tenant_of_key
from kvlinker.llm import LLM
from kvlinker.settings import load_settings


def test_quotas_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvlinker.toml"
    file.write_text(
        'api_keys = ["a", "b"]\nadmin_keys = ["root", "a"]\ntenant_quota_bytes ='
        ' "10MB"\ntenant_quota_caches = 5\n[tenant_quotas.b]\nbytes ='
        ' "20MB"\n[tenant_quotas.shared]\ncaches = 7\n[tenant_quotas.a]\npinned_bytes = "1MB"\n'
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
    assert (
        load_settings().quotas.of("default")
        == load_settings().quotas.of(SHARED_TENANT)
        == UNLIMITED
    )


BAD_QUOTAS: list[dict[str, Any]] = [
    {"tenant_quotas": {"stranger": {"caches": 1}}},
    {"tenant_quotas": {"shared": {"cache": 1}}},
    {"tenant_quotas": {"shared": {"caches": -1}}},
    {"tenant_quotas": "{"},
    {"tenant_quotas": "[]"},
    {"tenant_quota_bytes": "many"},
    {"tenant_quota_caches": -1},
    {"tenant_quota_pinned_bytes": -1},
]


def test_bad_quotas(subtests: pytest.Subtests) -> None:
    for options in BAD_QUOTAS:
        with subtests.test(str(options)):
            with pytest.raises(InvalidRequestError) as caught:
                load_settings(**options)
            assert caught.value.param in options


COMPLAINTS: list[tuple[dict[str, Any], str]] = [
    ({"prot": 5}, "There is no setting 'prot' (from option prot). Did you mean 'port'?"),
    ({"colour": "red"}, "There is no setting 'colour' (from option colour)."),
    (
        {"redis_space": "4GiB"},
        "There is no setting 'redis_space' (from option redis_space). Redis limits itself: set its"
        " maxmemory and maxmemory-policy.",
    ),
    (
        {"port": 99999},
        "port is 99999 (from option port): it must be a whole number from 0 to 65535.",
    ),
    (
        {"kv_slots": "few"},
        "kv_slots is 'few' (from option kv_slots): it must be a whole number from 16 on.",
    ),
    (
        {"trust_remote_code": "maybe"},
        "trust_remote_code is 'maybe' (from option trust_remote_code): it must be true",
    ),
    (
        {"disk_space": "much"},
        "disk_space is 'much' (from option disk_space): it must be a size such as 4GiB.",
    ),
    (
        {"dtype": "flaot32"},
        (
            "dtype is 'flaot32' (from option dtype): it must be 'auto', 'float32', 'bfloat16'"
            " or 'float16'. Did you mean 'float32'?"
        ),
    ),
    (
        {"generation_context": "prefx"},
        "it must be 'alone', 'bos' or 'prefix'. Did you mean 'prefix'?",
    ),
    ({"vllm_options": "{"}, "vllm_options is '{' (from option vllm_options): it is not JSON: "),
    ({"port": "x" * 1000}, f"port is '{'x' * 98}… (from option port): "),
    (
        {"redis_prefix": ""},
        "redis_prefix is '' (from option redis_prefix): it must have at least 1 character.",
    ),
    (
        {"tenant_quotas": {"shared": {"cache": 1}}},
        (
            "There is no setting 'tenant_quotas.*.cache' (from option tenant_quotas). "
            "Did you mean 'tenant_quotas.*.caches'?"
        ),
    ),
    (
        {"port": -1, "host": 3},
        "(from option host): it must be a valid string. port is -1 (from option port): ",
    ),
]


def test_complaints_name_value_origin_and_way_out(subtests: pytest.Subtests) -> None:
    for options, complaint in COMPLAINTS:
        with subtests.test(str(options)[:60]):
            with pytest.raises(InvalidRequestError) as caught:
                load_settings(**options)
            assert complaint in caught.value.message
            assert "\n" not in caught.value.message


@pytest.mark.parametrize("names", [",,", " , ", " "])
def test_names_that_are_none(names: str) -> None:
    with pytest.raises(InvalidRequestError, match="has no name: write one"):
        load_settings(served_model_name=names)


def test_policies_are_complained_about_with_their_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINKER_POLICY", "leoglink-16")
    with pytest.raises(
        PolicyError,
        match=r"^Unknown policy 'leoglink-16'. Did you mean 'legolink'\? Known policies",
    ) as e:
        load_settings()
    assert e.value.message.endswith("It comes from variable KVLINKER_POLICY.")


@pytest.mark.parametrize("variable", ["KVLINKER_HOST_MEMORY", "kvlinker_host_memory"])
def test_variables_are_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "much")
    with pytest.raises(
        InvalidRequestError, match=rf"host_memory is 'much' \(from variable {variable}\)"
    ):
        load_settings()


def test_misspelt_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those: other programs use the prefix as well, for services that are called kvlinker."""
    for variable in (
        "KVLINKER_API_KEY",
        "KVLINKER_NEW_ENCRYPTION_KEY",
        "KVLINKER_SERVICE_HOST",
        "KVLINKER_PORT_80_TCP",
    ):
        monkeypatch.setenv(variable, "1")
    load_settings()
    monkeypatch.setenv("KVLINKER_POLCY", "naive")
    with pytest.raises(
        InvalidRequestError,
        match=r"'polcy' \(from variable KVLINKER_POLCY\). Did you mean 'policy'\?",
    ):
        load_settings()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"prt = 5\n", "There is no setting 'prt' (from file {file}). Did you mean 'port'?"),
        (
            b'port = "web"\n',
            "port is 'web' (from file {file}): it must be a whole number from 0 to 65535.",
        ),
        (b"port = \n", "{file} is not valid TOML: "),
        (b'model = "\xff"\n', "{file} is not valid TOML: "),
    ],
)
def test_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, complaint: str
) -> None:
    file = tmp_path / "kvlinker.toml"
    file.write_bytes(content)
    monkeypatch.setenv("KVLINKER_CONFIG", str(file))
    with pytest.raises(InvalidRequestError) as caught:
        load_settings()
    assert complaint.format(file=file) in caught.value.message


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvlinker.toml"
    file.touch()

    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setenv("KVLINKER_CONFIG", str(file))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidRequestError, match=f"Permission denied: '{file}'"):
        load_settings()


def test_llm_says_the_same() -> None:
    misspelt: Any = {"polciy": "naive"}  # type checkers know the options
    with pytest.raises(
        InvalidRequestError,
        match=r"no setting 'polciy' \(from option polciy\). Did you mean 'policy'\?",
    ):
        LLM(**misspelt)


WITH_SECRETS: list[dict[str, Any]] = [
    {"encryption_key": ["hush"]},
    {"redis_url": {"hush": 1}},
    {"api_keys": {"hush": 1}},
    {"admin_keys": [["hush"]]},
    {"tenant_quotas": '{"hush": 1'},
    {"tenant_quotas": {"hush": 1}},
    {"tenant_quotas": {"hush": {"caches": "hush"}}},
    {"tenant_quotas": {"hush": {}}},
]


def test_complaints_tell_no_secrets(subtests: pytest.Subtests) -> None:
    for options in WITH_SECRETS:
        with subtests.test(str(options)):
            with pytest.raises(InvalidRequestError) as caught:
                load_settings(**options)
            assert "hush" not in "".join(format_exception(caught.value))


def test_secrets_are_not_shown() -> None:
    settings = load_settings(
        admin_keys="hush-1", tenant_quotas={"hush-1": {}}, encryption_key="hush-2"
    )
    assert "hush" not in repr(settings)


def test_weights_of_a_variable_and_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().weights == "auto"
    monkeypatch.setenv("KVLINKER_WEIGHTS", "int4")
    assert load_settings().weights == "int4"
    assert load_settings(weights="int8").weights == "int8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "'auto', 'bf16', 'int8' or 'int4'"),
        ({"weights": "int4", "engine": "vllm"}, "vllm_options"),
        ({"weights": "bf16", "dtype": "float32"}, "dtype is float32"),
    ],
)
def test_weights_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        load_settings(**options)
    assert caught.value.param == "weights"


@pytest.mark.parametrize(
    ("written", "share"), [("1%", 0.01), ("0.25", 0.25), (" 100% ", 1.0), (0, 0.0)]
)
def test_shares_may_be_in_percent(written: Any, share: float) -> None:
    assert load_settings(audit=written).audit == share


NO_SHARES: list[tuple[dict[str, Any], str]] = [
    ({"audit": "a%"}, "must be a share such as 1% or 0.01"),
    ({"audit": "2"}, "less than or equal to 1"),
    ({"quality_target": "98%"}, "no effect without audit: set that, too"),
    ({"audit_tokens": 100}, "no effect without audit:"),
    ({"audit_log": "audit.jsonl"}, "no effect without audit:"),
    ({"audit": "1%", "audit_log_text": True}, "no effect without audit_log:"),
    ({"audit": "1%", "quality_policies": "query-5"}, "no effect without quality_target:"),
    ({"audit": "1%", "quality_per_tenant": True}, "no effect without quality_target:"),
    ({"quality_target": "98", "audit": "1%"}, "less than 1"),
]


def test_shares_that_are_none(subtests: pytest.Subtests) -> None:
    for options, complaint in NO_SHARES:
        with (
            subtests.test(str(options)),
            pytest.raises(InvalidRequestError, match=complaint),
        ):
            load_settings(**options)


def test_a_catalog_is_a_file_or_a_database() -> None:
    places = {
        None: Path("/state/catalog.sqlite"),
        "sqlite:////data/catalog": Path("/data/catalog"),
        "sqlite:///catalog": Path("catalog"),
        "postgresql://me:hush@db/kv": "postgresql://me:hush@db/kv",
    }
    for url, place in places.items():
        assert load_settings(state_dir="/state", catalog_url=url).catalog_place == place
    with pytest.raises(InvalidRequestError, match="catalog_url") as refused:
        load_settings(catalog_url="mysql://me:hush@db/kv")
    assert "hush" not in refused.value.message


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLINKER_STATE_DIR", raising=False)
    unset = load_settings()
    monkeypatch.setenv("KVLINKER_STATE_DIR", "")
    monkeypatch.setenv("KVLINKER_MAX_WAITING", "")
    assert load_settings() == unset


def test_a_home_folder_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match=r"option state_dir\): that home folder"):
        load_settings(state_dir="~nobody-here/kvlinker")

    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVLINKER_STATE_DIR")
    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(InvalidRequestError, match=r"from its default\): .* an absolute path"):
        load_settings()


def test_more_threads_than_any_machine_has() -> None:
    with pytest.raises(InvalidRequestError, match="a whole number from 1 to 4096"):
        load_settings(threads=10**30)
