"""`make quarantine` against a real buffer that holds a poison group."""

from __future__ import annotations

import asyncio

import pytest

from buffer.redis.connection import connect
from buffer.results import BufferStats, Failure
from buffer.types import PromptRef
from controller.main import EXIT_BAD_INPUT, main
from controller.run_dir import RunDir
from tests.support.buffer.groups import lease_batch, make_group
from tests.support.controller.buffers import Command, opened


async def poison(url: str, run: str) -> None:
    """Puts a group into quarantine: it is leased twice and given back both times."""
    async with opened(url, run, max_attempts=2) as buffer:
        await buffer.push(make_group("poison"))
        for step in range(2):
            await buffer.nack(await lease_batch(buffer, step), "it broke the trainer")
        assert (await buffer.stats()).quarantined == 1


def test_escapes_in_names_and_reasons_do_not_reach_the_terminal(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(poison(redis_url, live_run.name))

    async def overwrite() -> None:
        redis = await connect(redis_url)
        key = f"{{leash:{live_run.name}}}:"
        await redis.hset(f"{key}group:poison", "why", "\x1b]0;evil\x07[red]")  # type: ignore[misc]
        await redis.hset(f"{key}quarantined_prompts", "3 \x1b[2J", "1 2 \x9b2J")  # type: ignore[misc]
        await redis.aclose()

    asyncio.run(overwrite())
    listed, traced = leash("quarantine"), leash("trace", "poison")
    error = leash("quarantine", "--release", "\x1b[2J", exit_code=EXIT_BAD_INPUT)
    assert "[red]" in listed
    assert not set("\x1b\x9b\x07") & set(listed + traced + error)


async def stats_of(url: str, run: str) -> BufferStats:
    async with opened(url, run) as buffer:
        return await buffer.stats()


def test_quarantined_group_is_listed_released_and_discarded(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(poison(redis_url, live_run.name))
    listed = leash("quarantine")
    assert "poison" in listed and "ago" in listed and "16" in listed, "two trajectories of 8 tokens"
    assert "poison is ready to be trained again" in leash("quarantine", "--release", "poison")
    stats = asyncio.run(stats_of(redis_url, live_run.name))
    assert (stats.quarantined, stats.ready) == (0, 1)
    error = leash("quarantine", "--discard", "poison", exit_code=EXIT_BAD_INPUT)
    assert "no such group or prompt in the quarantine" in error


def test_discarded_group_is_dropped_and_counted(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(poison(redis_url, live_run.name))
    assert "poison is dropped" in leash("quarantine", "--discard", "poison")
    stats = asyncio.run(stats_of(redis_url, live_run.name))
    assert (stats.quarantined, stats.dropped) == (0, {"discarded": 1})
    assert "the quarantine is empty" in leash("quarantine")


async def put_a_prompt_aside(url: str, run: str) -> None:
    async with opened(url, run) as buffer:
        group_id = (await buffer.admit("g", 60)).group_id
        failure = await buffer.fail(group_id, PromptRef(task="chain sum", index=17), 1)
        assert failure == Failure(num_failures=1, is_quarantined=True)


def test_quarantined_prompts_are_listed_and_taken_out_by_name(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(poison(redis_url, live_run.name))
    for leave, said, num_waiting in (
        ("--release", "is queued to run again", 1),
        ("--discard", "is dropped for good", 0),  # the next group took the one that waited
    ):
        asyncio.run(put_a_prompt_aside(redis_url, live_run.name))
        listed = leash("quarantine")
        assert "poison" in listed and "chain sum:17" in listed and "failed" in listed
        assert f"chain sum:17 {said}" in leash("quarantine", leave, "chain sum:17")
        stats = asyncio.run(stats_of(redis_url, live_run.name))
        assert (stats.prompts_quarantined, stats.retries_waiting) == (0, num_waiting)
    error = leash("quarantine", "--release", "chain sum:17", exit_code=EXIT_BAD_INPUT)
    assert "no such group or prompt" in error


def test_release_and_discard_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["quarantine", "--release", "a", "--discard", "b"])
    assert exit_info.value.code == 2
