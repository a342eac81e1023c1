"""What is used of Ray Serve beyond its stable interface is there, and does what it is used for."""

from __future__ import annotations

import inspect

import ray.serve._private.replica as serve_replica
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle

from fleet_tests.ray_serve.test_scaling import told
from kvlinker_fleet.ray_serve.application import POLICY
from kvlinker_fleet.ray_serve.ray_names import bind_no_port
from kvlinker_fleet.ray_serve.scaling import Scaling


def test_all_replicas_of_a_deployment_can_be_asked() -> None:
    assert "method_name" in inspect.signature(DeploymentHandle.broadcast).parameters


def test_a_replica_opens_its_port_by_the_name_that_is_replaced(monkeypatch) -> None:
    """And by no other."""
    source = inspect.getsource(serve_replica)
    opened = 'self._internal_grpc_port = add_port_to_grpc_server(self._server, "[::]:0")'
    assert opened in source
    assert source.count("add_port_to_grpc_server") == 2, "its import, and this line"
    before = serve_replica.add_port_to_grpc_server
    monkeypatch.setattr(serve_replica, "add_port_to_grpc_server", before)
    bind_no_port()
    assert serve_replica.add_port_to_grpc_server(None, "[::]:0") == 0


def test_the_policy_is_one_of_ray_serves() -> None:
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"target_requests": 4.0})
    config = AutoscalingConfig(min_replicas=1, max_replicas=3, policy=policy)
    made = config.policy.get_policy()
    assert made.__name__ == Scaling.__name__
    assert made(target_requests=4.0)(told([8.0]))[0] == 2.0
