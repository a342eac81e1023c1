"""Fixtures that the fleet's tests share with the core's."""

from tests.conftest import (
    frail_redis,
    keyed,
    own_state_dir,
    postgres_server,
    redis_server,
    running_redis,
    served,
)

__all__ = [
    "frail_redis",
    "keyed",
    "own_state_dir",
    "postgres_server",
    "redis_server",
    "running_redis",
    "served",
]
