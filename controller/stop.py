"""`make stop`: ends a run from another shell, also one whose controller is gone or hangs."""

from __future__ import annotations

import os
import select
import signal

from controller.run_dir import RunDir, RunRecord
from controller.supervise import end_processes, run_processes
from rollout_pool.engines.leftovers import remove_leftovers

GRACE_S = 60.0


def stop_run(run_dir: RunDir) -> None:
    """Ask the controller to end the run; whatever is left after that is ended by process id."""
    record = run_dir.read_record()
    if not record.is_here:
        _stop_on_this_host(run_dir, record)
        return
    if record.is_alive:
        print(f"stopping {record.name} (controller {record.pid}) ...")
        os.kill(record.pid, signal.SIGINT)
        _wait_for_end(record.pid)
    left = run_processes(run_dir.run_id, run_dir.temporary)
    if left:
        print(f"ending {len(left)} processes that the controller left")
        killed = end_processes(run_dir.run_id, timeout_s=20.0, temporary=run_dir.temporary)
        if killed:
            print(f"had to kill: {', '.join(killed)}")
    run_dir.remove_temporary()
    if run_dir.read_record().state == "running":
        run_dir.end("stopped")
        run_dir.forget_redis_url()
    print(f"{record.name} is {run_dir.read_record().state}; nothing of it runs any more")
    _tell_other_hosts(run_dir)


def _stop_on_this_host(run_dir: RunDir, record: RunRecord) -> None:
    """End what the run has here; its controller and its state belong to another machine."""
    killed = end_processes(run_dir.run_id, timeout_s=20.0)
    if killed:
        print(f"had to kill: {', '.join(killed)}")
    remove_leftovers(run_dir.path)
    print(
        f"nothing of {record.name} is left on this host; its controller's host is {record.host}, "
        f"where it is said to be {record.state}"
    )
    _tell_other_hosts(run_dir)


def _tell_other_hosts(run_dir: RunDir) -> None:
    for line in run_dir.left_elsewhere():
        print(line)


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Tells of the end also of a process that its parent has not reaped yet.
        has_ended, _, _ = select.select([descriptor], [], [], GRACE_S)
        if not has_ended:
            print(f"the controller did not end within {GRACE_S:g} s and is killed")
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(descriptor)
