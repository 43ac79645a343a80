"""Owns the Ray of a run on this machine, so that the pools outlive a controller that is killed.

Run as a program: `keeper.py <folder of the run> <what ray.init gets, as JSON>`. It prints one line
of JSON, with Ray's address or the reason why that did not start. It ends when it is asked to, when
the run has ended, and with the run if no controller attaches to it within run.attach_timeout_s.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._private.parameter import RayParams

from configs.environment import FORK_SERVERS_VARIABLE
from controller import no_agent
from controller.run_dir import RunDir
from controller.start import ray_worker
from controller.start.ray_keeper import RECORD
from processes import fork_server
from processes.child import started_at

POLL_S = 1.0


def main(folder: str, options: str) -> None:
    run_dir = RunDir(path=Path(folder))
    is_asked = threading.Event()
    _start_less()
    if (servers := os.environ.get(FORK_SERVERS_VARIABLE)) is not None:
        fork_server.keep(Path(servers))
        # A path from the root replaces that of Ray's folder.
        ray_constants.SETUP_WORKER_FILENAME = ray_worker.__file__
    try:
        ray.init(**json.loads(options), log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # a bare Exception if Ray's node takes longer than half a minute
        print(json.dumps({"error": str(error)}), flush=True)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: is_asked.set())  # instead of Ray's
    assert run_dir.temporary is not None
    address = ray.get_runtime_context().gcs_address
    record = {"pid": os.getpid(), "started": started_at(os.getpid()), "address": address}
    (run_dir.temporary / RECORD).write_text(json.dumps(record))
    print(json.dumps({"address": address}), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads further lines
    try:
        _watch(run_dir, is_asked)
    finally:
        ray.shutdown()


def _start_less() -> None:
    """Ray on one machine without its autoscaler, the copier of logs, the dashboard and its agent:
    each is a process that imports for seconds, and none has anything to do here. No option leaves
    them out.
    """
    RayParams.no_monitor = property(lambda _self: True, lambda _self, _value: None)
    RayParams.include_log_monitor = property(lambda _self: False, lambda _self, _value: None)
    Node.start_api_server = lambda _self, **_options: None
    # It would make Ray's folder again, which the end of a run removes as a whole.
    Node.destroy_external_storage = lambda _self: None
    python = services._build_python_executable_command_memory_profileable

    def build_command(component: str, *others: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", no_agent.__file__]
        return list(python(component, *others, **options))

    services._build_python_executable_command_memory_profileable = build_command
    # It imports all that the dashboard needs, to see whether that is installed.
    ray._private.utils.get_dashboard_dependency_error = lambda: None


def _watch(run_dir: RunDir, is_asked: threading.Event) -> None:
    """Returns when the run has ended, or the keeper is asked to end."""
    timeout_s = run_dir.read_config().run.attach_timeout_s
    seen_at = time.monotonic()
    while not is_asked.wait(POLL_S):
        record = run_dir.read_record()
        if record.is_running:
            seen_at = time.monotonic()
        elif record.state != "running":
            return
        elif time.monotonic() > seen_at + timeout_s:
            from controller.commands.stop import clear_up_if_alone  # slow, and rarely needed

            why = "its controller was killed, and no other one attached within "
            clear_up_if_alone(run_dir, f"{why}run.attach_timeout_s={timeout_s:g}")
            seen_at = time.monotonic()


if __name__ == "__main__":
    main(*sys.argv[1:])
