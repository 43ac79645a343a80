"""A quickstart that is hit by a fault every few seconds ends by itself and learns the same; one
that is left alone gives no alarm.

`make chaos` runs the first (LEASH_SOAK_CHAOS_FAULTS faults, by LEASH_SOAK_SEED), and then the same
quickstart undisturbed, for the accuracy to be compared with. The short form, in every run of the
tests, is part of test_rollout_faults.py. `make soak-healthy` runs the other, for
LEASH_SOAK_HEALTHY_MINUTES.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from controller.metrics.history import STALL, MetricsLog, of_kind, read_metrics
from controller.page.watched import WatchedRun
from controller.run_dir import RunDir
from controller.watch.stages import stages
from tests.soak.crash.size import size
from tests.soak.rollouts import spelling
from tests.soak.rollouts.chaos import (
    BLOWS,
    FREEZE_S,
    RUN_FOLDER,
    STAGE,
    Blow,
    Chaos,
    Fault,
    Observer,
    filled,
    schedule,
    small_disk,
    steps_without_repeats,
    trained_in_the_surviving_lineage,
)
from tests.soak.rollouts.picture import Event
from tests.support.launches import RUN, Machine, finish, processes_of, result_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

NUM_FAULTS = size("CHAOS_FAULTS", 0)
NUM_STEPS = size("CHAOS_STEPS", 20 * NUM_FAULTS)
SEED = size("SEED", random.randrange(1 << 30))
ONLY = os.environ.get("LEASH_SOAK_CHAOS_ONLY", "")
"""Words of which a kind of fault must contain one, separated by commas."""
MAX_STALENESS = 2
POINTS = 0.03
"""By which accuracy may be lower than without faults."""
UNLIMITED = 1_000_000
REWARD = f"{spelling.__file__}:backward"
SETTINGS = (
    f"trainer.num_steps={NUM_STEPS}",
    "trainer.checkpoint_every=5",
    f"run.max_restarts={UNLIMITED}",
    f"trainer.max_restarts={UNLIMITED}",
    f"buffer.max_restarts={UNLIMITED}",
    f"buffer.max_staleness={MAX_STALENESS}",
    f"buffer.audit_length={UNLIMITED}",  # what was trained twice is read from it
    "rollout.num_workers=2",
    "rollout.reward_actors=1",
    f"rollout.max_worker_restarts={UNLIMITED}",
    f"rollout.engine.max_restarts={UNLIMITED}",
    f"rollout.eval_every={UNLIMITED}",
    f"task.rewards={{spelled: {{kind: function, function: '{REWARD}'}}}}",
    "run.panel=false",
)
RUN_BYTES, STAGE_BYTES = 2**29, 2**26
HEALTHY_MINUTES = size("HEALTHY_MINUTES", 0)
LOOK_S = 5.0
HEALTHY = (
    f"trainer.num_steps={UNLIMITED}",
    # Once every answer is right no group has variance, which is an alarm.
    "trainer.learning_rate=1e-10",
    "trainer.checkpoint_every=50",
    "rollout.eval_every=50",
    "rollout.num_engines=2",
    "run.panel=false",
)


@pytest.mark.long
@pytest.mark.skipif(not NUM_FAULTS, reason="only by `make chaos`: it takes most of an hour")
def test_run_survives_every_kind_of_fault_and_learns_the_same(tmp_path: Path) -> None:
    print(f"LEASH_SOAK_SEED={SEED}")
    machine = Machine.look()
    dice = random.Random(SEED)
    runs, stage = tmp_path / "runs", tmp_path / "stage"
    with ExitStack() as closing:
        refusals = [
            closing.enter_context(small_disk(folder, num_bytes))
            for folder, num_bytes in ((runs, RUN_BYTES), (stage, STAGE_BYTES))
        ]
        blows = [blow for blow in BLOWS if not ONLY or any(w in str(blow) for w in ONLY.split(","))]
        if any(refusals):
            print(f"no full disks, since this user may not mount: {refusals}")
            blows = [blow for blow in blows if blow.fault is not Fault.full]
        chaos = _launched(closing, runs, stage, dice, tmp_path / "output.txt")
        for blow in schedule(dice, blows, NUM_FAULTS):
            chaos.pause()
            chaos.strike(blow)
            last = chaos.struck[-1]
            print(f"{last}; {last.num_steps} steps in {last.took_s:.1f} s", flush=True)
        chaos.process.wait()
        chaos.observer.end()
        print(chaos.table())
        output = chaos.output()
        assert chaos.process.returncode == 0, chaos.report()
        assert chaos.observer.num_looks > NUM_STEPS and not chaos.observer.faults
        assert all(one.witness for one in chaos.struck)
        result = result_of(output)
        print(f"disturbed: {result['eval_after']:.3f} in {result['train_s']:.0f} s")
        assert (result["state"], result["steps"]) == ("finished", NUM_STEPS)
        assert result["is_conserved"] and result["max_staleness_trained"] <= MAX_STALENESS
        steps = steps_without_repeats(runs / RUN)
        assert sorted(steps) == list(range(1, NUM_STEPS + 1))
        assert {len(trained) for trained in steps.values()} == {16}
        assert processes_of(runs) == []
    undisturbed = _undisturbed(tmp_path / "undisturbed")
    print(f"undisturbed: {undisturbed['eval_after']:.3f} in {undisturbed['train_s']:.0f} s")
    assert result["eval_after"] >= undisturbed["eval_after"] - POINTS
    machine.assert_nothing_left(tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not HEALTHY_MINUTES, reason="only by `make soak-healthy`: it takes that long")
def test_healthy_run_gives_no_alarm(tmp_path: Path) -> None:
    """As `make status` would see it every five seconds, however loaded the machine is."""
    run = RunDir(path=tmp_path / RUN)
    alarms, hints = Counter[str](), Counter[str]()
    with (tmp_path / "output.txt").open("w") as output:
        where = (f"run.dir={tmp_path}", f"run.name={RUN}")
        words = ["launch", "--experiment", "quickstart", *HEALTHY, *where]
        process = _start(words, output)
        try:
            while process.poll() is None and not read_metrics(run.metrics, "step"):
                time.sleep(LOOK_S)
            watched, ends_at = WatchedRun(run), time.monotonic() + 60 * HEALTHY_MINUTES
            while process.poll() is None and time.monotonic() < ends_at:
                for one in watched.state()["findings"]:
                    (alarms if one["level"] == "alarm" else hints)[one["sentence"]] += 1
                time.sleep(LOOK_S)
            has_ended = process.poll() is not None
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=300)
    records = read_metrics(run.metrics)
    print(f"{len(of_kind(records, 'step'))} steps; hints: {hints}")
    for stage in stages(records, math.inf):
        print(f"{stage.of:<9} {stage.name:<16} {stage.share:6.1%} {stage.waits_for}")
    assert not has_ended, (tmp_path / "output.txt").read_text()[-4000:]
    assert not alarms and not of_kind(records, STALL)


def _undisturbed(runs: Path) -> dict[str, Any]:
    """The same run without faults."""
    output = finish(_start(_command("launch", runs, "")), timeout_s=60 + 10.0 * NUM_STEPS)
    return result_of(output)


def _launched(
    closing: ExitStack, runs: Path, stage: Path, dice: random.Random, output: Path
) -> Chaos:
    """From its first steps on."""
    run = runs / RUN
    file = closing.enter_context(output.open("w"))
    process = _start(_command("launch", runs, f"weight_sync.stage_dir={stage}"), file)
    observer = Observer(run)
    chaos = Chaos(
        run=run,
        process=process,
        go_on=lambda: _start(["resume", "--dir", str(runs)], file),
        output=lambda: output.read_text(errors="replace"),
        observer=observer,
        dice=dice,
        freeze_s=FREEZE_S,
        stage=stage,
    )
    closing.callback(lambda: _end(chaos))
    observer.start()
    # A checkpoint exists then: before the first, a dead rank ends the run.
    chaos.wait(lambda: bool(read_metrics(run / "metrics.jsonl", "checkpoint")), "a checkpoint")
    return chaos


def _end(chaos: Chaos) -> None:
    chaos.observer.end()
    if chaos.process.poll() is None:
        chaos.process.terminate()
        chaos.process.wait(timeout=120)


def _command(verb: str, runs: Path, *settings: str) -> list[str]:
    given = [one for one in (*SETTINGS, *settings) if one]
    return [verb, "--experiment", "quickstart", *given, f"run.dir={runs}", f"run.name={RUN}"]


def _start(words: list[str], output: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "controller.main", *words]
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _event(what: str, group_id: str, **detail: str) -> Event:
    return Event(at_ms=0, what=what, group_ids=(group_id,), detail=detail)


def test_steps_that_a_restart_undid_do_not_count_as_trained() -> None:
    begun = [_event("begun", str(n), p=f"task:{n}") for n in range(3)]
    consumed = [_event("consumed", "0", s="1"), _event("consumed", "1", s="2")]
    again = [_event("consumed", "2", s="2"), _event("consumed", "1", s="3")]
    steps = trained_in_the_surviving_lineage([*begun, *consumed, *again])
    assert steps == {1: ["task:0"], 2: ["task:2"], 3: ["task:1"]}


def test_schedule_has_every_kind_before_any_comes_again_and_is_the_same_by_its_seed() -> None:
    first, same = (schedule(random.Random(7), BLOWS, 2 * len(BLOWS)) for _ in range(2))
    assert first == same
    assert set(first[: len(BLOWS)]) == set(first[len(BLOWS) :]) == set(BLOWS)
    assert {Blow(fault=Fault.full, at=at) for at in (RUN_FOLDER, STAGE)} < set(BLOWS)


def test_filled_disk_takes_no_more_byte_and_is_empty_again(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    with small_disk(folder, 2**20) as refusal:
        if refusal is not None:
            pytest.skip(f"this user may not mount: {refusal}")
        with filled(folder) as words, pytest.raises(OSError, match=words):
            (folder / "one more").write_bytes(b"x")
        (folder / "now").write_bytes(b"x")


def test_metrics_wait_while_their_disk_is_full_and_are_whole_afterwards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "small"
    with small_disk(folder, 2**20) as refusal:
        if refusal is not None:
            pytest.skip(f"this user may not mount: {refusal}")
        path = folder / "metrics.jsonl"
        with MetricsLog(path) as log:
            log.append("step", {"step": 0})
            with filled(folder):
                for step in range(1, 200):
                    log.append("step", {"step": step})
                num_written = len(read_metrics(path))
                assert 0 < num_written < 200, "the file's own page had room for some"
            assert caplog.text.count("waits for room on its disk") == 1
            log.append("step", {"step": 200})
            assert [r.count("step") for r in read_metrics(path)] == list(range(201))
