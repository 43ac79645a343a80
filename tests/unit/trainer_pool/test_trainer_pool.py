"""The pool's actors; what the ranks in them do is tested in test_zero3_training.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ray
from loop_scene import TIMEOUT_S, loop_spec
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group

from trainer_pool.pool import TrainerPool

pytestmark = pytest.mark.slow


def test_lead_rank_opens_the_rendezvous_and_closed_ranks_are_reported_dead() -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        pool = TrainerPool.create(loop_spec(Path(), ""), placement_group([{"CPU": 0.5}] * 2))
        [(name, rendezvous)] = pool.open_rendezvous().items()
        assert name == "trainer-0"
        socket.create_connection(ray.get(rendezvous, timeout=TIMEOUT_S)).close()
        deaths = pool.deaths()
        pool.close(timeout_s=20)
        assert deaths.keys() == {"trainer-0", "trainer-1"}
        for name, death in deaths.items():
            with pytest.raises(RayActorError):
                raise AssertionError(f"{name}: {ray.get(death, timeout=TIMEOUT_S)}")
    finally:
        ray.shutdown()
