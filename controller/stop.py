"""`make stop`: ends a run from another shell, also one whose controller is gone or hangs."""

from __future__ import annotations

import os
import select
import signal

from controller.run_dir import RunDir
from controller.supervise import end_processes, run_processes

GRACE_S = 60.0


def stop_run(run_dir: RunDir) -> None:
    """Ask the controller to end the run; whatever is left after that is ended by process id."""
    record = run_dir.read_record()
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
