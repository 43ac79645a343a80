"""`make trace`: a group's life in words, and the command against a real buffer."""

from __future__ import annotations

import asyncio
import json
import re

from buffer.results import GroupEvent
from controller.commands.trace import life_lines
from controller.main import EXIT_BAD_INPUT
from controller.run_dir import RunDir
from tests.support.buffer.groups import lease_batch, make_group
from tests.support.controller.buffers import Command, fill, opened


def event(at: float, name: str, **detail: str) -> GroupEvent:
    return GroupEvent(at=at, event=name, group_id="g", detail=detail)


def test_life_has_times_and_durations() -> None:
    lines = life_lines(
        "night",
        "g",
        [
            event(1000.0, "admitted", v="3"),
            event(1002.5, "pushed"),
            event(1010.5, "leased", s="4", o="3fa9"),
            event(1011.5, "expired"),
            event(1012.5, "leased", s="4", o="77bc"),
            event(1014.5, "consumed", s="4"),
            event(1074.5, "acked"),
        ],
        now=2000.0,
    )
    assert lines[0].endswith("g of night: acked")
    output = [re.sub(r"^\S+", "TIME", line) for line in lines[1:-1]]
    assert output == [
        "TIME              admitted (version 3)",
        "TIME     +2.5 s   pushed",
        "TIME     +8.0 s   leased (step 4, owner 3fa9)",
        "TIME     +1.0 s   expired (its lease was not renewed)",
        "TIME     +1.0 s   leased (step 4, owner 77bc)",
        "TIME     +2.0 s   consumed (step 4)",
        "TIME    +1m 00s   acked (a durable checkpoint contains it)",
    ]
    assert lines[-1] == "running 2.5 s, ready 9.0 s, leased 3.0 s, consumed 1m 00s"


def test_life_of_a_waiting_group_extends_until_now() -> None:
    lines = life_lines("night", "g", [event(1000.0, "pushed")], now=1030.0)
    assert lines[0].endswith("g of night: ready")
    assert lines[-1] == "ready 30 s until now"


async def train_one(url: str, run: str) -> None:
    async with opened(url, run) as buffer:
        await buffer.admit("mine", timeout_s=60)
        await buffer.push(make_group("mine"))
        batch = await lease_batch(buffer)
        await buffer.consume(batch, batch.group_ids)


def test_command_prints_the_life_of_a_real_group(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(train_one(redis_url, live_run.name))
    printed = leash("trace", "mine")
    assert f"mine of {live_run.name}: consumed" in printed and "step 0" in printed
    events = re.findall(r"^\d\d:\d\d:\d\d\.\d{3} .{10}   (\w+)", printed, re.MULTILINE)
    assert events == ["admitted", "pushed", "leased", "consumed"]
    found = json.loads(leash("trace", "--json", "mine"))
    assert (found["group"], found["state"]) == ("mine", "consumed")
    assert [one["event"] for one in found["events"]] == events
    assert all(one["at"] > 0 for one in found["events"])


def test_unknown_group_is_one_line(live_run: RunDir, redis_url: str, leash: Command) -> None:
    asyncio.run(fill(redis_url, live_run.name))
    error = leash("trace", "nobody", exit_code=EXIT_BAD_INPUT)
    assert "never had such a group" in error and "buffer.audit_length=100000" in error


def test_state_is_printed_for_a_group_without_events(
    live_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=1, audit_length=0))
    assert f"group-0 of {live_run.name}: ready" in leash("trace", "group-0")
