"""Processes of the rollout pool die at any moment: no prompt is lost or doubled, no group shrunk.

A real run on two engines and two workers. At random moments under load one of these is killed by
SIGKILL: an engine's server, a worker, a scoring process, the actor that such processes belong to,
a receiver of weights. Then an engine joins, and two leave.
All the time an observer follows the run's Redis from outside: every prompt that a worker took is in
exactly one place or was given up for a reason that is counted, every group has all its episodes,
the law of the buffer holds, and after every kill new groups are trained. `stop` ends it.

CI kills one of each; LEASH_SOAK_ROLLOUT_KILLS=20 is the long form. A failure tells LEASH_SOAK_SEED.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from buffer.dump.file import read_groups
from controller.metrics.history import Record, read_metrics, series
from tests.soak.crash.size import size
from tests.soak.rollouts import slow_reward
from tests.soak.rollouts.chaos import BLOWS, Chaos, Fault, Observer, redis_pid, schedule
from tests.soak.rollouts.ledger import Ledger
from tests.soak.rollouts.picture import Event, Picture
from tests.soak.rollouts.play import BACK_S, LOOK_EVERY_S, START_S, Play, play
from tests.soak.rollouts.victims import OF_THE_ROLLOUT_POOL, Kind, members
from tests.support.launches import (
    RUN,
    Machine,
    assert_saved,
    command_on,
    finish,
    kill_controller,
    launch_command,
    listens_beyond_loopback,
    result_of,
    resume,
)
from trainer_pool.state.checkpoint import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # every wait of a play has a bound

NUM_KILLS = size("ROLLOUT_KILLS", 1)
SEED = size("SEED", random.randrange(1 << 30))
NUM_FREEZES = size("ROLLOUT_FREEZES", 3)
FREEZE_S = 3.0
GROUP_SIZE = 4
QUIET_STEPS = 3
REWARD = f"{slow_reward.__file__}:share_of_vowels"
SETTINGS = (
    "trainer.num_steps=1000000",
    "trainer.checkpoint_every=1000000",  # what was trained stays to be looked at
    "trainer.warm_start.num_steps=0",  # a model that has learnt nothing writes until it is stopped
    "rollout.num_engines=2",
    "rollout.num_workers=2",
    "rollout.reward_actors=1",
    f"rollout.group_size={GROUP_SIZE}",
    "rollout.max_response_tokens=160",
    "rollout.keep_every_tokens=16",
    "rollout.eval_every=0",
    "rollout.max_worker_restarts=1000",
    "rollout.engine.max_restarts=1000",
    f"task.rewards={{vowels: {{kind: function, function: '{REWARD}'}}}}",
    "buffer.max_staleness=2",
    "algorithm.kl.weight=0.001",
    # The short form pauses as no other launch does; the long one as a run does by default.
    *(
        ()
        if NUM_KILLS > 1
        else ("weight_sync.pause_mode=retract", "rollout.engine.radix_cache=false")
    ),
)


@pytest.mark.long
def test_killed_members_under_load_lose_no_prompt_and_shrink_no_group(tmp_path: Path) -> None:
    print(f"LEASH_SOAK_SEED={SEED}")
    machine = Machine.look()
    run = tmp_path / RUN
    command = launch_command(tmp_path, RUN, *SETTINGS)
    with play(command, run, tmp_path / "output.txt", SEED) as the_play:
        the_play.kill_at_random(NUM_KILLS)
        print(f"2 engines became 3 in {the_play.scale(3):.1f} s")
        the_play.train_steps(QUIET_STEPS)
        print(f"3 engines became 1 in {the_play.scale(1):.1f} s")
        assert listens_beyond_loopback(tmp_path) == []
        assert "run" in command_on(tmp_path, "status")
        the_play.train_steps(QUIET_STEPS)
        freeze_some_and_drain(the_play)
        picture = the_play.look()
        # The step that the stop waits for consumes groups whose payloads no later look can read.
        consumed = set(the_play.ledger.consumed_ms)
        print(the_play.report())
        print(dict(the_play.ledger.fates(picture)), dict(picture.counters), dict(picture.stats))
        the_play.stop()
        left = the_play.ledger.fates(the_play.picture)
        print(dict(left))

    assert the_play.process.returncode == 130, the_play.kill_log()
    assert json.loads((run / "run.json").read_text())["state"] == "stopped"
    assert_saved(run)
    assert Counter(kill.victim.kind for kill in the_play.kills) == dict.fromkeys(
        OF_THE_ROLLOUT_POOL, NUM_KILLS
    )
    assert all(kill.is_over for kill in the_play.kills)
    ledger = the_play.ledger
    assert consumed and ledger.whole >= consumed
    # Samples were resumed; and rewards asked for again: only a second death over one costs it.
    assert picture.counters["samples_retried"] > 0
    assert picture.counters.get("rewards_failed", 0) < NUM_KILLS
    events = Counter(str(e.values["event"]) for e in the_play.metrics("weights_event"))
    assert events["engine_restarted"] == 2 * NUM_KILLS  # with their server, and with their actor
    assert events["receiver_restarted"] == NUM_KILLS
    assert (events["engine_joined"], events["engine_left"]) == (2, 3)  # one of each at SIGTERM
    assert the_play.first_commit_s("engine-2") < BACK_S
    assert picture.counters["workers_restarted"] == NUM_KILLS + 1
    assert len(the_play.metrics("worker_back")) == NUM_KILLS + 1
    assert max(step.number("logprob_diff_max") for step in the_play.metrics("step")) <= 1e-4
    machine.assert_nothing_left(tmp_path)
    assert f"make resume RUN={RUN} DIR={tmp_path} continues it" in the_play.kill_log()
    restored = picture.counters.get("tokens_restored", 0)  # none, if steps outran the restart
    goes_on_to_its_end(tmp_path, the_play.metrics("step"), restored, in_line=left["in line"])
    goes_on_without_its_redis(tmp_path)
    machine.assert_nothing_left(tmp_path)


def goes_on_to_its_end(runs: Path, before: list[Record], restored: float, *, in_line: int) -> None:
    """The run that was stopped, resumed with more steps; then Redis, a trainer rank and the
    controller are killed. Nothing is trained twice, renumbered or given up. `restored`: tokens;
    `in_line`: groups that the stop cut short."""
    run, last = runs / RUN, before[-1].count("step")
    num_steps = last + 8 * QUIET_STEPS  # enough for the time until another controller attaches
    copies = ("trainer.checkpoint_every=1000", "trainer.memory_copy_every=1")
    process = resume(runs, f"trainer.num_steps={num_steps}", *copies)
    wait_for_step(run, process, last + QUIET_STEPS)
    os.kill(redis_pid(run), signal.SIGKILL)
    wait_for_step(run, process, last + 2 * QUIET_STEPS)
    (victim,) = (one for one in members(run)[Kind.trainer] if one.name == "trainer-1")
    victim.kill()
    wait_for_step(run, process, last + 3 * QUIET_STEPS)
    alive = members(run)
    kill_controller(run)
    attached_at = wait_for_attached(run)
    assert members(run) == alive, "no rank, engine, worker or receiver was started again"
    output = finish(process)
    assert process.returncode == 0, output[-6000:]
    result = result_of(output)
    assert (result["steps"], result["state"]) == (num_steps, "finished")
    assert result["is_conserved"] and result["max_staleness_trained"] <= 2
    after = read_metrics(run / "metrics.jsonl", "step")[len(before) :]
    steps = [step.count("step") for step in after]
    versions = [step.count("version") for step in (*before, *after)]
    assert versions == sorted(set(versions))
    resumed = [r.count("step") for r in read_metrics(run / "metrics.jsonl", "resumed")]
    assert resumed[0] == last
    assert steps == list(range(last + 1, num_steps + 1))
    # One step is lost at most, with a trainer rank, and none with the controller: every step has a
    # copy in memory, and the last checkpoint on disk is that of the resume.
    assert len(resumed) == 2 and last + 2 * QUIET_STEPS - 1 <= resumed[1] <= num_steps
    assert f"the ranks go on from step {resumed[1]} (memory), after" in output
    assert any(step.t > attached_at for step in after)
    assert "trainer-1 died: the ranks start again" in output
    assert "leash: the controller died (exit code -9); another one goes on" in output
    assert "redis died: it starts again with its data" in output
    assert len(read_metrics(run / "metrics.jsonl", "redis_restarted")) == 1
    # Groups of a step that was undone were trained again, or dropped with its version.
    assert set(result["groups_dropped"]) <= {"stale", "lineage"}
    assert result["groups_trained"] == 4 * num_steps
    # The workers that were stopped kept what they had: nothing if all groups had just ended.
    counts = read_metrics(run / "metrics.jsonl", "buffer")[-1]
    assert counts.number("count.tokens_restored") > restored or not in_line
    # The engines have the trainer's weights: seen at tokens of the version that a step trains, if
    # any were sampled so late.
    assert max(series(after, "logprob_diff_max"), default=0.0) <= 1e-4
    # The reference is the policy that the run began with, and not the one that it went on from.
    assert all(kl > 0 for kl in series(after, "kl"))


def goes_on_without_its_redis(runs: Path) -> None:
    """The finished run, resumed with more steps on an empty server: with the groups that wait."""
    run = runs / RUN
    num_steps = read_metrics(run / "metrics.jsonl", "step")[-1].count("step") + QUIET_STEPS
    found_last = CheckpointStore(run / "checkpoints").latest()
    assert found_last is not None
    folder, state = found_last
    untrained = {prompt.index for prompt in state.untrained_prompts}
    dumped = read_groups(folder / "groups.dump")
    waiting = [int(group.fields["index"]) for group in dumped if group.state == "ready"]
    num_groups = len(untrained.intersection(waiting))
    shutil.rmtree(run / "redis")
    process = resume(runs, f"trainer.num_steps={num_steps}")
    output = finish(process)
    assert process.returncode == 0, output[-6000:]
    (said,) = re.findall(r"lost the run: the checkpoint has (\d+) groups?, and (\d+)", output)
    assert [int(number) for number in said] == [num_groups, len(untrained) - num_groups]
    result = result_of(output)
    assert (result["steps"], result["is_conserved"]) == (num_steps, True)
    # The server counts from here on: the groups that it got, and those sampled since.
    assert result["groups_trained"] == 4 * QUIET_STEPS
    assert result["max_staleness_trained"] <= 2


def freeze_some_and_drain(the_play: Play) -> None:
    """The short form of test_chaos.py: processes stand still for a moment, which restarts none. The
    only engine and a worker get SIGTERM, which is no death of theirs."""
    observer = Observer(the_play.run)
    chaos = Chaos(
        run=the_play.run,
        process=the_play.process,
        go_on=lambda: the_play.process,  # the controller is not killed
        output=the_play.kill_log,
        observer=observer,
        dice=the_play.dice,
        freeze_s=FREEZE_S,
    )
    observer.start()
    freezes = [blow for blow in BLOWS if blow.fault is Fault.freeze]
    drains = [blow for blow in BLOWS if blow.fault is Fault.drain]
    for blow in schedule(the_play.dice, freezes, NUM_FREEZES) + drains:
        chaos.strike(blow)
    observer.end()
    print(chaos.table())
    assert len(chaos.struck) == NUM_FREEZES + len(drains) and all(
        one.witness for one in chaos.struck
    )
    assert observer.num_looks >= NUM_FREEZES and not observer.faults


def wait_for_step(run: Path, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + START_S
    while not any(r.count("step") >= step for r in read_metrics(run / "metrics.jsonl", "step")):
        assert process.poll() is None, finish(process)[-6000:]
        assert time.monotonic() < deadline, f"no step {step} within {START_S:g} s"
        time.sleep(LOOK_EVERY_S)


def wait_for_attached(run: Path) -> float:
    """When the next controller attached."""
    deadline = time.monotonic() + START_S
    while not (records := read_metrics(run / "metrics.jsonl", "attached")):
        assert time.monotonic() < deadline, f"no controller within {START_S:g} s"
        time.sleep(LOOK_EVERY_S)
    return records[0].t


BEGUN = ("begun", "0-0", {"p": "task:0"})
AGAIN = ("begun", "1-0", {"p": "task:0"})
STALE = ("dropped", "0-0", {"r": "stale"})
STOPPED = ("abandoned", "0-0", {"r": "stopped"})
BOTH = (("consumed", "0-0", {"s": "1"}), ("consumed", "1-0", {"s": "2"}))


@pytest.mark.parametrize(
    ("events", "places", "fault"),
    [
        ([BEGUN], {"running": {"0-0": 0}}, None),
        ([BEGUN], {"running": {"0-0": 0}, "retries": (0,)}, "doubled"),
        ([BEGUN], {}, "lost"),
        ([BEGUN], {"running": {"0-0": 0}, "positions": {0: 2}}, "lost"),
        ([BEGUN], {"running": {"0-0": 0}, "positions": {}}, "no worker has come so far"),
        ([BEGUN, STALE], {"retries": (0,), "stats": {"dropped:stale": 1, "pushed": 1}}, None),
        ([BEGUN, STALE], {"stats": {"dropped:stale": 1, "pushed": 1}}, "lost"),
        ([BEGUN, STOPPED], {}, "lost"),
        ([BEGUN, AGAIN, *BOTH], {"stats": {"acked": 2, "pushed": 2}}, "doubled"),
        ([BEGUN], {"running": {"0-0": 0}, "stats": {"pushed": 1}}, "1 groups were pushed"),
    ],
)
def test_observer_notices_every_kind_of_fault(
    events: list[tuple[str, str, dict[str, str]]], places: dict[str, Any], fault: str | None
) -> None:
    empty = dict.fromkeys(("ready", "leased", "consumed", "quarantined"), frozenset())
    picture = Picture(
        events=tuple(
            Event(at_ms=at, what=what, group_ids=(group_id,), detail=detail)
            for at, (what, group_id, detail) in enumerate(events)
        ),
        **{
            **empty,
            **{"running": {}, "retries": (), "positions": {0: 1}, "stats": {}, "counters": {}},
            **{"engines": frozenset(), "quarantined_prompts": frozenset()},
            **places,
        },
    )
    faults = Ledger(1, GROUP_SIZE, lambda index: False).enter(picture)
    assert (fault in faults[0]) if fault else not faults
