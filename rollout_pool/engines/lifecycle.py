"""The life cycle of one engine: it serves, dies or is torn, is restarted and catches up.

    start ──► follow the receiver, serve ──► died, silent ──► forgotten ──► start again, same URL
                 │ ▲  in engine_versions      or torn         no requests       │ max_restarts times
                 │ └────────────────── catches up ◄─────────────────────────────┘
                 │                                                              └──► given up
                 └──► leave: no new requests, the last ones end ──► gone

Only an engine that has committed a version is in the run's engine_versions; only those get requests
and count for admission. An engine held for an evaluation is not among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import KW_ONLY, dataclass, field

import psutil

from buffer.probes import Agreement
from buffer.run_state import RunState
from configs.schema import WeightSyncConfig
from processes import tree
from processes.silence import Probe, wait_silent
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.engine import Engine, EngineControl, EngineInfo, Strategy
from rollout_pool.engines.follower import VersionPin, WeightFollower
from rollout_pool.engines.read_back import ReadBack, WeightsNotTaken
from rollout_pool.sampling.engine_client import EngineError

log = logging.getLogger(__name__)

SHORTEST_SILENCE_S, LONGEST_SILENCE_S = 10.0, 30.0
"""Bounds of the silence after which an engine counts as dead (weight_sync.timeout_s)."""
LOOK_AGAIN_S = 5.0
"""How often a hold checks the other engines, in case a change was not announced."""
SYSTEM_PAUSE_S = 5.0
"""Doubled with each restart, before the next one after the system has refused it."""
CLEAR_UP_S = 5.0
"""Time before its tasks are cancelled again: they may be ending a server."""


@dataclass(eq=False)
class EngineLife:
    """Owns an engine and keeps it at the newest version. Used in one event loop.

    life = EngineLife(make_engine(spec), config=config, key=key, state=state)
    await life.start()                              it serves, and follows its receiver
    await life.hold(7, wait_s=60, limit_s=600)      for an evaluation of version 7
    await life.release()
    await life.leave(drain_s=60)
    """

    engine: Engine
    _: KW_ONLY
    config: WeightSyncConfig
    key: str
    """API key of the receiver."""
    state: RunState
    _living: asyncio.Task[str] | None = field(default=None, init=False)
    _num_restarts: int = field(default=0, init=False)
    _has_untaken: bool = field(default=False, init=False)
    """It did not take weights: the next server would not either."""
    _pin: VersionPin = field(default_factory=VersionPin, init=False)
    _guarding: asyncio.Task[None] | None = field(default=None, init=False)

    async def start(self) -> EngineInfo:
        """Raises EngineError if the server does not start, ValueError if it can't commit as set,
        or has no room for the longest trajectory."""
        info = await self.engine.start()
        try:
            await self._check_room()
            await self.engine.strategy(self.config).check()
        except BaseException:
            await self.engine.stop()
            raise
        await self.state.register_engine(self.engine.spec.name, info.url)
        self._living = asyncio.create_task(self._live(None))
        return info

    def start_again(self, why: str) -> None:
        """In the place of `start`, for an engine that was lost with the process that owned it."""
        self._living = asyncio.create_task(self._live(why))

    async def wait_given_up(self) -> str:
        """Why the engine is not restarted any more. Does not return after `stop`."""
        assert self._living is not None, "start() comes first"
        await asyncio.wait({self._living})
        if self._living.cancelled():
            await asyncio.Event().wait()
        return self._living.result()

    async def compare(self) -> Agreement:
        """How engine and trainer agree, as soon as the engine serves a version: where engines
        commit in turn, the trainer goes on after the first. Raises EngineError if it is given up,
        or the trainer has left no probes of its version."""
        assert self._living is not None, "start() comes first"
        serving = asyncio.create_task(self._wait_serving())
        try:
            ends = {serving, self._living}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise EngineError(f"{self.engine.spec.name} {self._living.result()}")
            version = serving.result()
        finally:
            await end_tasks({serving})
        if (probes := await self.state.probes(version)) is None:
            name = self.engine.spec.name
            raise EngineError(f"{name}: the trainer has left nothing to compare at {version}")
        return await self.engine.client.compare(probes)

    async def _wait_serving(self) -> int:
        """The version that it serves."""
        name, served = self.engine.spec.name, await self.state.engine_versions()
        while name not in served:
            served = await self.state.wait_engines_changed(served, LOOK_AGAIN_S)
        return served[name]

    async def hold(self, version: int, wait_s: float, limit_s: float) -> bool:
        """Reserves the engine at one version, the first from `version` on that it serves; waits for
        it up to `wait_s`.

        Until `release`, at the latest after `limit_s`, it is not among the run's engine_versions,
        so router and admission ignore it. False if no such version is reached, or if it is the only
        engine; it is released when the other engines are gone.
        """
        if not self._pin.pinned.is_set():
            await self._end_guard()  # of a hold that was lost with the server
        if not await self._pin.want(version, wait_s):
            return False
        name, is_held = self.engine.spec.name, False
        try:
            others = {*await self.state.engine_versions()} - {name}
            if others and self._pin.pinned.is_set():
                await self.state.forget_engine(name)
                is_held = self._pin.pinned.is_set()
        finally:
            if not is_held:
                self._pin.release()
        if is_held:
            self._guarding = asyncio.create_task(self._guard(limit_s))
        return is_held

    async def release(self) -> None:
        """Let the engine take new versions and requests again; does nothing if it is not held."""
        await self._end_guard()
        self._pin.release()

    async def _end_guard(self) -> None:
        guarding, self._guarding = self._guarding, None
        if guarding is not None:
            await end_tasks({guarding})

    async def _guard(self, limit_s: float) -> None:
        """Ends a hold that lasts too long, or that would leave the run without an engine."""
        try:
            async with asyncio.timeout(limit_s):
                served = await self.state.engine_versions()
                while served:
                    served = await self.state.wait_engines_changed(served, LOOK_AGAIN_S)
            log.warning("%s is released: the other engines are gone", self.engine.spec.name)
        except TimeoutError:
            log.warning("%s is released after %g s", self.engine.spec.name, limit_s)
        finally:
            self._pin.release()

    async def leave(self, drain_s: float) -> None:
        """Take no new requests, let those inside end for at most `drain_s`, and stop. What has not
        ended by then goes on at another engine, with the tokens that it has."""
        await self._end_living()
        await self.state.forget_engine(self.engine.spec.name)
        with contextlib.suppress(EngineError):  # it may be dead already
            await self.engine.client.drain(drain_s)
        await self.engine.stop()
        await self.state.remove_engine(self.engine.spec.name)

    async def stop(self, timeout_s: float = 10.0) -> None:
        await self._end_living()
        await self.engine.stop(timeout_s)

    async def _end_living(self) -> None:
        await self.release()
        if self._living is not None:
            await end_tasks({self._living}, CLEAR_UP_S)

    async def _check_room(self) -> None:
        """An engine silently cuts a completion that does not fit in its whole KV cache."""
        spec, config = self.engine.spec, self.engine.spec.config
        if (longest := spec.context_length) is None:
            return
        if longest <= (room := await self.engine.client.num_kv_tokens()):
            return
        by_memory = spec.uses_gpu and config.max_total_tokens is None
        name = "mem_fraction" if by_memory else "max_total_tokens"
        value = config.mem_fraction if by_memory else config.max_total_tokens
        raise ValueError(
            f"rollout.engine.{name}={'null' if value is None else value}: the KV cache of "
            f"{spec.name} has room for {room} tokens, and a trajectory may have "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}; raise the one, "
            "or lower the others"
        )

    def _read_back(self) -> ReadBack | None:
        spec = self.engine.spec
        # With --dtype a server rounds what it is sent; with an adapter its weights stay the base's.
        if "--dtype" in spec.config.quantizes or spec.adapter is not None:
            return None
        return ReadBack(self.engine.client, self.config.commit_timeout_s)

    async def _live(self, why: str | None) -> str:
        """`why` the engine must be started again first, if it must."""
        name, limit = self.engine.spec.name, self.engine.spec.config.max_restarts
        while True:
            if why is None:
                async with contextlib.AsyncExitStack() as closing:
                    why = await self._serve(closing)
                    self._pin.note_lost()
                    # First of all, so that requests go elsewhere and admission ignores it.
                    await self.state.forget_engine(name)
                    await self.state.append_event("engine_lost", name, why)
            if self._has_untaken:
                return why
            is_up = False
            while not is_up:
                if self._num_restarts >= limit:
                    return f"{why}, after {limit} restarts (rollout.engine.max_restarts={limit})"
                self._num_restarts += 1
                log.warning("%s %s: restarting it", name, why)
                await self.state.append_event("engine_restarted", name, why)
                try:
                    info = await self.engine.restart()
                except (EngineError, OSError) as error:
                    why = f"did not restart: {error}"
                    # A full disk, for example, may be freed.
                    if isinstance(error, OSError) and self._num_restarts < limit:
                        await asyncio.sleep(SYSTEM_PAUSE_S * 2**self._num_restarts)
                else:
                    await self.state.register_engine(name, info.url)
                    is_up = True
            why = None

    async def _serve(self, closing: contextlib.AsyncExitStack) -> str:
        """Follows the receiver until the server has died, is silent or torn; returns which.
        `closing` gets what must be closed then."""
        responds = engine_pulse(self.engine.client, self.engine.info.pid)
        strategy = self.engine.strategy(self.config)
        closing.push_async_callback(strategy.close)
        follower = WeightFollower(
            engine=self.engine.spec.name,
            host=self.engine.spec.host,
            key=self.key,
            config=self.config,
            state=self.state,
            committer=Committer(self.engine.client, strategy, self.config.pause_mode),
            responds=responds,
            pin=self._pin,
            read_back=self._read_back(),
        )
        closing.push_async_callback(follower.forget_receiver)
        limit_s = min(max(self.config.timeout_s, SHORTEST_SILENCE_S), LONGEST_SILENCE_S)
        dying = asyncio.create_task(self.engine.wait_dead())
        stalling = asyncio.create_task(wait_silent(responds, limit_s))
        following = asyncio.create_task(self._follow(strategy, follower))
        ends = {dying, stalling, following}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                return f"died (exit code {dying.result()})"
            if stalling.done():
                return f"did not answer for {stalling.result():.0f} s"
            return following.result()
        finally:
            await end_tasks(ends)

    async def _follow(self, strategy: Strategy, follower: WeightFollower) -> str:
        try:
            await strategy.check()  # it has just been started, and may not respond
            await follower.run()
        except WeightsNotTaken as error:
            self._has_untaken = True
            return str(error)
        except EngineError as error:
            return str(error)


def engine_pulse(client: EngineControl, pid: int) -> Probe:
    """A probe: is this server alive, even if it is busy or paused? `pid`: of a ready server, which
    has started all its processes.

    Its HTTP process responds while the scheduler loads weights or is paused, and even while the
    scheduler is stopped by a signal: the latter shows in the state of its process.
    """
    family = tree.family(pid)

    async def responds(timeout_s: float) -> bool:
        # Stopped by a debugger it would show another state.
        is_stopped = any(_status(process) == psutil.STATUS_STOPPED for process in family)
        return not is_stopped and await client.responds(timeout_s)

    return responds


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:  # the server exits when one of its processes has
        return str(psutil.STATUS_DEAD)
