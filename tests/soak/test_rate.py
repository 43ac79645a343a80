"""At full rate for a long time: the memory of the server and of its clients stays flat.

CI runs it for some seconds, `make soak` for half an hour (LEASH_SOAK_MINUTES).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil
import pytest
import redis

from tests.soak.crash import full_rate, processes
from tests.soak.crash.evidence import collect
from tests.soak.crash.mortal_server import MortalServer
from tests.soak.crash.scenario import Scenario
from tests.soak.crash.size import minutes

pytestmark = [pytest.mark.slow, pytest.mark.machine, pytest.mark.long]

DURATION_S = 60 * minutes(short=0.2)
NUM_SAMPLES = 90
REMEMBER_S = max(1, round(DURATION_S / 12))
AUDIT_LENGTH = 2_000
TOLERANCE = 1.05 if DURATION_S >= 300 else 1.5  # a short run sees allocators at their warm-up


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    num_keys: int
    server_bytes: int
    """Resident."""
    dataset_bytes: int
    client_bytes: int
    """Resident, all of them."""


def take_sample(client: redis.Redis, clients: list[psutil.Process]) -> Sample:
    memory = client.info("memory")
    return Sample(
        num_keys=client.dbsize(),
        server_bytes=memory["used_memory_rss"],
        dataset_bytes=memory["used_memory_dataset"],
        client_bytes=sum(each.memory_info().rss for each in clients),
    )


def growth(samples: list[Sample], name: str) -> float:
    """Median of the last third over that of the third before it; the first is the warm-up."""
    third = len(samples) // 3
    values = [getattr(sample, name) for sample in samples]
    return float(median(values[-third:]) / median(values[-2 * third : -third]))


@pytest.mark.timeout(0)  # as long as LEASH_SOAK_MINUTES says
def test_memory_is_flat_at_full_rate(mortal_server: MortalServer, tmp_path: Path) -> None:
    scenario = Scenario(
        url=mortal_server.url,
        run="rate",
        folder=tmp_path,
        num_producers=2,
        num_ranks=2,
        groups_per_step=64,
        in_flight=24,
        lease_timeout_s=30.0,
    )
    settings = replace(scenario.settings, remember_s=REMEMBER_S, audit_length=AUDIT_LENGTH)
    buffer = scenario.blocking_buffer()
    buffer.open(settings, scenario.groups_per_step)
    is_over, barrier = processes.event(), processes.barrier(scenario.num_ranks)
    logs = [tmp_path / f"client-{number}.log" for number in range(4)]
    clients = [
        processes.start(logs[0], full_rate.produce, scenario, 0, is_over),
        processes.start(logs[1], full_rate.produce, scenario, 1, is_over),
        processes.start(logs[2], full_rate.train, scenario, 0, barrier, is_over),
        processes.start(logs[3], full_rate.train, scenario, 1, barrier, is_over),
    ]
    client = redis.Redis.from_url(mortal_server.url, socket_timeout=60.0)
    samples = []
    try:
        watched = [psutil.Process(process.pid) for process in clients]
        began = time.monotonic()
        for number in range(NUM_SAMPLES):
            time.sleep(max(0.0, began + number * DURATION_S / NUM_SAMPLES - time.monotonic()))
            for process, log in zip(clients, logs, strict=True):
                assert process.is_alive(), log.read_text()[-4000:]
            samples.append(take_sample(client, watched))
        stats = buffer.stats()
        is_over.set()
        # Whoever waits for room or for a batch still ends when its processes do.
        for process in clients:
            processes.join(process, 10)
    finally:
        for process in clients:
            processes.kill(process)
            processes.join(process, 10)
    assert stats.is_conserved, stats
    time.sleep(2 * REMEMBER_S if DURATION_S < 300 else 0)
    buffer.sweep()
    faults = buffer.find_violations()
    buffer.close()
    client.close()
    found = collect(mortal_server.url, scenario.run)
    grown = {
        name: round(growth(samples, name), 3)
        for name in ("num_keys", "server_bytes", "dataset_bytes", "client_bytes")
    }
    last = samples[-1]
    print(
        f"{DURATION_S:.0f} s, {stats.acked / DURATION_S:.0f} groups of "
        f"{full_rate.GROUP_SIZE} x {full_rate.NUM_TOKENS} tokens a second; growth {grown}; {last}"
    )
    assert faults == [] and found.orphans == []
    assert stats.acked > 100
    # In the short form keys are those of the groups that ended in the last second.
    judged = [name for name in grown if name != "num_keys" or DURATION_S >= 300]
    assert all(grown[name] < TOLERANCE for name in judged), grown
