"""``deploy/kubernetes/fleet.yaml`` says what Ray Serve and this package read."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema
from tests.deploy.documents import documents_of, manifest

from kvlinker_fleet.ray_serve.options import FleetOptions, key_of_fleet, read_options


@pytest.fixture(scope="module")
def spec() -> Any:
    service = documents_of("kubernetes/fleet.yaml")[0]
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    return service["spec"]


@pytest.fixture
def options(spec: Any, monkeypatch: pytest.MonkeyPatch) -> FleetOptions:
    monkeypatch.setenv("KVLINKER_API_KEYS", "key")
    monkeypatch.setenv("KVLINKER_ADMIN_KEYS", "admin")
    schema = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(import_module(module), name))
    assert schema.proxy_location.value == "Disabled"
    return read_options(application.args)


def test_its_options_are_read(options: FleetOptions, spec: Any) -> None:
    assert key_of_fleet(options.read_settings()) == "admin"
    assert spec["rayClusterConfig"]["rayVersion"] == ray.__version__


def test_pods_and_options_fit_together(options: FleetOptions, spec: Any) -> None:
    groups = {each["groupName"]: each for each in spec["rayClusterConfig"]["workerGroupSpecs"]}
    ingress, replica = groups["ingress"], groups["replica"]
    assert ingress["minReplicas"] == ingress["maxReplicas"] == options.ingresses
    assert f'\\"{options.ingress_resource}\\": 1' in ingress["rayStartParams"]["resources"]
    assert replica["minReplicas"] == options.min_replicas
    assert replica["maxReplicas"] == options.max_replicas
    (container,) = replica["template"]["spec"]["containers"]
    assert float(container["resources"]["requests"]["cpu"]) == options.cpus
    settings = options.read_settings()
    (container,) = ingress["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]
    grace = ingress["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= settings.drain_timeout + 30


def test_clients_reach_the_ingresses_alone(spec: Any) -> None:
    service = documents_of("kubernetes/fleet.yaml")[1]
    ((label, value),) = service["spec"]["selector"].items()
    config = spec["rayClusterConfig"]
    labels = [each["template"]["metadata"]["labels"] for each in config["workerGroupSpecs"]]
    assert [each.get(label) for each in labels] == [value, None]
    policy = manifest("NetworkPolicy", "kvlinker-redis")
    (allowed,) = policy["spec"]["ingress"][0]["from"]
    for pod in (*labels, config["headGroupSpec"]["template"]["metadata"]["labels"]):
        assert allowed["podSelector"]["matchLabels"].items() <= pod.items()
