"""Fixtures that the laboratory's tests share with the product's."""

from tests.conftest import frail_redis, own_state_dir, redis_server, running_redis

__all__ = ["frail_redis", "own_state_dir", "redis_server", "running_redis"]
