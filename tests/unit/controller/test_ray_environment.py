from __future__ import annotations

import json
import os
import subprocess
import sys

from controller.ray_environment import AUTH_MODE, CLUSTER_LIMITS
from tests.support.repository import ROOT

SHOW = """
import json, os, sys
from configs.schema import ClusterConfig
from controller.ray_environment import prepare_environment
prepare_environment(ClusterConfig(**json.loads(sys.argv[1])))
assert "ray" not in sys.modules
print(json.dumps(dict(os.environ)))
"""


def prepared(cluster: dict[str, str], **environment: str) -> dict[str, str]:
    """The environment after `prepare_environment`, in a process that begins with `environment`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    output = subprocess.run(
        [sys.executable, "-c", SHOW, json.dumps(cluster)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = json.loads(output.stdout)
    assert isinstance(found, dict)
    return found


def test_local_ray_requires_a_token_and_outlasts_redis_clients() -> None:
    local = prepared({}, RAY_AUTH_MODE="disabled")
    assert local["RAY_AUTH_MODE"] == "token"
    assert local["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert local["RAY_prestart_worker_first_driver"] == "0"
    period_s = int(local["RAY_health_check_period_ms"]) / 1000
    assert period_s * int(local["RAY_health_check_failure_threshold"]) >= 2 * 60


def test_cluster_is_joined_by_token_unless_disabled() -> None:
    cluster = {"ray_address": "10.0.0.5:6379"}
    joined = prepared(cluster)
    assert joined["RAY_AUTH_MODE"] == "token"
    assert int(joined["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 2 * 60
    own = prepared(cluster, RAY_AUTH_MODE="disabled", RAY_health_check_period_ms="7")
    assert own["RAY_AUTH_MODE"] == "disabled"
    assert own["RAY_health_check_period_ms"] == "7"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in own


def test_cluster_of_the_docs_has_the_limits_of_a_launch() -> None:
    file = ROOT / "deploy" / "ray.env"
    lines = [line for line in file.read_text().splitlines() if line.startswith("export ")]
    written = dict(line.removeprefix("export ").split("=") for line in lines)
    assert written == {
        AUTH_MODE: "token",
        **{name: str(value) for name, value in CLUSTER_LIMITS.items()},
    }
