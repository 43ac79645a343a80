"""Environment variables of Ray, which it mostly reads when it is first imported.

A Ray that is started here passes them on to its own processes. An existing cluster needs the same
variables in the environment of its `ray start`: docs/cluster.md.
"""

from __future__ import annotations

import os

from configs.schema import ClusterConfig

LOOPBACK = "127.0.0.1"
AUTH_MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"

OUTLAST_S = 120
"""Shorter network outages of a host are tolerated: Ray's own connections come back up to RETURN_S
after the network does."""
RETURN_S = 30
CHECK_PERIOD_S = 5
CHECK_TIMEOUT_S = 5
"""A check that fails at once takes a period; one without any answer takes this much longer."""

HEALTH_CHECKS = {
    "RAY_health_check_period_ms": CHECK_PERIOD_S * 1000,
    "RAY_health_check_timeout_ms": CHECK_TIMEOUT_S * 1000,
    "RAY_health_check_failure_threshold": OUTLAST_S // CHECK_PERIOD_S,
}
CLUSTER_LIMITS = {
    **HEALTH_CHECKS,
    # A node, or a process on it, that cannot reach the head for this long exits. On one machine a
    # head that does not answer is dead, so Ray's shorter default is better there.
    "RAY_gcs_rpc_server_reconnect_timeout_s": OUTLAST_S,
}
LARGEST_INLINE_ARGUMENT = 4 * 2**20
"""Bytes. Larger ones go to this process's object store, which drops them: Ray could then not
restart an actor that was created with one."""


def prepare_environment(cluster: ClusterConfig) -> None:
    """Set the variables; call it before the first `import ray`."""
    is_local = cluster.ray_address is None
    if is_local and cluster.host in (None, LOOPBACK):
        # Ray replaces a loopback address by the machine's own unless clusters are disabled. It
        # documents this variable only for other systems.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if is_local:
        os.environ[AUTH_MODE] = "token"
        # Processes for each of the nominal CPUs, of which none would fit our actors' environments.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Raylet's first try to reach its own object store comes too early, and it slept a second.
        os.environ.setdefault("RAY_raylet_client_connect_timeout_milliseconds", "20")
        os.environ.setdefault("RAY_raylet_client_num_connect_attempts", "500")
    else:
        os.environ.setdefault(AUTH_MODE, "token")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    os.environ.setdefault("RAY_max_direct_call_object_size", str(LARGEST_INLINE_ARGUMENT))
    for name, value in (HEALTH_CHECKS if is_local else CLUSTER_LIMITS).items():
        os.environ.setdefault(name, str(value))
