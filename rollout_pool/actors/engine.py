"""The actors of engines: one that follows the trainer, and a teacher's, whose weights stay."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import ray

from buffer.probes import Agreement
from buffer.run_state import RunState
from processes.leftovers import remove_listed
from rollout_pool.actors.names import TEACHER, engine_name
from rollout_pool.actors.placed import PlacedActor, listen_host, log_to_stderr
from rollout_pool.engines.engine import Engine, EngineInfo, engine_spec
from rollout_pool.engines.kinds import make_engine
from rollout_pool.engines.lifecycle import EngineLife
from rollout_pool.types import RolloutSpec

SEED_STRIDE = 1_000_003
"""Step between the sampling seeds of two engines; large, so that neighbouring runs share none."""


class EngineActor(PlacedActor):
    """One engine in a process of its own. Every method is a coroutine; none blocks the others.

    When its process dies, Ray starts it again, on another node if it must, and repeats the calls
    that had no reply: `keep` then starts the engine again, which catches up.
    """

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        log_to_stderr()
        self._spec = spec
        seed = (spec.seed + SEED_STRIDE * index) % 2**31
        self._engine = _engine(engine_name(index), spec, spec.model_path, seed)
        self._life: EngineLife | None = None
        self._state: RunState | None = None
        self._error: Exception | None = None
        self._has_begun = asyncio.Event()
        self._keeping: asyncio.Task[str] | None = None
        self._is_leaving = False

    async def keep(self) -> str:
        """Start the engine and keep it serving; returns why it was given up, but not after `stop`
        or `leave`. A controller that attaches calls it again."""
        if self._is_leaving:
            return "was leaving when its controller died"
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        return await asyncio.shield(self._keeping)

    async def _keep(self) -> str:
        try:
            self._life = await self._begin()
        except Exception as error:
            self._error = error
            return f"did not start: {error}"
        finally:
            self._has_begun.set()
        try:
            return await self._life.wait_given_up()
        except Exception:  # its server may live: the next actor of this name would not know of it
            await self._life.stop()
            raise

    async def _begin(self) -> EngineLife:
        spec, engine = self._spec, self._engine
        self._state = await RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)
        life = EngineLife(engine, config=spec.weight_sync, key=spec.weights_key, state=self._state)
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            await life.start()
            return life
        await self._state.forget_engine(engine.spec.name)
        with contextlib.suppress(OSError, ValueError):  # another host has the list then
            await asyncio.to_thread(remove_listed, engine.spec.leftovers_path)
        life.start_again("lost its process")
        return life

    async def wait_ready(self) -> None:
        """Raises EngineError if the server did not start, ValueError if it can't commit as set."""
        await self._has_begun.wait()
        if self._error is not None:
            raise self._error

    async def gpu_ids(self) -> list[str]:
        """The GPUs that Ray gave this engine, as CUDA_VISIBLE_DEVICES names them."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    async def compare(self) -> Agreement:
        assert self._life is not None, "wait_ready() comes first"
        return await self._life.compare()

    async def hold(self, version: int, wait_s: float, limit_s: float) -> bool:
        return self._life is not None and await self._life.hold(version, wait_s, limit_s)

    async def release(self) -> None:
        if self._life is not None:
            await self._life.release()

    async def leave(self, drain_s: float) -> None:
        """End as EngineLife.leave does. The process can be killed then."""
        self._is_leaving = True
        if self._life is not None:
            await self._life.leave(drain_s)

    async def stop(self, timeout_s: float) -> None:
        if self._life is not None:
            await self._life.stop(timeout_s)
        if self._state is not None:
            await self._state.close()


class TeacherActor(PlacedActor):
    """The engine of a teacher: it has no receiver and commits nothing, and the run ends with it."""

    def __init__(self, spec: RolloutSpec, setting: str, model_path: str) -> None:
        """`setting` names the teacher in messages."""
        log_to_stderr()
        self._setting = setting
        # It has no adapter; nothing reads its experts, and it may have none.
        engine = replace(spec.config.engine, routing_replay=False)
        spec = replace(spec, adapter=None, config=replace(spec.config, engine=engine))
        self._engine = _engine(TEACHER, spec, model_path)
        self._starting: asyncio.Task[EngineInfo] | None = None

    async def url(self) -> str:
        """Starts the server. Raises EngineError if it does not start."""
        return (await asyncio.shield(self._start())).url

    def _start(self) -> asyncio.Task[EngineInfo]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._engine.start())
        return self._starting

    async def keep(self) -> str:
        """Returns how the server ended. A controller that attaches calls it again."""
        await asyncio.wait({self._start()})
        code = await self._engine.wait_dead()
        return f"of {self._setting} died (exit code {code}); a resumed run serves it again"

    async def stop(self, timeout_s: float) -> None:
        await self._engine.stop(timeout_s)


def _engine(name: str, spec: RolloutSpec, model_path: str, seed: int = 0) -> Engine:
    """An engine of the run, on this actor's node."""
    return make_engine(
        engine_spec(
            name,
            spec.config,
            Path(spec.run_dir),
            model_path=model_path,
            trust_remote_code=spec.trust_remote_code,
            host=listen_host(spec.host),
            num_threads=spec.num_threads,
            uses_gpu=spec.uses_gpu,
            key=spec.engine_key,
            seed=seed,
            pause_mode=spec.weight_sync.pause_mode,
            adapter=spec.adapter,
        )
    )
