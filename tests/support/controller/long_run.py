"""The folder of a long run, every group recorded: what its own writers leave, many times over."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from configs.load import load_config
from controller.metrics.catalogue import METRICS, Kind
from controller.metrics.history import Record
from controller.page.app import PageServer
from controller.run_dir import RunDir
from rollout_pool.worker.record import MAX_FILE_BYTES, NUM_FILES
from tests.support.browser import opened_tab
from tests.support.controller.records import (
    STATS,
    buffer_record,
    eval_record,
    record_all,
    record_groups,
    recorded_group,
    step_record,
    weights_records,
)

STEP_S = 2.0
STEP_FIELDS = {m.field: 0.125 for m in METRICS["step"] if m.kind is not Kind.histogram}
COUNTERS = {f"count.decode_s:engine-{n}": 1e6 + n / 3 for n in range(40)}


def long_records(num_steps: int) -> Iterator[Record]:
    """As many records of each step, and as long ones, as a run with two engines writes."""
    for step in range(num_steps):
        t = 1e9 + step * STEP_S
        if step % 100 == 0:
            yield eval_record(step, t, step / num_steps)
        stats = replace(STATS, running=step % 5)
        waits = {("trainer", "rollout"): step * 0.25}
        sampled = buffer_record(t, stats, waits=waits, tokens_generated=step * 100)
        yield replace(sampled, values={**sampled.values, **COUNTERS})
        own = step_record(step, t, reward=step / num_steps)
        yield replace(own, values={**STEP_FIELDS, **own.values})
        yield from weights_records(step + 1, t, mode="delta" if step % 2 else "full")


def write_long_run(run_dir: RunDir, num_steps: int, num_groups: int, num_workers: int = 2) -> None:
    """Groups of four answers of about 32 tokens; raises ValueError if a worker's files would be
    more than it keeps."""
    record_all(run_dir, [*long_records(num_steps)])
    samples = [
        recorded_group(f"sample-{n:02}", rewards=(n / 50, 0.0, 1.0, n % 2), length=20 + n % 25)
        for n in range(50)
    ]
    record_groups(run_dir, samples, said="an answer of the model, in some words")
    first = run_dir.path / "rollouts" / "worker-0.jsonl"
    lines = first.read_bytes().splitlines(keepends=True)
    at = [json.dumps(json.loads(line)["at"]).encode() for line in lines]
    for worker in range(num_workers):
        parts, size = [list[bytes]()], 0
        for number in range(worker, num_groups, num_workers):
            place = number % len(lines)
            ended = 1e9 + number * STEP_S * num_steps / num_groups
            line = lines[place].replace(b"sample-%02d" % place, b"group-%d" % number, 1)
            line = line.replace(at[place], b"%.3f" % ended, 1)
            if size + len(line) > MAX_FILE_BYTES:
                parts, size = [*parts, []], 0
            parts[-1].append(line)
            size += len(line)
        if len(parts) > NUM_FILES:
            raise ValueError(f"worker {worker} would have removed groups; take more workers")
        for place, part in enumerate(reversed(parts)):
            name = f"worker-{worker}.jsonl" + (f".{place}" if place else "")
            (first.parent / name).write_bytes(b"".join(part))
    run_dir.end("finished")


DRAWN = (
    "document.querySelectorAll('#charts .main-svg').length >= 6"
    " && document.querySelectorAll('#groups tr').length"
)
TIMES = (
    "[performance.getEntriesByType('navigation')[0].responseStart, performance.now()]"
    ".map((ms) => (ms / 1000).toFixed(2)).join(' s to the first byte, ')"
)


async def measure(run_dir: RunDir) -> None:
    """Prints how long the page takes until its curves and its list of groups are there."""
    # Helpers of the browser may be ending still, and write to its profile.
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with opened_tab(Path(folder)) as tab:
            server = PageServer(run_dir, "127.0.0.1", 0)
            try:
                for opening in ("cold", "warm", "warm"):
                    before = time.process_time()
                    await tab.ask("Page.navigate", url=server.url)
                    await tab.until(DRAWN)
                    took, cpu_s = await tab.run(TIMES), time.process_time() - before
                    load = os.getloadavg()[0]
                    print(f"{opening}: {took} s; server {cpu_s:.2f} s of CPU; load {load:.1f}")
                    await tab.until("!$('count').textContent.includes('still')")
            finally:
                server.close()


if __name__ == "__main__":  # python -m tests.support.controller.long_run RUNS STEPS GROUPS
    made = RunDir.create(sys.argv[1], f"long-{os.getpid()}", "quickstart")
    made.write_config(load_config([]))
    write_long_run(made, int(sys.argv[2]), int(sys.argv[3]))
    asyncio.run(measure(made))
