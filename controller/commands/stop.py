"""`make stop`: ends a run from another shell, also if its controller is gone or hangs.

The guard of a controller that died cleans up in the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal

from configs.load import ConfigError
from controller.report.summary import report_end
from controller.run_dir import RunDir
from processes.child import has_ended
from processes.leftovers import remove_leftovers
from processes.runs import end_processes, run_processes

GRACE_S = 60.0
"""Time of the parts of the end that `cluster.stop_timeout_s` does not limit."""
NUM_TIMED_WAITS = 6
"""Parts that it limits: the model, each pool, files on other hosts, Redis, and what is left."""
CLEAR_UP_S = 20.0


def stop_run(run_dir: RunDir) -> None:
    """Ask the controller to end the run, then end what is left by process id."""
    record = run_dir.read_record()
    if not record.is_here:
        _end(run_dir)
        remove_leftovers(run_dir.path)
        print(
            f"nothing of {record.name} is left on this host; its controller is on {record.host}, "
            f"which reports it as {record.state}"
        )
        for line in run_dir.left_elsewhere():
            print(line)
        return
    if record.is_alive:
        print(f"stopping {record.name} (controller {record.pid}) ...")
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGINT)
        grace_s = _grace_s(run_dir)
        if not has_ended(record.pid, grace_s):
            print(f"the controller did not end within {grace_s:g} s and is killed")
            with run_dir.ending():  # keeps its guard from recording a failure
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
                _clear_up(run_dir, "stopped", None)
    clear_up(run_dir, "stopped", None)
    print(f"{record.name} is {run_dir.read_record().state}; none of its processes is left")
    for line in run_dir.left_elsewhere():
        print(line)


def clear_up(run_dir: RunDir, state: str, error: str | None) -> None:
    """End what a dead controller left; record `state` and `error` if it has not recorded an end."""
    with run_dir.ending():
        _clear_up(run_dir, state, error)


def clear_up_if_alone(run_dir: RunDir, error: str) -> None:
    """The same for a run that has failed, unless a controller has attached to it meanwhile."""
    with run_dir.ending():
        record = run_dir.read_record()
        if record.state == "running" and not record.is_alive:
            _clear_up(run_dir, "failed", error)


def end_left_processes(run_dir: RunDir) -> None:
    """End what a dead controller left; the run goes on at once."""
    if left := run_processes(run_dir.run_id, run_dir.temporary):
        print(f"ending {len(left)} processes that the controller left")
        _end(run_dir)
    run_dir.remove_temporary()


def _end(run_dir: RunDir) -> None:
    here = run_dir.temporary if run_dir.read_record().is_here else None
    if killed := end_processes(run_dir.run_id, CLEAR_UP_S, temporary=here):
        print(f"had to kill: {', '.join(killed)}")


def _clear_up(run_dir: RunDir, state: str, error: str | None) -> None:
    end_left_processes(run_dir)
    if run_dir.read_record().state == "running":
        run_dir.forget_redis_url()
        run_dir.end(state, error)
        report_end(run_dir, print)


def _grace_s(run_dir: RunDir) -> float:
    try:
        config = run_dir.read_config()
    except ConfigError:  # it is only just being written
        return GRACE_S
    return GRACE_S + NUM_TIMED_WAITS * config.cluster.stop_timeout_s
