"""The first line of `make status` names what is wrong with a run, for each of twelve faults that
are planted into real ones.

`make soak-faults` runs it, LEASH_SOAK_HEALTHY_S seconds without a fault before each. A part of it:
LEASH_SOAK_FAULTS_ONLY="Redis,disk".
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from controller.metrics.history import read_metrics
from tests.soak.crash.size import size
from tests.soak.rollouts import planted
from tests.soak.rollouts.chaos import small_disk
from tests.soak.rollouts.planted import IN_A_HEALTHY_RUN, OUT_OF_MEMORY, FirstLine, Planter
from tests.support.launches import LEASH, RUN

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(0)]

HEALTHY_S = size("HEALTHY_S", 0)
ONLY = os.environ.get("LEASH_SOAK_FAULTS_ONLY", "")
"""Words of which the name of a fault must contain one, separated by commas."""
WITHIN_S = 30.0
RUN_BYTES = 640 * 2**20
REWARD = f"{planted.__file__}:backward"
COMMON = (
    "trainer.num_steps=1000000",
    "rollout.num_engines=2",
    "rollout.num_workers=2",
    "rollout.eval_every=1000000",
    "run.panel=false",
)
HEALTHY = (
    "trainer.learning_rate=1e-10",  # once every answer is right no group has variance
    "trainer.checkpoint_every=50",
    f"task.rewards={{spelled: {{kind: function, function: '{REWARD}'}}}}",
)
LITTLE_MEMORY = (
    "trainer.warm_start.num_steps=1",  # it goes on to the limit then
    "rollout.max_response_tokens=200",
    "rollout.engine.max_total_tokens=1200",
)


def _is_asked_for(name: str) -> bool:
    return not ONLY or any(word in name for word in ONLY.split(","))


@pytest.mark.skipif(not HEALTHY_S, reason="only by `make soak-faults`")
def test_first_line_of_status_names_each_fault(tmp_path: Path) -> None:
    found, alarms = list[FirstLine](), list[str]()
    if any(_is_asked_for(fault.name) for fault in IN_A_HEALTHY_RUN):
        runs = tmp_path / "healthy" / "runs"
        with small_disk(runs, RUN_BYTES) as refusal, _launched(runs, *HEALTHY) as process:
            planter = Planter(
                run=runs / RUN, is_alive=lambda: process.poll() is None, healthy_s=HEALTHY_S
            )
            for fault in IN_A_HEALTHY_RUN:
                if _is_asked_for(fault.name) and not (refusal and "disk" in fault.parts):
                    planter.plant(fault)
        found, alarms = planter.found, planter.alarms
    if _is_asked_for(OUT_OF_MEMORY.name):
        runs = tmp_path / "little" / "runs"
        with _launched(runs, *LITTLE_MEMORY) as process:
            planter = Planter(run=runs / RUN, is_alive=lambda: process.poll() is None, healthy_s=0)
            found.append(FirstLine(fault=OUT_OF_MEMORY.name, load=os.getloadavg()[0]))
            planter.await_words(OUT_OF_MEMORY, found[-1], time.monotonic())
    print("\n".join(planted.table(found)))
    result = {"faults": [asdict(one) for one in found], "false_alarms": alarms}
    print(f"RESULT {json.dumps(result)}", flush=True)
    late = [one.fault for one in found if one.seconds is None or one.seconds > WITHIN_S]
    assert (late, alarms) == ([], [])


@contextmanager
def _launched(runs: Path, *settings: str) -> Iterator[subprocess.Popen[str]]:
    """A run from its second step on; SIGINT ends it."""
    runs.mkdir(parents=True, exist_ok=True)
    where = (f"run.dir={runs}", f"run.name={RUN}")
    words = ["launch", "--experiment", "quickstart", *COMMON, *settings, *where]
    with (runs.parent / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*LEASH, *words], stdout=output, stderr=output, text=True, start_new_session=True
        )
        try:
            while len(read_metrics(runs / RUN / "metrics.jsonl", "step")) < 2:
                assert process.poll() is None, (runs.parent / "output.txt").read_text()[-4000:]
                time.sleep(1.0)
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=300)
            print((runs.parent / "output.txt").read_text()[-3000:])


def test_faults_are_twelve_and_each_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in (*IN_A_HEALTHY_RUN, OUT_OF_MEMORY)}) == 12
