"""How the commands find a buffer, and what they say where they may not use it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from buffer.redis.address import address, with_password
from buffer.redis.connection import connect
from configs.load import load_config
from controller.main import EXIT_BAD_INPUT, EXIT_FAILED
from controller.run_dir import RunDir
from tests.support.controller.buffers import Command, fill

READS = [
    "+ping",
    "+info",
    "+evalsha",
    "+script|load",
    "+time",
    "+get",
    "+hget",
    "+hgetall",
    "+hmget",
]
"""Some of what a watcher may do; the rest of the verb is refused."""


def end(run_dir: RunDir) -> None:
    """Its controller still writes the report."""
    run_dir.forget_redis_url()
    run_dir.write_record(replace(run_dir.read_record(), state="finished"))


def test_url_on_the_command_line_finds_a_buffer_that_the_folder_does_not_name(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1))
    end(live_run)
    assert "ready 1" in leash("depth", "--url", redis_url)


def test_run_without_an_address_of_its_buffer_says_why(run_dir: RunDir, leash: Command) -> None:
    assert "is starting" in leash("depth", exit_code=EXIT_BAD_INPUT)
    end(run_dir)
    assert "is over and" in leash("depth", exit_code=EXIT_BAD_INPUT)
    config = load_config(["buffer.url=redis://someone:secret@127.0.0.1:1/0"])
    run_dir.write_config(config)
    error = leash("depth", exit_code=EXIT_BAD_INPUT)
    assert "set LEASH_REDIS_PASSWORD" in error and "secret" not in error


SHOW = """
import os, sys
from buffer.redis.address import with_password
print(*map(with_password, sys.argv[1:]), os.environ.get("LEASH_REDIS_PASSWORD"))
"""


def test_password_comes_from_the_environment_and_is_inherited_by_no_process() -> None:
    urls = {
        "redis://h:1/0": "redis://:p%40%2F%3Aw@h:1/0",
        "rediss://me@h/0?ssl_certfile=F": "rediss://me:p%40%2F%3Aw@h/0?ssl_certfile=F",
        "redis://me@h:1?password=***": "redis://me:p%40%2F%3Aw@h:1",
        "redis://me:***@h:1": "redis://me:p%40%2F%3Aw@h:1",
        "unix:///run/redis.sock": "unix://:p%40%2F%3Aw@/run/redis.sock",
        "redis://me:own@h:1": "redis://me:own@h:1",
    }
    printed = subprocess.check_output(
        [sys.executable, "-c", SHOW, *urls],
        text=True,
        env={**os.environ, "LEASH_REDIS_PASSWORD": "p@/:w"},
    )
    assert printed.split() == [*urls.values(), "None"]


def test_password_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("of the file\n")
    assert with_password("redis://me@h:1", str(file)) == "redis://me:of%20the%20file@h:1"
    with pytest.raises(ValueError, match="leave it out of the URL"):
        with_password("redis://me:own@h:1", str(file))
    for problem in ("cannot be read", "is empty"):
        file.unlink() if problem == "cannot be read" else file.write_text("\n")
        with pytest.raises(ValueError, match=problem):
            with_password("redis://h:1", str(file))


def test_command_uses_the_password_of_the_file_that_the_run_names(
    live_run: RunDir, redis_url: str, tmp_path: Path, leash: Command
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1))
    end(live_run)
    file = tmp_path / "password"
    file.write_text(str(urlsplit(redis_url).password))
    settings = [f"buffer.url=redis://{address(redis_url)}/0", f"buffer.password_file={file}"]
    live_run.write_config(load_config(settings))
    assert "ready 1" in leash("depth")
    assert "ready 1" in leash("depth", "--url", f"redis://{address(redis_url)}/0")


def test_url_that_is_refused_is_shown_without_its_password() -> None:
    with pytest.raises(ValueError, match=r"buffer\.url='redis://h:1/0': must name") as refused:
        load_config(["buffer.url='redis://me:a/b@secret@h:1/0'"])
    assert "secret" not in str(refused.value)


def test_server_that_is_away_or_without_the_run_is_an_error(
    live_run: RunDir, leash: Command
) -> None:
    missing = f"run {live_run.name!r} is not open in this Redis"
    assert missing in leash("depth", exit_code=EXIT_FAILED)
    live_run.write_redis_url("redis://127.0.0.1:1/0")
    assert "cannot reach Redis at 127.0.0.1:1" in leash("depth", exit_code=EXIT_FAILED)


async def add_reader(url: str, name: str) -> None:
    redis = await connect(url)
    try:
        await redis.execute_command("ACL", "SETUSER", name, "on", ">pw", "~*", *READS)
    finally:
        await redis.aclose()


def test_command_that_a_user_may_not_use_is_named(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1))
    asyncio.run(add_reader(redis_url, live_run.name))
    url = f"redis://{live_run.name}:pw@{address(redis_url)}/0"
    arguments = ["quarantine", "--release", "group-0", "--url", url]
    assert "does not allow" in leash(*arguments, exit_code=EXIT_FAILED)
