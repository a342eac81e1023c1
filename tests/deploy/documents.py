"""The files of ``deploy/``, parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tools.image import instructions

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = "Dockerfile"
HOME = "/var/lib/kvlinker"
"""The servers' home folder, in which all that they write lies."""


def text_of(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def documents_of(name: str) -> list[Any]:
    """Return a YAML file's documents."""
    return list(yaml.safe_load_all(text_of(name)))


def manifest(kind: str, name: str) -> Any:
    """Return the one Kubernetes object of this kind and name."""
    files = documents_of("kubernetes/kustomization.yaml")[0]["resources"]
    objects = [entry for file in files for entry in documents_of(f"kubernetes/{file}")]
    (found,) = [
        entry for entry in objects if (entry["kind"], entry["metadata"]["name"]) == (kind, name)
    ]
    return found


def unit_entries() -> list[tuple[str, str, str]]:
    """Return the entries of the systemd unit: section, name, value. A name may come several
    times."""
    section, entries = "", []
    for line in text_of("kvlinker.service").splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            entries.append((section, name, value))
    return entries


def dashboard() -> dict[str, Any]:
    return dict(json.loads(text_of("monitoring/dashboard.json")))


def rules() -> list[dict[str, Any]]:
    """Return Prometheus' recording and alert rules of all groups."""
    (document,) = documents_of("monitoring/rules.yml")
    return [rule for group in document["groups"] for rule in group["rules"]]


def settings_given() -> Iterator[tuple[str, str, str]]:
    """Yield all settings that the files give by variables: file, name of the setting, value."""
    for word, rest in instructions():
        if word == "ENV":
            yield from ((DOCKERFILE, *pair) for pair in re.findall(r"KVLINKER_(\w+)=(\S+)", rest))
    for name, service in documents_of("compose.yaml")[0]["services"].items():
        for variable, value in service.get("environment", {}).items():
            if variable.startswith("KVLINKER_") and variable != "KVLINKER_API_KEY":
                yield f"compose.yaml, {name}", variable.removeprefix("KVLINKER_"), value
    (container,) = manifest("StatefulSet", "kvlinker")["spec"]["template"]["spec"]["containers"]
    for entry in container["env"]:
        if entry["name"].startswith("KVLINKER_"):
            yield (
                "kubernetes",
                entry["name"].removeprefix("KVLINKER_"),
                entry.get("value", "from a secret"),
            )
    for _, name, value in unit_entries():
        if name == "Environment" and value.startswith("KVLINKER_"):
            setting, _, given = value.removeprefix("KVLINKER_").partition("=")
            yield "kvlinker.service", setting, given
