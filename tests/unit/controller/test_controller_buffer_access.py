"""How the commands find a buffer, and what they say where they may not use it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from controller_samples import fill

from buffer.connection import address, connect
from configs.load import load_config, to_yaml
from controller.main import EXIT_BAD_INPUT, EXIT_FAILED, main
from controller.run_dir import RunDir

READS = (
    "+ping",
    "+info",
    "+evalsha",
    "+script|load",
    "+time",
    "+get",
    "+hget",
    "+hgetall",
    "+hmget",
)
"""Some of what a watcher may do; the rest of the verb is refused."""


def told_by(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("leash: ") and error.count("\n") == 1
    return error


def end(run_dir: RunDir) -> None:
    run_dir.forget_redis_url()
    run_dir.write_record(replace(run_dir.read_record(), state="finished", process_started=0.0))


def test_a_url_on_the_command_line_finds_a_buffer_that_the_folder_does_not_name(
    live_run: RunDir, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1))
    end(live_run)
    command = ["depth", "--dir", str(live_run.path.parent)]
    assert main([*command, "--url", redis_url]) == 0
    assert "ready 1" in capsys.readouterr().out


def test_a_run_that_is_just_starting_is_told(
    live_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    live_run.forget_redis_url()
    assert main(["depth", "--dir", str(live_run.path.parent)]) == EXIT_BAD_INPUT
    assert "is starting" in told_by(capsys)


def test_a_password_that_the_folder_does_not_keep_is_asked_for(
    live_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    end(live_run)
    config = load_config(["buffer.url=redis://someone:secret@127.0.0.1:1/0"])
    (live_run.path / "config.yaml").write_text(to_yaml(config))
    assert main(["depth", "--dir", str(live_run.path.parent)]) == EXIT_BAD_INPUT
    error = told_by(capsys)
    assert "give the whole URL with --url" in error and "secret" not in error


def test_a_server_that_does_not_know_the_run_is_told(
    live_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["depth", "--dir", str(live_run.path.parent)]) == EXIT_FAILED
    assert f"run {live_run.name!r} is not open in this Redis" in told_by(capsys)


async def add_reader(url: str, name: str) -> None:
    redis = await connect(url)
    try:
        await redis.execute_command("ACL", "SETUSER", name, "on", ">pw", "~*", *READS)
    finally:
        await redis.aclose()


def test_what_a_user_may_not_do_is_told(
    live_run: RunDir, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1))
    asyncio.run(add_reader(redis_url, live_run.name))
    url = f"redis://{live_run.name}:pw@{address(redis_url)}/0"
    arguments = ["quarantine", "--release", "group-0", "--url", url]
    assert main([*arguments, "--dir", str(live_run.path.parent)]) == EXIT_FAILED
    assert "does not allow" in told_by(capsys)
