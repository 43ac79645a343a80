"""Starts Ray as a launch does, with the restartable actors of a rollout pool, and says what it saw.

python -m tests.support.ray_scene RUNS_FOLDER    prints one line of JSON last
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs.environment import RUN_VARIABLE
from configs.load import load_config
from controller.ray_environment import LARGEST_INLINE_ARGUMENT, prepare_environment
from controller.run_dir import RunDir
from controller.signals import StopRequest

SETTINGS = ["rollout.num_workers=1", "rollout.num_engines=1", "rollout.reward_actors=1"]
FRIEND = """
import sys
from pathlib import Path
from configs.load import load_config
from controller.ray_environment import prepare_environment
from controller.run_dir import RunDir
config = load_config([f"cluster.ray_address={sys.argv[1]}"])
prepare_environment(config.cluster)
from controller.start.placement import start_ray
run_dir = RunDir(path=Path(sys.argv[2]))
cluster = start_ray(config, run_dir)
print(cluster.host)
cluster.stop(run_dir.logs)
"""
JOIN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("joined")
"""


def main(runs: str) -> None:
    address = own_address()
    config = load_config([*SETTINGS, f"cluster.host={address}"])
    # As a task with many questions in its settings has.
    config.task.params = {"questions": "x" * (LARGEST_INLINE_ARGUMENT // 4)}
    prepare_environment(config.cluster)
    import ray
    from ray._private.utils import publish_error_to_driver

    from controller.start.placement import start_ray

    run_dir = RunDir.create(runs, "scene", "quickstart")
    os.umask(run_dir.umask)
    run_dir.write_config(config)
    os.environ[RUN_VARIABLE] = run_dir.run_id
    messages = run_dir.log_of("ray")
    cluster = start_ray(config, run_dir)
    private = cluster.private
    assert private is not None
    seen: dict[str, Any] = {"folder": str(private), "host": cluster.host}
    others = ThreadPoolExecutor()
    try:
        address_of_ray = ray.get_runtime_context().gcs_address
        joined = others.submit(friend, address_of_ray, run_dir.path)
        refused = others.submit(stranger, address_of_ray)
        pool, seen["restarted"] = restarts(config, run_dir, cluster)
        seen["noticed"] = notices(pool)
        seen["modes"] = [stat.S_IMODE(p.stat().st_mode) for p in (private, private / "token")]
        seen["longest_socket"] = max(len(str(p)) for p in private.rglob("sockets/*"))
        seen["stranger"] = refused.result()
        seen["own_address"] = address
        seen["host_of_a_joining_run"] = joined.result()
        gcs = ray._private.worker.global_worker.gcs_client
        publish_error_to_driver("node_removed", "RAYLET STACK TRACE", gcs_client=gcs)
        os.write(2, b"task_manager.cc:1: of C++\n")
        logging.getLogger("ray").error("of Ray's logger")
        print("of the launch", file=sys.stderr)
        deadline = time.monotonic() + 120
        while "STACK" not in messages.read_text():
            assert time.monotonic() < deadline, "Ray's message came nowhere"
            time.sleep(0.05)
        seen["places"] = places(pool)
        seen["draining"] = draining(pool)
        (logs,) = (private / "ray").glob("session_2*/logs")
        (logs / "planted").symlink_to("/etc/passwd")
    finally:
        cluster.stop(run_dir.logs)
        others.shutdown(wait=False, cancel_futures=True)
    kept = {path.name: path for path in (run_dir.logs / "ray").rglob("*")}
    seen["kept"] = sorted(kept)
    seen["messages"] = messages.read_text()
    seen["is_gone"] = not private.exists()
    modes = {stat.S_IMODE(p.stat().st_mode) for p in run_dir.path.rglob("*") if p.is_file()}
    seen["file_modes"] = sorted(modes)
    print(json.dumps(seen))


def restarts(config: Any, run_dir: RunDir, cluster: Any) -> tuple[Any, dict[str, bool]]:
    """A pool, and whether each actor that Ray may start anew comes back after SIGKILL."""
    import ray

    from rollout_pool.pool import RolloutPool
    from tests.support.rollout import rollout_spec

    spec = rollout_spec(
        config=config.rollout,
        task=config.task,
        weight_sync=config.weight_sync,
        buffer=config.buffer,
        redis_url="redis://127.0.0.1:1/0",
        run=run_dir.name,
        run_dir=str(run_dir.path),
        host=cluster.host,
    )
    engine, worker = cluster.reserve([[{"CPU": 1.0}]] * 2, 60.0, StopRequest())
    pool = RolloutPool.create(spec, [engine], worker)
    pool.start()  # engine and receiver find no Redis, which they survive
    owners = {one.name: one.handle for one in (*pool._engines.values(), *pool._receivers.values())}
    members = {**pool._workers, **owners, **pool._scorers}
    first = ray.get([handle.pid.remote() for handle in members.values()], timeout=180)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    pids = zip(members.items(), first, strict=True)
    return pool, {name: new_pid(handle) != pid for (name, handle), pid in pids}


def notices(pool: Any) -> dict[str, list[bool]]:
    """Whether an actor stays the same at SIGTERM and tells of it, and ends at a second one."""
    import ray
    from ray.exceptions import RayActorError

    seen: dict[str, list[bool]] = {}
    for name in ("engine-0", "worker-0"):
        handle = pool._handle(name)
        pid = new_pid(handle)
        noticed, lost = pool.noticed(name), pool.lost(name)
        (early, _) = ray.wait([noticed, lost], timeout=1)
        os.kill(pid, signal.SIGTERM)
        ray.get(noticed, timeout=180)
        is_same = new_pid(handle) == pid
        os.kill(pid, signal.SIGTERM)
        try:
            ray.get(lost, timeout=180)
        except RayActorError:
            seen[name] = [not early, is_same, new_pid(handle) != pid]
    return seen


def places(pool: Any) -> list[int]:
    """The free places before and after an engine's is taken."""
    import ray
    from ray.util.placement_group import placement_group

    before, group = pool.count_places(), placement_group([pool._bundle])
    ray.get(group.ready(), timeout=120)
    deadline = time.monotonic() + 120
    while (after := pool.count_places()) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    return [before, after]


def draining(pool: Any) -> bool:
    """Whether the pool knows of a node that Ray is draining."""
    import ray

    context = ray.get_runtime_context()
    before = pool.draining_nodes()
    command = [str(Path(sys.executable).with_name("ray")), "drain-node"]
    command += ["--address", context.gcs_address, "--node-id", context.get_node_id()]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    command += ["--deadline-remaining-seconds", "600"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return not before and pool.draining_nodes() == {context.get_node_id()}


def new_pid(handle: Any) -> int:
    """Returns the pid of the next life: calls fail while an actor is being started anew."""
    import ray
    from ray.exceptions import ActorDiedError, RayActorError

    deadline = time.monotonic() + 180
    while True:
        try:
            return int(ray.get(handle.pid.remote(), timeout=180))
        except ActorDiedError:
            raise
        except RayActorError:
            assert time.monotonic() < deadline, "it did not come back"
            time.sleep(0.2)


def own_address() -> str:
    """Returns the address of the interface towards other machines; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def friend(address: str, folder: Path) -> str:
    """Where a second run, which joins this Ray by its token, has its servers listen."""
    command = [sys.executable, "-c", FRIEND, address, str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return (told.stdout or told.stderr[-2000:]).strip().splitlines()[-1]


def stranger(address: str) -> str:
    """Returns Ray's answer to a process without the token."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    told = subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env=environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return told.stdout + told.stderr[-2000:]


if __name__ == "__main__":
    main(sys.argv[1])
