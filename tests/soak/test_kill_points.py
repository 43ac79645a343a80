"""A trainer is killed between each two of lease, step, consume, checkpoint and ack.

`make soak` does each of them 50 times (LEASH_SOAK_KILLS_PER_POINT).
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from buffer.errors import NotOwnerError
from buffer.types import PromptRef
from tests.soak.crash import processes
from tests.soak.crash.checkpoints import CheckpointChain
from tests.soak.crash.evidence import collect, judge
from tests.soak.crash.meeting import Meeting
from tests.soak.crash.rank import POINTS, run_rank
from tests.soak.crash.scenario import Scenario
from tests.soak.crash.size import size
from tests.soak.crash.synthetic import synthetic_group
from tests.support.blocking import BlockingReplayBuffer

pytestmark = pytest.mark.slow

KILLS_PER_POINT = size("KILLS_PER_POINT", 2)
NUM_STEPS = 4
GROUPS_PER_STEP = 4


@dataclass(slots=True)
class StopAt:
    """Reports that the point is reached, and stays there until the process is killed."""

    channel: Any
    point: str
    step: int

    def __call__(self, point: str, step: int) -> None:
        if point == self.point and step >= self.step:
            self.channel.send(point)
            self.channel.recv()


def small_scenario(url: str, folder: Path) -> Scenario:
    return Scenario(
        url=url,
        run=f"points-{uuid4().hex[:8]}",
        folder=folder,
        num_producers=0,
        num_ranks=1,
        groups_per_step=GROUPS_PER_STEP,
        checkpoint_every=2,
        max_staleness=2 * NUM_STEPS,
        batch_timeout_s=0.05,
    )


def push_all(buffer: BlockingReplayBuffer, scenario: Scenario) -> dict[str, str]:
    """Pushes all groups to be trained; returns the reply to each push."""
    buffer.open(scenario.settings, scenario.groups_per_step)
    answers = {}
    for index in range(NUM_STEPS * GROUPS_PER_STEP):
        group = synthetic_group(f"g{index}", PromptRef(task="soak", index=index), (0,))
        answers[group.group_id] = buffer.push(group).value
    return answers


def live_to_the_end(scenario: Scenario) -> None:
    """Restarts the trainer, which trains what is left and ends."""
    lineage = uuid4().hex[:12]
    path = scenario.folder / f"{lineage}.sock"
    meeting = Meeting(path, 1)
    meeting.is_over.set()  # it ends as soon as there is no whole batch
    log = scenario.folder / "rank.log"
    process = processes.start(log, run_rank, scenario, lineage, 0, path)
    try:
        assert processes.join(process, 60) == 0, log.read_text()
    finally:
        processes.kill(process)
        processes.join(process, 10)
        meeting.close()


def live_until(scenario: Scenario, point: str, step: int) -> None:
    """Runs a trainer that is killed at a point, in this step or the first one after it."""
    ours, theirs = processes.pipe()
    lineage = uuid4().hex[:12]
    path = scenario.folder / f"{lineage}.sock"
    meeting = Meeting(path, 1)
    log = scenario.folder / "rank.log"
    stop = StopAt(theirs, point, step)
    process = processes.start(log, run_rank, scenario, lineage, 0, path, stop)
    try:
        assert ours.poll(60), f"{point} was not reached at step {step}: {log.read_text()}"
        assert ours.recv() == point
    finally:
        processes.kill(process)
        assert processes.join(process, 10) == -signal.SIGKILL
        meeting.close()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("point", POINTS)
def test_kill_between_two_verbs_neither_loses_nor_doubles_a_group(
    point: str, redis_url: str, tmp_path: Path
) -> None:
    for number in range(KILLS_PER_POINT):
        folder = tmp_path / str(number)
        folder.mkdir()
        scenario = small_scenario(redis_url, folder)
        buffer = scenario.blocking_buffer()
        answers = push_all(buffer, scenario)
        live_until(scenario, point, random.randrange(NUM_STEPS))
        live_to_the_end(scenario)
        faults, stats = buffer.find_violations(), buffer.stats()
        buffer.close()
        trained = CheckpointChain(folder).trained()
        assert stats.is_conserved and faults == []
        assert judge(collect(redis_url, scenario.run), trained, answers) == []
        assert sorted(trained) == sorted(answers), "every group was young enough to be trained"


def zombie(scenario: Scenario, channel: Any) -> None:
    """Leases, is stopped for longer than the lease lasts, and continues unaware."""
    buffer = scenario.blocking_buffer()
    buffer.reconcile("first", step=0, version=0, resume_version=0)
    lease = buffer.lease(step=1, version=0, num_groups=4, share=0, num_shares=1, timeout_s=120)
    channel.send("leased")
    channel.recv()
    report: dict[str, Any] = {
        "renewed": buffer.renew(lease),
        "kept": sorted(buffer.validate(lease, 0)),
        "consumed": buffer.consume(lease, lease.group_ids),
        "given back": buffer.nack(lease, "late"),
    }
    try:
        buffer.ack(1, "first")
    except NotOwnerError:
        report["ack"] = "not owner"
    buffer.close()
    channel.send(report)


def wait_until_nothing_is_leased(buffer: BlockingReplayBuffer) -> None:
    deadline = time.monotonic() + 120
    while buffer.stats().leased:
        assert time.monotonic() < deadline, buffer.stats()
        time.sleep(0.02)
        buffer.sweep()


@pytest.mark.parametrize("taken_over_by", ["expiry", "reconcile"])
def test_consumer_that_was_stopped_past_its_lease_changes_nothing(
    taken_over_by: str, redis_url: str, tmp_path: Path
) -> None:
    scenario = replace(
        small_scenario(redis_url, tmp_path),
        lease_timeout_s=0.5 if taken_over_by == "expiry" else 60.0,
    )
    buffer = scenario.blocking_buffer()
    push_all(buffer, scenario)
    ours, theirs = processes.pipe()
    log = tmp_path / "zombie.log"
    process = processes.start(log, zombie, scenario, theirs)
    try:
        assert ours.poll(60), log.read_text()
        assert ours.recv() == "leased"
        processes.kill(process, signal.SIGSTOP)
        if taken_over_by == "reconcile":
            buffer.reconcile("second", step=0, version=0, resume_version=0)
        wait_until_nothing_is_leased(buffer)
        lease = buffer.lease(step=1, version=0, num_groups=16, share=0, num_shares=1, timeout_s=120)
        num_consumed = buffer.consume(lease, lease.group_ids)
        if taken_over_by == "expiry":
            buffer.reconcile(
                "second",
                step=1,
                version=0,
                resume_version=0,
                consumed_group_ids=lease.group_ids,
            )
        before = buffer.stats()
        processes.kill(process, signal.SIGCONT)
        ours.send("go on")
        assert ours.poll(60), log.read_text()
        report = ours.recv()
        assert num_consumed == 16
        assert report == {
            "renewed": 0,
            "kept": [],
            "consumed": 0,
            "given back": 0,
            "ack": "not owner",
        }
        after = buffer.stats()
        assert (after.trained, after.ready, after.leased) == (before.trained, 0, 0)
        assert buffer.find_violations() == []
    finally:
        processes.kill(process)
        processes.join(process, 10)
        buffer.close()
