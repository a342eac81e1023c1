"""Variables that Ray reads when it is imported."""

from __future__ import annotations

import os

_ALWAYS = {"RAY_USAGE_STATS_ENABLED": "0"}
_ALONE = {
    # Ray then calls this machine 127.0.0.1, and so does not listen on any other address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray takes its workers for batch work, which gives way to whatever else runs. Servers do not.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}


def prepare(*, alone: bool) -> None:
    """Set the variables of Ray, before it is imported: no usage statistics, and no address but
    loopback for a cluster that is this machine ``alone``."""
    os.environ.update(_ALWAYS | (_ALONE if alone else {}))
