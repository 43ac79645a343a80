"""A whole `TrainerRank`, on the Redis server named in `redis.txt`, until rank 0 is stopped in a
pause."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from buffer.run_state import STREAM_START
from tests.support.blocking import BlockingReplayBuffer, BlockingRunState
from tests.support.trainer.loop_scene import (
    GROUPS_PER_STEP,
    LATER_RATE,
    LOOP_STEPS,
    TIMEOUT_S,
    loop_spec,
    make_group,
)
from tests.support.zero3.batches import examples
from trainer_pool.collectives import RankAddress
from trainer_pool.rank import PAUSED_LOOK_S, TrainerRank
from trainer_pool.types import TrainerSpec, WarmStartReport


def run_loop(
    folder: Path, listener: socket.socket | None, address: RankAddress, *, is_resumed: bool
) -> None:
    """Warm start, version 0, LOOP_STEPS or more; ends because rank 0 is stopped.

    Resumed, it goes on from the last checkpoint but one; then two steps make a version, the
    engines get every other one, and the ranks split each row.
    """
    spec = loop_spec(folder, (folder / "redis.txt").read_text())
    if is_resumed:
        *_, before_last, _ = sorted((Path(spec.run_dir) / "checkpoints").glob("step-*"))
        config = replace(
            spec.config, gradient_accumulation_steps=2, publish_every=2, sequence_parallel_size=2
        )
        spec = replace(spec, resume_from=str(before_last), config=config)
    trainer = TrainerRank(spec, address, listener)
    warm = WarmStartReport(loss_first=0.0, loss_last=0.0, num_steps=0, seconds=0.0)
    if not is_resumed:
        warm = trainer.warm_start(examples()[:1])
    trainer.connect()
    initial = trainer.publish_initial()
    if address.rank == 0:
        threading.Thread(target=stop_after, args=(trainer, spec), daemon=True).start()
    else:
        trainer.stop()  # only rank 0's word counts
    report = trainer.train()
    trainer.publish_last()
    trainer.export()
    trainer.close()
    results = {"warm_start": asdict(warm), "initial": asdict(initial), "report": asdict(report)}
    output = Path(spec.run_dir)
    name = "again" if is_resumed else "first"
    (output / f"{name}-{address.rank}.json").write_text(json.dumps(results))


def stop_after(trainer: TrainerRank, spec: TrainerSpec) -> None:
    run_state = BlockingRunState(spec.redis_url, spec.run, spec.buffer)
    buffer = BlockingReplayBuffer(spec.redis_url, spec.run, spec.buffer)
    num_steps, last, enough, rate = 0, STREAM_START, LOOP_STEPS, 0.0
    if spec.resume_from is not None:
        enough = 7
        while entries := run_state.read_metrics(last, 0):
            last = entries[-1].id
    while num_steps < enough or not math.isclose(rate, LATER_RATE):
        entries = run_state.read_metrics(last, TIMEOUT_S)
        rates = [float(entry.record["lr"]) for entry in entries if entry.kind == "step"]
        num_steps, rate = num_steps + len(rates), [rate, *rates][-1]
        last = entries[-1].id
        if num_steps:  # not for a version's record, before the first step has read its rate
            buffer.change_settings({"learning_rate": str(LATER_RATE)})
    if spec.resume_from is not None:  # a pause may undo the first of the two steps of an update
        trainer.stop()
        buffer.close()
        run_state.close()
        return
    buffer.change_settings({"paused": "True"})
    random, version = np.random.default_rng(enough), run_state.trainer_version()
    for number in range(GROUPS_PER_STEP):  # a batch that would be taken without the pause
        buffer.push(make_group(random, f"late-{enough}-{number}", version))
    before: object = None
    while (now := (buffer.stats().leased, buffer.stats().trained)) != before:
        before = now
        time.sleep(3 * PAUSED_LOOK_S)  # a step that had its batch ends
    trainer.stop()
    buffer.close()
    run_state.close()
