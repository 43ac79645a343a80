"""The pool's actors, and the process that places them."""

from __future__ import annotations

import signal

import ray

from rollout_pool.actors.worker import WorkerActor


def test_controller_that_places_an_actor_keeps_its_handler_of_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    ray.remote(WorkerActor)
    assert signal.getsignal(signal.SIGTERM) is handler
