"""The parts of a fleet: the numbers of replicas and ingresses, their resources, and when there are
to be more or fewer."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlinker.base.errors import InvalidRequestError
from kvlinker.settings import Settings, load_settings


class FleetOptions(BaseModel):
    """The options of a fleet, as ``kvlinker fleet`` makes them, or as ``args`` in Ray Serve's
    configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int | None = Field(default=None, ge=1)
    """The number of replicas; None if it follows the load."""

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)

    build_replicas: int = Field(default=0, ge=0)
    """The number of additional ones that compute chunks for these, and answer no requests."""

    ingresses: int = Field(default=2, ge=1)
    """The processes that take requests: ``ingresses`` on the same address of one machine, or one on
    each of ``ingresses`` machines."""

    cpus: float | None = Field(default=None, gt=0)
    """The processors that Ray sets aside for each replica, which computes in as many threads unless
    ``threads`` is set; None for one, and as many threads as its machine has."""

    gpus: float | None = Field(default=None, ge=0)
    """The GPUs that Ray gives each replica; None for as many as its engine uses, where there are
    any."""

    ingress_resource: str | None = None
    """The name of a resource of which each ingress takes one, where Ray is to place them on
    machines that have it."""

    target_requests: float = Field(default=8.0, gt=0)
    """The requests under way, in each replica, that make more of them."""

    target_ttft: float | None = Field(default=None, gt=0)
    """The time to the first token, in seconds, beyond which there are to be more replicas."""

    upscale_delay: float = Field(default=10.0, ge=0)
    downscale_delay: float = Field(default=120.0, ge=0)
    """Seconds for which the load must be so."""

    settings: dict[str, Any] = Field(default={}, repr=False)
    """Settings of each server, by name. Others come from the variables and the file of the machine
    that it runs on."""

    log_pipe: str | None = None
    """A pipe that takes the logs of all processes; None if each writes its own."""

    @model_validator(mode="after")
    def _scales(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}: it must be min_replicas"
                f" ({self.min_replicas}) or more"
            )
        return self

    @property
    def most_models(self) -> int:
        """The most replicas that there will be, those that build for others included."""
        return (self.replicas or self.max_replicas) + self.build_replicas

    def read_settings(self, **changes: Any) -> Settings:
        """Return the settings of a server on this machine. Raises InvalidRequestError."""
        return load_settings(**self.settings | changes)


def read_options(given: dict[str, Any]) -> FleetOptions:
    """Read the options of a fleet. Raises InvalidRequestError, which names the bad ones."""
    try:
        return FleetOptions.model_validate(given)
    except ValidationError as error:
        complaints = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'options'}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)
        )
        raise InvalidRequestError(f"The fleet's options are wrong: {complaints}.") from None


def check(options: FleetOptions, settings: Settings) -> None:
    """Raise InvalidRequestError for settings that replicas cannot work with: those by which a
    replica's vLLM would itself request GPUs of Ray, and wait forever for those that its replica
    has; and builders from which no replica could fetch."""
    if options.build_replicas and not (settings.redis_url or settings.object_url):
        raise InvalidRequestError(
            "Builders hand chunks over through Redis or an object store: set redis_url or"
            " object_url.",
            param="build_replicas",
        )
    if settings.engine == "vllm" and "ray" in (
        settings.vllm_options.get("distributed_executor_backend"),
        settings.vllm_options.get("data_parallel_backend"),
    ):
        raise InvalidRequestError(
            "A replica of a fleet is on one machine: leave Ray out of vllm_options. For a model on"
            " several machines, start each server by `kvlinker serve`, and `kvlinker router` before"
            " them.",
            param="vllm_options",
        )


def key_of_fleet(settings: Settings) -> str | None:
    """Return the key by which an ingress asks replicas for their residency; None if there are no
    keys. Raises InvalidRequestError if none of them is an admin's."""
    if settings.accepted_keys and not settings.admin_keys:
        raise InvalidRequestError(
            "A fleet on several machines that has api_keys needs an admin's, by which its ingresses"
            " read what replicas have in memory: set admin_keys (KVLINKER_ADMIN_KEYS)."
        )
    return next(iter(settings.admin_keys), None)
