"""The files of ``deploy/`` name settings, options, ports and routes that exist, and agree with each
other."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import metadata, requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import ByteSize, TypeAdapter
from tools.image import instructions
from typer.main import get_command

from kvlinker.cli import app
from kvlinker.cli.console import BAD_USAGE
from kvlinker.doors.http.edge.guards import OPEN_PATHS
from kvlinker.settings import Settings, load_settings
from tests.deploy.documents import (
    DEPLOY,
    DOCKERFILE,
    HOME,
    documents_of,
    manifest,
    settings_given,
    text_of,
    unit_entries,
)

PORT = 8000
PLACEHOLDERS = re.compile(r"\$[({][^)}]*[)}]")


def size_of(text: str) -> int:
    """Bytes, as kvlinker (``4GiB``), Kubernetes (``4Gi``) and Redis (``4096mb``) write them."""
    return TypeAdapter(ByteSize).validate_python(
        re.sub(r"(?i)(?<=\d)([kmgt])(i|b)$", r"\1iB", text)
    )


def server_container() -> Any:
    (container,) = manifest("StatefulSet", "kvlinker")["spec"]["template"]["spec"]["containers"]
    return container


def server_environment() -> dict[str, str]:
    return {name: value for file, name, value in settings_given() if file == "kubernetes"}


def test_every_setting_exists_and_takes_its_value(subtests: pytest.Subtests) -> None:
    for file, name, value in settings_given():
        with subtests.test(f"{file}: {name}"):
            assert name.lower() in Settings.model_fields
            assert isinstance(value, str), "a number or boolean of YAML is no value of a variable"
            load_settings(**{name.lower(): PLACEHOLDERS.sub("placeholder", value)})


def test_commands_exist_with_their_options() -> None:
    (unit_command,) = [value for _, name, value in unit_entries() if name == "ExecStart"]
    container = server_container()
    for command in (shlex.split(unit_command)[1:], container["args"], ["serve"]):
        name, *arguments = command
        with get_command(app).load(name).make_context(name, list(arguments)) as context:  # type: ignore[attr-defined]
            assert context.params["port"] in (None, str(PORT))


def test_image() -> None:
    """Only what the build may see is copied, extras exist, and the image runs what it installs,
    without rights."""
    steps = instructions()
    by_word = dict(steps)
    words = [word for word, _ in steps]
    assert words[0] == "FROM"
    assert words.index("USER") > max(at for at, word in enumerate(words) if word == "RUN")
    assert by_word["EXPOSE"] == str(PORT)
    assert by_word["ENTRYPOINT"] == '["kvlinker"]'
    assert by_word["VOLUME"] == by_word["WORKDIR"] == HOME
    assert f"http://127.0.0.1:{PORT}/live'" in by_word["HEALTHCHECK"]
    seen = set(re.findall(r"^!(\S+)$", (DEPLOY.parent / ".dockerignore").read_text(), re.MULTILINE))
    assert seen == {"dist", "requirements.txt"}
    (extras,) = {
        rest.removeprefix("EXTRAS=")
        for word, rest in steps
        if word == "ARG" and rest.startswith("EXTRAS=")
    }
    assert set(extras.split(",")) <= set(metadata("kvlinker").get_all("Provides-Extra", []))
    assert dict(settings_of(DOCKERFILE))["PORT"] == str(PORT)
    assert required_by(extras.split(",")) <= pinned(), (
        "the image has the versions that the tests ran with"
    )


def required_by(extras: list[str]) -> set[str]:
    """Return the names of the packages of others that kvlinker needs with these extras."""
    wanted = map(Requirement, requires("kvlinker") or ())
    environments = [{"extra": extra} for extra in ("", *extras)]
    return {
        canonicalize_name(package.name)
        for package in wanted
        if package.marker is None or any(map(package.marker.evaluate, environments))
        if not package.name.startswith("kvlinker-")
    }


def pinned() -> set[str]:
    lines = (DEPLOY.parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def settings_of(file: str) -> list[tuple[str, str]]:
    return [(name, value) for given_in, name, value in settings_given() if given_in == file]


def test_the_image_for_cpus_is_one_argument_of_the_build_and_that_for_gpus_not_run() -> None:
    (argument,) = re.findall(
        r"^#   docker build .*--build-arg (\w+)=", text_of(DOCKERFILE), re.MULTILINE
    )
    assert (f"{argument}", "") in {
        rest.partition("=")[::2] for word, rest in instructions() if word == "ARG"
    }
    assert f"${{{argument}:+--extra-index-url" in text_of(DOCKERFILE), (
        "without it, no index is named"
    )
    assert "NOT RUN so far: that on an NVIDIA GPU" in text_of(DOCKERFILE)


def test_no_file_names_the_host_of_a_registry() -> None:
    hosts = re.compile(r"\b(pypi\.org|download\.pytorch\.org|docker\.io|ghcr\.io|quay\.io)\b")
    docs = DEPLOY.parent / "docs"
    for file in (
        DEPLOY / DOCKERFILE,
        *(path for path in DEPLOY.rglob("*.y*ml")),
        *docs.glob("*.md"),
    ):
        assert not hosts.search(file.read_text(encoding="utf-8")), file


def test_manifests_are_of_this_version() -> None:
    (image,) = documents_of("kubernetes/kustomization.yaml")[0]["images"]
    assert image["name"] == server_container()["image"]
    assert image["newTag"] == metadata("kvlinker")["Version"]


def test_containers_have_keys_and_reach_redis() -> None:
    """A server that others can reach does not start without keys, and its Redis has to be the one
    beside it."""
    services = documents_of("compose.yaml")[0]["services"]
    ours = {name: each for name, each in services.items() if each.get("image") == "kvlinker"}
    router, servers = ours.pop("router"), ours
    assert router["command"] == [
        "router",
        *(word for name in servers for word in ("--backend", f"http://{name}:{PORT}")),
    ]
    assert router["ports"][0].endswith(f":{PORT}")
    assert len(servers) == 2
    for service in servers.values():
        catalog = service["environment"]["KVLINKER_CATALOG_URL"]
        assert catalog.split("@")[-1].startswith("postgres:5432/")
        assert "postgres" in services
        assert ":?" in service["environment"]["KVLINKER_API_KEYS"], (
            "compose must refuse to start without a key"
        )
        assert (
            service["environment"]["KVLINKER_REDIS_URL"]
            .split("@")[-1]
            .startswith("redis://redis:6379")
        )
        assert "redis" in services
        assert service["volumes"][0].endswith(f":{HOME}")
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    secret = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]
        for entry in server_container()["env"]
        if "valueFrom" in entry
    }
    assert secret == {
        "KVLINKER_API_KEYS": {"name": "kvlinker", "key": "api-keys"},
        "REDIS_PASSWORD": {"name": "kvlinker", "key": "redis-password"},
    }
    redis = manifest("Service", "kvlinker-redis")
    assert (
        f"@{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}/"
        in server_environment()["REDIS_URL"]
    )
    comment = text_of("kubernetes/kustomization.yaml")
    assert all(f"--from-literal={entry['key']}=" in comment for entry in secret.values())


def test_redis_evicts_by_itself_and_keeps_nothing() -> None:
    (container,) = manifest("Deployment", "kvlinker-redis")["spec"]["template"]["spec"][
        "containers"
    ]
    command = documents_of("compose.yaml")[0]["services"]["redis"]["command"]
    for arguments in (container["args"], shlex.split(command)):
        options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        assert options["--maxmemory-policy"] == "allkeys-lru"
        assert (options["--save"], options["--appendonly"]) == ("", "no")
        assert size_of(options["--maxmemory"]) < size_of(container["resources"]["limits"]["memory"])


def test_probes_and_ports() -> None:
    container = server_container()
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS, "probes have no key"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/live", (
        "a server that drains is not to be killed"
    )
    labels = manifest("StatefulSet", "kvlinker")["spec"]["template"]["metadata"]["labels"]
    for name in ("kvlinker", "kvlinker-replicas"):
        service = manifest("Service", name)["spec"]
        assert service["selector"].items() <= labels.items()
        assert service["ports"] == [{"name": "http", "port": PORT, "targetPort": "http"}]
    assert manifest("StatefulSet", "kvlinker")["spec"]["serviceName"] == "kvlinker-replicas"


def test_a_server_that_is_told_to_stop_has_the_time_to_drain() -> None:
    """What comes before the signal, ``drain_timeout``, and at least 15 seconds for the last
    writes."""
    pod = manifest("StatefulSet", "kvlinker")["spec"]["template"]["spec"]
    command, seconds = server_container()["lifecycle"]["preStop"]["exec"]["command"]
    unit = {name: value for section, name, value in unit_entries() if section == "Service"}
    services = documents_of("compose.yaml")[0]["services"]
    assert command == "sleep"
    needed = float(Settings.model_fields["drain_timeout"].default) + 15
    assert pod["terminationGracePeriodSeconds"] >= needed + int(seconds)
    assert float(unit["TimeoutStopSec"]) >= needed
    assert unit["KillMode"] == "mixed", (
        "systemd would tell vLLM's processes, too, and at the same time"
    )
    for name in ("first", "second"):
        assert float(services[name]["stop_grace_period"].removesuffix("s")) >= needed


def test_budgets_fit_into_the_container() -> None:
    """Memory, slots and threads are set and lie within the limits; model and catalog have room."""
    container, settings = server_container(), server_environment()
    limits = container["resources"]["limits"]
    assert size_of(settings["HOST_MEMORY"]) <= size_of(limits["memory"]) / 2
    assert settings["THREADS"] == limits["cpu"]
    assert "KV_SLOTS" in settings
    (claim,) = manifest("StatefulSet", "kvlinker")["spec"]["volumeClaimTemplates"]
    assert size_of(settings["DISK_SPACE"]) <= 0.8 * size_of(
        claim["spec"]["resources"]["requests"]["storage"]
    )


def test_services_leave_no_variables_in_pods() -> None:
    """Kubernetes would set KVLINKER_PORT to the address of the Service of that name, which is no
    port."""
    assert (
        manifest("StatefulSet", "kvlinker")["spec"]["template"]["spec"]["enableServiceLinks"]
        is False
    )


def test_what_is_written_lies_in_the_volume() -> None:
    """The root file system is read-only: the image's home folder, with the state, is where the
    volume is mounted."""
    container = server_container()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"state": HOME, "temporary": "/tmp"}
    assert dict(settings_of(DOCKERFILE))["STATE_DIR"].startswith(f"{HOME}/")


def test_unit_keeps_its_state_where_it_may_write() -> None:
    entries = unit_entries()
    service = {name: value for section, name, value in entries if section == "Service"}
    environment = dict(value.split("=", 1) for _, name, value in entries if name == "Environment")
    assert {section for section, _, _ in entries} == {"Unit", "Service", "Install"}
    assert (
        environment["KVLINKER_STATE_DIR"]
        == environment["HOME"]
        == f"/var/lib/{service['StateDirectory']}"
    )
    assert environment["XDG_CACHE_HOME"] == f"/var/cache/{service['CacheDirectory']}"
    assert service["ProtectSystem"] == "strict"
    assert "MemoryDenyWriteExecute" not in service, "oneDNN and the native code could not run"
    assert service["Restart"] == "on-failure", "an engine that has failed is started again"
    assert service["RestartPreventExitStatus"] == str(BAD_USAGE), "a wrong setting stays wrong"
