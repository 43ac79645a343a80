"""`make depth`: the line itself, and the command against a real server."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
from rich.console import Console

from buffer.redis.server import EmbeddedServer
from configs.schema import BufferConfig
from controller.commands.depth import depth_line, print_depth
from controller.run_dir import RunDir
from tests.support.controller.buffers import Command, fill
from tests.support.controller.records import STATS


def test_line_says_where_every_group_is() -> None:
    line = depth_line("night", STATS)
    assert "\n" not in line
    assert line.startswith("night | ready 32 (staleness 0: 9, 1: 15, 2: 8) | leased 16 | running 0")
    assert "in use 48 of 32 | consumed 592" in line  # an engine lags by one: (2 + 1 - 1) * 16
    assert line.endswith("dropped 20 (stale: 20) | quarantined 0 | blocked pushes 0")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"capacity_groups": 64, "capacity_bytes": 2**20, "oldest_ready_age_s": 75.0},
            ["capacity 48 of 64 groups", "capacity 19.5 KiB of 1 MiB", "oldest 1m 15s"],
        ),
        ({"engine_versions": {}, "engines_gone": True}, ["in use 48 of 0 (no engine serves)"]),
        ({"push_blocked": 3, "push_blocked_s": 12.5}, ["blocked pushes 3 (12 s)"]),
    ],
)
def test_line_shows_capacity_lost_engines_and_waiting_pushes(
    changes: dict[str, Any], parts: list[str]
) -> None:
    line = depth_line("night", replace(STATS, **changes))
    assert all(part in line for part in parts), line


def test_object_has_the_numbers_of_the_line(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=3, leased=2))
    found = json.loads(leash("depth", "--json"))
    assert (found["run"], found["ready"], found["leased"]) == (live_run.name, 1, 2)
    assert found["by_staleness"] == {"0": 1}


def test_command_reads_the_buffer_of_a_running_run(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=3, leased=2))
    printed = leash("depth")
    assert printed.count("\n") == 1
    assert f"{live_run.name} | ready 1 (staleness 0: 1) | leased 2 | running 0" in printed


class Reader(io.StringIO):
    """A file that does something once it is told of the first group."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action = action

    def write(self, text: str) -> int:
        if "ready 1" in text:
            self._action()
        return super().write(text)


def test_watch_draws_lines_until_the_run_is_over(live_run: RunDir, redis_url: str) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1))
    output = Reader(lambda: live_run.end("finished"))
    print_depth(live_run, watch=True, console=Console(file=output, width=200))
    first, last = output.getvalue().splitlines()
    assert "ready 1" in first and last == f"{live_run.name} is over (finished)"


@pytest.mark.slow
def test_watch_of_a_lost_server_ends_with_a_message(run_dir: RunDir) -> None:
    log = run_dir.log_of("redis")
    server = EmbeddedServer.start(run_dir.path / "redis", BufferConfig(), "127.0.0.1", log)
    asyncio.run(fill(server.url, run_dir.name, pushed=1))
    run_dir.write_redis_url(server.url)
    console = Console(file=Reader(lambda: server.stop(60.0)), width=200)
    with pytest.raises(ConnectionError, match=r"did not answer within .*: it is gone or busy"):
        print_depth(run_dir, watch=True, console=console, timeout_s=2.0)


def test_ctrl_c_ends_the_watch_with_success(live_run: RunDir, redis_url: str) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1))
    command = [sys.executable, "-m", "controller.main", "depth", "--watch"]
    with subprocess.Popen(
        [*command, "--dir", str(live_run.path.parent)], stdout=subprocess.PIPE, text=True
    ) as watch:
        try:
            assert watch.stdout is not None
            assert "ready 1" in watch.stdout.readline()
            watch.send_signal(signal.SIGINT)
            rest, _ = watch.communicate(timeout=60)
        finally:
            watch.kill()
    assert watch.returncode == 0
    assert "Traceback" not in rest


def test_data_of_a_run_that_is_over_is_served_for_the_command(
    run_dir: RunDir, leash: Command
) -> None:
    folder, log = run_dir.path / "redis", run_dir.log_of("redis")
    server = EmbeddedServer.start(folder, BufferConfig(), "127.0.0.1", log)
    try:
        asyncio.run(fill(server.url, run_dir.name, pushed=2))
    finally:
        server.stop(timeout_s=60)
    run_dir.write_record(replace(run_dir.read_record(), state="finished", process_started=0.0))
    assert "ready 2" in leash("depth", "--run", run_dir.name)
    processes = psutil.process_iter(["cmdline"])
    assert not [p for p in processes if str(folder) in str(p.info["cmdline"])]
