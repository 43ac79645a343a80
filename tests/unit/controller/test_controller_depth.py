"""`make depth`: the line itself, and the command against a real server."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from controller_samples import STATS, fill
from rich.console import Console

from buffer.redis.server import EmbeddedServer
from configs.schema import BufferConfig
from controller.commands.depth import depth_line, print_depth
from controller.main import EXIT_BAD_INPUT, EXIT_FAILED, main
from controller.run_dir import RunDir


def fill_now(run_dir: RunDir, pushed: int, leased: int = 0) -> None:
    url = run_dir.read_redis_url()
    assert url is not None
    asyncio.run(fill(url, run_dir.name, pushed=pushed, leased=leased))


def test_line_says_where_every_group_is() -> None:
    line = depth_line("night", STATS)
    assert "\n" not in line
    for part in (
        "night | ready 32 (staleness 0: 9, 1: 15, 2: 8)",
        "leased 16",
        "running 0",
        "in use 48 of 32",  # an engine lags by one: (2 + 1 - 1) * 16
        "consumed 592",
        "dropped 20 (stale: 20)",
        "quarantined 0",
        "blocked pushes 0",
    ):
        assert part in line, line


def test_line_says_how_much_of_the_capacity_is_used() -> None:
    stats = replace(STATS, capacity_groups=64, capacity_bytes=2**20, oldest_ready_age_s=75.0)
    line = depth_line("night", stats)
    assert "capacity 48 of 64 groups" in line
    assert "capacity 19.5 KiB of 1 MiB" in line
    assert "oldest 1m 15s" in line


def test_fleet_that_is_gone_leaves_no_credits() -> None:
    line = depth_line("night", replace(STATS, engine_versions={}, engines_gone=True))
    assert "in use 48 of 0 (no engine serves)" in line


def test_pushes_that_had_to_wait_are_in_the_line() -> None:
    line = depth_line("night", replace(STATS, push_blocked=3, push_blocked_s=12.5))
    assert line.endswith("blocked pushes 3 (12 s)")


def test_command_reads_the_buffer_of_a_running_run(
    live_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_now(live_run, pushed=3, leased=2)
    assert main(["depth", "--dir", str(live_run.path.parent)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"{live_run.name} | ready 1 (staleness 0: 1) | leased 2 | running 0" in printed


def test_watch_draws_lines_until_the_run_is_over(live_run: RunDir) -> None:
    fill_now(live_run, pushed=1)
    console = Console(width=200)
    timer = threading.Timer(1.0, live_run.end, ["finished"])
    timer.start()
    with console.capture() as capture:
        print_depth(live_run, watch=True, console=console)
    timer.join()
    first, *_, last = capture.get().splitlines()
    assert "ready 1" in first
    assert last == f"{live_run.name} is over (finished)"


@pytest.mark.slow
def test_watch_of_a_lost_server_ends_with_a_message(live_run: RunDir, tmp_path: Path) -> None:
    server = EmbeddedServer.start(
        tmp_path / "redis", BufferConfig(), "127.0.0.1", tmp_path / "redis.log"
    )
    live_run.write_redis_url(server.url)
    fill_now(live_run, pushed=1)

    class StopsServer(io.StringIO):
        def write(self, text: str) -> int:
            if "ready 1" in text:
                server.stop(5.0)
            return super().write(text)

    with pytest.raises(ConnectionError, match=r"did not answer within .*: it is gone or busy"):
        print_depth(live_run, watch=True, console=Console(file=StopsServer(), width=200))


def test_ctrl_c_ends_the_watch_with_success(live_run: RunDir) -> None:
    fill_now(live_run, pushed=1)
    command = [sys.executable, "-m", "controller.main", "depth", "--watch"]
    with subprocess.Popen(
        [*command, "--dir", str(live_run.path.parent)], stdout=subprocess.PIPE, text=True
    ) as watch:
        try:
            assert watch.stdout is not None
            assert "ready 1" in watch.stdout.readline()
            watch.send_signal(signal.SIGINT)
            rest, _ = watch.communicate(timeout=20)
        finally:
            watch.kill()
    assert watch.returncode == 0
    assert "Traceback" not in rest


def test_buffer_whose_server_is_away_is_one_line(
    live_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    live_run.write_redis_url("redis://127.0.0.1:1/0")
    assert main(["depth", "--dir", str(live_run.path.parent)]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith("leash: cannot reach Redis at 127.0.0.1:1") and error.count("\n") == 1


def test_data_of_a_run_that_is_over_is_served_for_the_command(
    live_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    server = EmbeddedServer.start(
        live_run.path / "redis", BufferConfig(), "127.0.0.1", live_run.log_of("redis")
    )
    try:
        asyncio.run(fill(server.url, live_run.name, pushed=2))
    finally:
        server.stop(timeout_s=10)
    live_run.forget_redis_url()
    live_run.write_record(replace(live_run.read_record(), state="finished", process_started=0.0))
    assert main(["depth", "--dir", str(live_run.path.parent), "--run", live_run.name]) == 0
    assert "ready 2" in capsys.readouterr().out
    folder = str(live_run.path / "redis")
    left = [p for p in psutil.process_iter(["cmdline"]) if folder in str(p.info["cmdline"])]
    assert left == []


def test_finished_run_without_data_is_an_error(
    live_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    live_run.forget_redis_url()
    live_run.write_record(replace(live_run.read_record(), state="finished", process_started=0.0))
    assert main(["depth", "--dir", str(live_run.path.parent)]) == EXIT_BAD_INPUT
    assert "is over and" in capsys.readouterr().err
