"""The history at a real server: what others write into the metrics stream does not end the run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from buffer.connect import Buffer
from buffer.redis.keys import Keys
from buffer.run_state import RunState
from controller import history_writer
from controller.buffer_access import BufferAddress
from controller.history_writer import HistoryWriter
from controller.metrics.history import MetricsLog, Record, read_metrics
from controller.watch.run_view import RunView
from tests.support.controller.records import settings_of_run, step_record

FOREIGN: list[tuple[str, Mapping[str, Any]]] = [
    ("step", {}),
    ("step", {"step": "three", "version": 2}),
    ("step", {"step": 10**400, "version": 2}),
    ("step", {"step": 3, "version": -1}),
    ("step", {"step": 2.5, "version": 2}),
    ("step", {"t": 0.0, **step_record(0, 1.0).values}),
    ("publish", {"kind": "commit"}),
    ("eval", {"accuracy": 1.0}),
    ("buffer", {"tokens_generated": 7}),
    ("phase", {"phase": "over"}),
]


async def test_entries_that_no_process_of_ours_writes_are_ignored(
    open_run: tuple[BufferAddress, Buffer, RunState], tmp_path: Path
) -> None:
    address, buffer, state = open_run
    steps: list[Record] = []
    view = RunView(run=address.run, config=settings_of_run(3), started=0.0)
    redis = Redis.from_url(address.url)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        writer = HistoryWriter(buffer, state, log, view, on_record=steps.append)
        for kind, values in FOREIGN:
            entry = {"kind": kind, "record": json.dumps(values)}
            await redis.xadd(Keys(address.run)("metrics"), entry)
        await state.append_metrics({"pause_s": 10**400, "engine": "engine-0"}, "commit")
        await state.append_metrics(step_record(0, 1.0).values, "step")
        await writer.drain_metrics(block_s=1.0)
    await redis.aclose()
    assert view.step == 1 and len(steps) == 1
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.kind for record in records] == ["commit", "step"]
    assert "pause_s" not in records[0].values, "what is no float is null"


async def test_redis_that_does_not_answer_is_named_and_so_is_its_return(
    open_run: tuple[BufferAddress, Buffer, RunState],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history_writer, "SILENT_S", 0.1)
    address, buffer, state = open_run
    is_back, sampled = asyncio.Event(), asyncio.Event()
    stats = buffer.stats

    async def stats_once_it_is_back() -> Any:
        await is_back.wait()
        sampled.set()
        return await stats()

    monkeypatch.setattr(buffer, "stats", stats_once_it_is_back)
    said: list[str] = []
    view = RunView(run=address.run, config=settings_of_run(3), started=0.0)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        writer = HistoryWriter(buffer, state, log, view, say=said.append)
        sampling = asyncio.create_task(writer.sample_buffer())
        async with asyncio.timeout(60):
            while not said:
                await asyncio.sleep(0.01)
            is_back.set()
            await sampled.wait()
            while len(said) < 2:
                await asyncio.sleep(0.01)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    silent, back = said[:2]
    assert silent == "Redis has not answered for 0.1 s: the run waits for it"
    assert re.fullmatch(r"Redis answers again, after \d+ s", back)


async def test_view_is_handed_on_after_each_sample(
    open_run: tuple[BufferAddress, Buffer, RunState], tmp_path: Path
) -> None:
    address, buffer, state = open_run
    seen: list[RunView] = []
    view = RunView(run=address.run, config=settings_of_run(3), started=0.0)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        await HistoryWriter(buffer, state, log, view, on_sample=seen.append).sample_once()
    assert seen == [view] and view.stats is not None
