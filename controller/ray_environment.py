"""What Ray reads from the environment, most of it when it is first imported: set before that.

A Ray that is started here hands all of it on to its own processes. The head of a cluster that was
there before needs the same in its own environment: docs/cluster.md.
"""

from __future__ import annotations

import os

from configs.schema import ClusterConfig

LOOPBACK = "127.0.0.1"
AUTH_MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"

OUTLAST_S = 120
"""A host that is cut off for less than this is not given up. Redis clients try for a minute; Ray's
own connections come back up to half a minute after the network does."""
CHECK_PERIOD_S = 5
CHECK_TIMEOUT_S = 5
"""A check that fails at once takes a period, one that gets no answer this much longer."""

HEALTH_CHECKS = {
    "RAY_health_check_period_ms": CHECK_PERIOD_S * 1000,
    "RAY_health_check_timeout_ms": CHECK_TIMEOUT_S * 1000,
    "RAY_health_check_failure_threshold": OUTLAST_S // CHECK_PERIOD_S,
}
CLUSTER_LIMITS = {
    **HEALTH_CHECKS,
    # A node, or a process on it, that cannot reach the head for so long ends itself. Without a
    # network between them a head that does not answer is gone: Ray's shorter limit is better there.
    "RAY_gcs_rpc_server_reconnect_timeout_s": OUTLAST_S,
}
LARGEST_INLINE_ARGUMENT = 4 * 2**20
"""Bytes. Larger ones would live in the object store of this process, which forgets them: Ray could
not start an actor again that was made with one."""


def prepare_environment(cluster: ClusterConfig) -> None:
    """Call it before the first `import ray`."""
    is_local = cluster.ray_address is None
    if is_local and cluster.host in (None, LOOPBACK):
        # Ray replaces a loopback address by the machine's own unless clusters are switched off. It
        # documents this variable for other systems alone.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if is_local:
        os.environ[AUTH_MODE] = "token"
    else:
        os.environ.setdefault(AUTH_MODE, "token")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    os.environ.setdefault("RAY_max_direct_call_object_size", str(LARGEST_INLINE_ARGUMENT))
    for name, value in (HEALTH_CHECKS if is_local else CLUSTER_LIMITS).items():
        os.environ.setdefault(name, str(value))
