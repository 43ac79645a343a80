"""The pool's actors; what the ranks in them do is tested in test_zero3_training.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group

from tests.support.trainer.loop_scene import TIMEOUT_S, loop_spec
from trainer_pool.pool import TrainerActor, TrainerPool
from trainer_pool.types import TrainReport

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_lead_rank_opens_the_rendezvous_and_closed_ranks_are_reported_dead() -> None:
    pool = TrainerPool.create(loop_spec(Path(), ""), placement_group([{"CPU": 0.5}] * 2))
    [(name, rendezvous)] = pool.open_rendezvous().items()
    assert name == "trainer-0"
    socket.create_connection(ray.get(rendezvous, timeout=TIMEOUT_S)).close()
    deaths = pool.deaths()
    pool.close(timeout_s=60.0)
    assert deaths.keys() == {"trainer-0", "trainer-1"}
    for name, death in deaths.items():
        with pytest.raises(RayActorError):
            raise AssertionError(f"{name}: {ray.get(death, timeout=TIMEOUT_S)}")


REPORT = TrainReport(num_steps=3, version=3, was_stopped=False)


class Training:
    """A rank that trains until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_calls = 0

    def train(self) -> TrainReport:
        self.num_calls += 1
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        return REPORT


def test_ranks_go_on_without_their_controller_and_report_to_the_next(tmp_path: Path) -> None:
    spec = replace(loop_spec(tmp_path, ""), outlives_controller=True)
    group = placement_group([{"CPU": 0.5}] * 2, lifetime="detached")
    pool = TrainerPool.create(spec, group)
    pids, watched = ray.get([*pool.pids().values()]), pool.deaths()
    actors = {name: ray.get_actor(name) for name in ray.util.list_named_actors()}
    adopted = TrainerPool.adopt(actors, TIMEOUT_S)
    assert adopted.place.id == group.id
    assert ray.get([*adopted.pids().values()]) == pids
    deaths = adopted.deaths()
    for of_the_first in watched.values():
        assert "another controller" in ray.get(of_the_first, timeout=TIMEOUT_S)
    adopted.close(timeout_s=60.0)
    with pytest.raises(RayActorError):
        ray.get(deaths["trainer-1"], timeout=TIMEOUT_S)
    actors.pop("trainer-1")
    with pytest.raises((LookupError, RayActorError)):
        TrainerPool.adopt(actors, TIMEOUT_S)

    actor, training = TrainerActor(spec, 0), Training()
    actor._trainer = cast("Any", training)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(actor.train)
        assert training.has_begun.wait(TIMEOUT_S)
        second = threads.submit(actor.train)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        third = threads.submit(actor.train)
        with pytest.raises(RuntimeError, match="another controller"):
            second.result(TIMEOUT_S)
        training.may_end.set()
        assert first.result(TIMEOUT_S) is third.result(TIMEOUT_S) is actor.train() is REPORT
    assert training.num_calls == 1
