"""A run over three machines goes on when one is cut off, is slow to reach, or dies.

Trainer and Redis are on the first; engines and workers on the others. `make soak-hosts` runs it.
The short form, two machines that are apart for some seconds, is part of test_two_hosts.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.buffer_access import buffer_address
from controller.metrics.history import read_metrics
from controller.run_dir import RunDir
from tests.soak.crash.size import size
from tests.soak.rollouts.chaos import steps_without_repeats
from tests.support.blocking import BlockingReplayBuffer
from tests.support.hosts import Host, hold_room, joined_hosts, missing, start_ray
from tests.support.launches import finish, launch_command, result_of, wait_for_line

CUT_S = size("CUT_S", 0)

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not CUT_S, reason="only by `make soak-hosts`: it takes ten minutes"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

RUN = "three"
LIMIT_S = 600.0
QUIET_STEPS = 10
NUM_STEPS = size("HOST_STEPS", 600)
SLOW = "1mbit"
MAX_STALENESS = 2
SETTINGS = (
    "cluster.ray_address=auto",
    f"trainer.num_steps={NUM_STEPS}",
    "trainer.checkpoint_every=10",
    "rollout.num_engines=2",
    "rollout.num_workers=2",
    "rollout.eval_every=0",
    f"buffer.max_staleness={MAX_STALENESS}",
)
ACTORS = """
import json, psutil
found = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
print(json.dumps([words.strip() for words in found if words.startswith("ray::")]))
"""
LAW = """
import sys
from pathlib import Path
from controller.buffer_access import buffer_address
from controller.run_dir import RunDir
from tests.support.blocking import BlockingReplayBuffer

with buffer_address(RunDir(path=Path({run!r}))) as address:
    buffer = BlockingReplayBuffer(address.url, address.run, address.settings)
    print(buffer.find_violations(), buffer.stats().is_conserved)
    buffer.close()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with joined_hosts(tmp_path, 3) as all_three:
        yield all_three


class Run:
    """The launch on the first machine, and what is seen of it."""

    def __init__(self, first: Host, runs: Path) -> None:
        self._first = first
        self.path = runs / RUN
        self.process = first.start(" ".join(launch_command(runs, RUN, *SETTINGS)))

    def steps(self) -> list[int]:
        return [record.count("step") for record in self._records("step")]

    def events(self, what: str) -> list[str]:
        """Lists the subjects of these events."""
        found = [record.values for record in self._records("weights_event")]
        return [str(values["who"]) for values in found if values["event"] == what]

    def commits(self, engine: str) -> int:
        return sum(str(record.values["engine"]) == engine for record in self._records("commit"))

    def wait(self, is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> float:
        """Seconds until it is so."""
        began = time.monotonic()
        while not is_so():
            assert self.process.poll() is None, (
                f"the run ended before {what}:\n{finish(self.process)[-6000:]}"
            )
            assert time.monotonic() - began < limit_s, f"no {what} within {limit_s:g} s"
            time.sleep(0.5)
        return time.monotonic() - began

    def train_steps(self, number: int) -> float:
        last = len(self.steps())
        return self.wait(lambda: len(self.steps()) >= last + number, f"{number} steps")

    def assert_lawful(self) -> None:
        assert self._first.python(LAW.format(run=str(self.path))).split("\n")[-2] == "[] True"

    def _records(self, kind: str) -> list[Any]:
        return read_metrics(self.path / "metrics.jsonl", kind)


def actors(host: Host) -> list[str]:
    """Lists the run's actors there, without Ray's own processes."""
    found = json.loads(host.python(ACTORS))
    return sorted(words for words in found if not words.endswith("Agent"))


def engines(host: Host) -> list[str]:
    return [words for words in actors(host) if "Engine" in words]


def test_run_survives_a_machine_that_is_cut_off_slow_and_then_dead(
    tmp_path: Path, hosts: list[Host]
) -> None:
    first, *others = hosts
    start_ray(hosts, (2, 4, 4))
    holder = hold_room(first, 4, 4)
    wait_for_line(holder, "held", LIMIT_S)
    run = Run(first, tmp_path / "runs")
    wait_for_line(run.process, "step 2/", LIMIT_S)
    holder.communicate(timeout=LIMIT_S)
    for host in hosts:
        print(host.name, actors(host))
    assert not engines(first)
    struck, spared = sorted(others, key=lambda host: -len(actors(host)))
    assert engines(struck)
    run.train_steps(QUIET_STEPS)
    usual_s = run.train_steps(QUIET_STEPS) / QUIET_STEPS

    first.cut(struck)
    began, last = time.monotonic(), len(run.steps())
    time.sleep(CUT_S)
    print(f"{len(run.steps()) - last} steps while {struck.name} was cut off for {CUT_S} s")
    first.heal(struck)
    took_s = run.train_steps(QUIET_STEPS)
    print(f"{QUIET_STEPS} steps {took_s:.1f} s after it was healed; usually {usual_s:.2f} s a step")
    run.assert_lawful()

    first.slow_down(struck, SLOW)
    took_s = run.train_steps(QUIET_STEPS)
    print(f"{QUIET_STEPS} steps at {SLOW} to {struck.name}: {took_s:.1f} s")
    first.speed_up(struck)
    run.train_steps(QUIET_STEPS)
    run.assert_lawful()

    num_engines = len(engines(struck))
    began, last = time.monotonic(), len(run.steps())
    first.cut(struck)  # as a power cut does: nothing says good-bye
    struck.kill()
    run.wait(lambda: len(run.events("engine_lost")) >= num_engines, "engine is missed")
    print(f"{struck.name} was given up {time.monotonic() - began:.0f} s after its death")
    run.wait(lambda: len(engines(spared)) == 2, "engine starts elsewhere")
    run.train_steps(QUIET_STEPS)
    print(
        f"both engines on {spared.name} {time.monotonic() - began:.0f} s after the death; "
        f"{len(run.steps()) - last} steps since"
    )
    print(spared.name, actors(spared))
    run.assert_lawful()

    output = finish(run.process, LIMIT_S + NUM_STEPS * 5)
    assert run.process.returncode == 0, output[-6000:]
    result = result_of(output)
    print({name: result[name] for name in ("eval_before", "eval_after", "train_s", "state")})
    assert (result["state"], result["steps"]) == ("finished", NUM_STEPS)
    assert result["is_conserved"] and result["max_staleness_trained"] <= MAX_STALENESS
    assert run.events("engine_lost") and run.events("excluded")
    with buffer_address(RunDir(path=run.path)) as address:
        buffer = BlockingReplayBuffer(address.url, address.run, address.settings)
        assert buffer.find_violations() == []
        buffer.close()
    assert max(steps_without_repeats(run.path)) == NUM_STEPS
