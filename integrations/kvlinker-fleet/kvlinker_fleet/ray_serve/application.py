"""The fleet as an application of Ray Serve: ``build`` is what a configuration's ``import_path``
names."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from kvlinker.doors.http.edge.address import check_address
from kvlinker.settings import Settings
from kvlinker_fleet.ray_serve.deployments import Builder, Ingress, Server
from kvlinker_fleet.ray_serve.options import FleetOptions, check, key_of_fleet, read_options
from kvlinker_fleet.ray_serve.scaling import Scaling
from kvlinker_fleet.ray_serve.serving import LAST_SECONDS

HEALTH_SECONDS = 2.0
"""The seconds between two questions whether a process is well; the third bad answer ends it."""

LOOK_BACK_SECONDS = 10.0
"""The seconds of load that a decision to scale looks at."""

INGRESS_CPUS = 0.1
"""The resources that Ray sets aside for an ingress: enough for it not to stand on a machine without
processors for work, as a cluster's head."""

POLICY = f"{Scaling.__module__}:{Scaling.__name__}"
"""The place where Ray Serve's controller finds the policy."""

STARTS = 3
"""The number of failed starts of a process, one after the other, at which Ray Serve stops trying.
Chosen by hand."""


def build(args: dict[str, Any]) -> Application:
    """Return the application that ``args``, the fields of ``FleetOptions``, describe. Raises
    InvalidRequestError if they are wrong, or others would reach servers without keys."""
    options = read_options(args)
    settings = options.read_settings()
    key_of_fleet(settings)
    check(options, settings)
    for address in (settings.host, *_nodes()):
        check_address(address, settings.accepted_keys)
    gpus = _gpus(settings) if options.gpus is None else options.gpus
    if options.cpus is not None:
        threads = {"threads": max(1, int(options.cpus))}
        options = options.model_copy(update={"settings": threads | options.settings})
    common = {
        "max_ongoing_requests": 1000,
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": settings.drain_timeout + 2 * LAST_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": STARTS,
    }
    common_of_models = common | {
        "ray_actor_options": {"num_cpus": options.cpus or 1, "num_gpus": gpus}
    }
    builders = None
    if options.build_replicas:
        builders = serve.deployment(
            Builder, num_replicas=options.build_replicas, **common_of_models
        ).bind(options)
    servers = serve.deployment(Server, **_number(options), **common_of_models).bind(
        options, builders
    )
    resources = {options.ingress_resource: 1} if options.ingress_resource else {}
    ingresses = serve.deployment(
        Ingress,
        num_replicas=options.ingresses,
        ray_actor_options={"num_cpus": INGRESS_CPUS, "resources": resources},
        **common,
    )
    return ingresses.bind(options, [servers] if builders is None else [servers, builders])


def _number(options: FleetOptions) -> dict[str, Any]:
    """Return the number of servers, or the figures that it follows."""
    if options.replicas is not None:
        return {"num_replicas": options.replicas}
    targets = {"target_requests": options.target_requests, "target_ttft": options.target_ttft}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            upscale_delay_s=options.upscale_delay,
            downscale_delay_s=options.downscale_delay,
            look_back_period_s=LOOK_BACK_SECONDS,
            policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs=targets),
        )
    }


def _nodes() -> list[str]:
    """Return the addresses of the cluster's machines, on which servers listen."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _gpus(settings: Settings) -> int:
    """Return how many GPUs one server uses: none where Ray has none, or another device is set."""
    if not ray.cluster_resources().get("GPU") or not settings.device.startswith(("auto", "cuda")):
        return 0
    if settings.engine == "embedded":
        return 1
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    product = 1
    for size in sizes:
        product *= int(settings.vllm_options.get(size, 1))
    return product
