"""Compose's file and the Kubernetes manifests, rendered, are valid by the schemas of those who read
them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.documents import documents_of, text_of

kubernetes_validate = pytest.importorskip("kubernetes_validate")
compose_spec = pytest.importorskip("compose_spec")

VERSIONS = ("1.30", "1.37")
"""The oldest and the newest Kubernetes whose schemas the manifests are checked with."""


def rendered() -> Iterator[Any]:
    """Yield the objects that ``kubectl apply -k`` makes of the folder."""
    (kustomization,) = documents_of("kubernetes/kustomization.yaml")
    names = {
        image["name"]: f"{image['newName']}:{image['newTag']}" for image in kustomization["images"]
    }
    for file in kustomization["resources"]:
        for each in documents_of(f"kubernetes/{file}"):
            template = each["spec"].get("template", {"spec": {"containers": []}})
            for container in template["spec"]["containers"]:
                container["image"] = names.get(container["image"], container["image"])
            yield each


def fleet_objects() -> Iterator[Any]:
    """Yield the fleet's objects, with those of Kubernetes that KubeRay makes of its own."""
    for each in documents_of("kubernetes/fleet.yaml"):
        if each["kind"] != "RayService":
            yield each
            continue
        cluster = each["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "of-a-group"},
                "template": group["template"],
            }


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str, subtests: pytest.Subtests) -> None:
    for each in (*rendered(), *fleet_objects()):
        with subtests.test(f"{each['kind']} {each['metadata']['name']}"):
            kubernetes_validate.validate(each, version, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    (deployment, *_) = documents_of("kubernetes/redis.yaml")
    deployment["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


def test_servers_come_from_the_registry() -> None:
    images = {
        container["image"]
        for each in rendered()
        if "template" in each["spec"]
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert "kvlinker" not in images
    assert any(image.startswith("registry.example/kvlinker:") for image in images)


def test_compose_is_valid() -> None:
    text = re.sub(r"\$\{\w+:\?[^}]*\}", "given", text_of("compose.yaml"))
    document = yaml.safe_load(text)  # which merges what services share
    read = compose_spec.PyCompose.from_yaml(yaml.safe_dump(document))
    assert set(read.service_names()) == document["services"].keys()
    document["services"]["router"]["comand"] = ["router"]
    with pytest.raises(ValueError, match="comand"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(document))
