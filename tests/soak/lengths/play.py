"""Plays one run to its end, through any number of resumes."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from multiprocessing.process import BaseProcess
from typing import Any

from buffer.redis.server import EmbeddedServer
from processes.child import Child
from rollout_pool.engines.engine import EngineInfo
from tests.soak.crash import processes
from tests.soak.lengths.clients import (
    TIMEOUT_S,
    Checkpoint,
    read_checkpoint,
    run_trainer,
    run_worker,
)
from tests.soak.lengths.scene import ENGINE, RUN, Scene
from tests.support.blocking import BlockingReplayBuffer, BlockingRunState

HANG_S = 3 * TIMEOUT_S
END_S = 30.0
LATEST_KILL_S = 0.1
"""After the step that the plan names: a few steps."""


class End(StrEnum):
    """How a session ends before the next one resumes the run."""

    stop = "stop"  # as `make stop`; Redis starts again on its data
    kill = "kill"  # SIGKILL of worker and trainer; Redis goes on
    kill_all = "kill all"  # SIGKILL of them and a Redis that begins empty


class Play:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._dice = random.Random(scene.seed)
        self._number = 0
        """Number of Redis' folders so far."""
        self._server = self._start_server()

    def run(self, ends: Sequence[tuple[int, End]]) -> Checkpoint:
        """`ends`: after which step each session but the last one ends, and how.

        Returns the last checkpoint.
        """
        for step, end in ends:
            with self._session() as (worker, trainer, channel):
                reached = self._wait_for_step(step, worker, channel)
                assert reached, f"the run ended before step {step}: {self._logs()}"
                time.sleep(self._dice.uniform(0, LATEST_KILL_S))  # anywhere in a step
                self._end(end, worker, trainer)
        with self._session() as (worker, trainer, channel):
            self._wait_for_step(sys.maxsize, worker, channel)
            assert processes.join(trainer, END_S) == 0, self._logs()
            self._stop(worker)
        checkpoint = read_checkpoint(self._scene)
        assert checkpoint is not None and checkpoint.is_last
        return checkpoint

    def counters(self) -> dict[str, float]:
        """Sums of the worker's counters, over all its lives."""
        state = BlockingRunState(self._server.url, RUN, self._scene.buffer)
        try:
            found: dict[str, float] = state.counters()
        finally:
            state.close()
        return found

    def close(self) -> None:
        self._server.stop(END_S)

    def _start_server(self) -> EmbeddedServer:
        folder = self._scene.folder / f"redis-{self._number}"
        return EmbeddedServer.start(
            folder, self._scene.buffer, "127.0.0.1", self._scene.folder / "redis.log"
        )

    @contextmanager
    def _session(self) -> Iterator[tuple[BaseProcess, BaseProcess, Any]]:
        """From a start of all processes to the end of all, as `make launch` and `make resume`."""
        scene, url = self._scene, self._server.url
        self._open()
        folder = scene.folder
        command = [sys.executable, "-m", "benchmarks.rollouts.gpu_engine"]
        command += [str(scene.speed), str(scene.places)]
        child = Child(command, folder / "engine.log", speaks=True)
        started: list[BaseProcess] = []
        try:
            port = int(asyncio.run(child.first_line()))
            engine = EngineInfo(name=ENGINE, url=f"http://127.0.0.1:{port}", pid=child.pid)
            ours, theirs = processes.pipe()
            log = folder / "trainer.log"
            trainer = processes.start(log, run_trainer, scene, url, engine, theirs)
            started.append(trainer)
            theirs.close()
            worker = processes.start(folder / "worker.log", run_worker, scene, url)
            started.append(worker)
            yield worker, trainer, ours
        finally:
            for process in started:
                processes.kill(process)
                processes.join(process, END_S)
            child.stop(timeout_s=END_S)

    def _open(self) -> None:
        """As the controller does before it starts the pools."""
        scene, url = self._scene, self._server.url
        restored = read_checkpoint(scene)
        buffer = BlockingReplayBuffer(url, RUN, scene.buffer)
        state = BlockingRunState(url, RUN, scene.buffer)
        try:
            buffer.open(scene.buffer, scene.groups_per_step, scene.policy.oversampling)
            stats = buffer.stats()
            if restored is not None and not (stats.pushed or stats.trainer_version):
                buffer.restore_progress(restored.progress)
            if restored is not None:
                buffer.reclaim(0, counts_as_death=False)
            state.forget_fleet()
        finally:
            buffer.close()
            state.close()

    def _wait_for_step(self, step: int, worker: BaseProcess, channel: Any) -> bool:
        """Or for the trainer's end, which is False."""
        try:
            while channel.poll(HANG_S):
                if channel.recv() >= step:
                    return True
                assert worker.is_alive(), f"the worker has ended: {self._logs()}"
        except EOFError:
            return False
        raise AssertionError(f"no step within {HANG_S:g} s: {self._logs()}")

    def _end(self, end: End, worker: BaseProcess, trainer: BaseProcess) -> None:
        if end is End.stop:
            processes.kill(trainer, signal.SIGTERM)
            assert processes.join(trainer, HANG_S) == 0, self._logs()
            self._stop(worker)
            self._server.stop(END_S)
            self._server = self._start_server()
            return
        for process in (worker, trainer):
            processes.kill(process)
            assert processes.join(process, END_S) == -signal.SIGKILL, self._logs()
        if end is End.kill_all:
            self._server.stop(END_S)
            self._number += 1
            self._server = self._start_server()

    def _stop(self, worker: BaseProcess) -> None:
        processes.kill(worker, signal.SIGTERM)
        assert processes.join(worker, END_S) == 0, self._logs()

    def _logs(self) -> str:
        logs = [self._scene.folder / f"{name}.log" for name in ("trainer", "worker", "engine")]
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in logs
            if log.exists()
        )
