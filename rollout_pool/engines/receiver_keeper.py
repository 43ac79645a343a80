"""Keeps the receiver of one node running and registered in the run."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from buffer.run_state import RunState
from configs.choices import Backend
from processes.leftovers import list_path, remove_leftovers_of_dead_runs, write_list
from processes.silence import wait_silent
from rollout_pool.cancelling import end_tasks
from rollout_pool.types import RolloutSpec
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import ReceiverSpec, WeightSyncError

log = logging.getLogger(__name__)

STAGE_DIR = "/dev/shm"
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pause between two starts of a receiver that keeps dying."""
FIRST_START_S = 60.0
"""How long the first start is retried: an earlier receiver may still hold the folder."""
KILL_AFTER_S = 2.0
"""Time that a silent receiver has to exit before it is killed."""
CLEAR_UP_S = 5.0
"""Time before its task is cancelled again: it may be ending a receiver."""


class ReceiverKeeper:
    """Owns the receiver's process and its stage folder. Its death costs versions, never the run."""

    def __init__(self, spec: RolloutSpec, name: str, host: str) -> None:
        """`host` is where this node listens; the receiver's GPU is the first that it sees.

        A keeper with the same `stage_token` reuses what an earlier keeper's receiver staged.
        """
        self._spec = spec
        self._name = name
        config = spec.weight_sync
        self._folder = Path(config.stage_dir or STAGE_DIR) / f"leash-{spec.run}-{spec.stage_token}"
        self._run_dir = Path(spec.run_dir)
        self._leftovers = list_path(self._run_dir, name)
        self._process = ReceiverProcess(
            ReceiverSpec(
                name=name,
                host=host,
                folder=str(self._folder / name),
                num_slots=config.num_staged,
                num_buffers=config.num_buffers,
                timeout_s=config.timeout_s,
                min_bandwidth=config.min_bandwidth,
                device="cuda:0" if spec.uses_gpu and config.backend is not Backend.gloo else "cpu",
                merge=spec.merge,
                key=spec.weights_key,
            ),
            Path(spec.run_dir) / "logs" / f"{name}.log",
        )
        self._is_ready = False
        self._has_begun = asyncio.Event()
        """It is ready, or was given up."""
        self._running: asyncio.Task[None] | None = None
        self._connected: RunState | None = None

    async def run(self) -> str:
        """Returns why it ended: it was stopped, or the receiver could not be started even once."""
        self._running = asyncio.create_task(self._keep())
        await asyncio.wait({self._running})
        if self._running.cancelled():
            return "was stopped"
        error = self._running.exception()
        assert error is not None, "runs until it is stopped"
        log.error("%s is given up", self._name, exc_info=error)
        self._has_begun.set()
        return f"was given up: {error}"

    async def wait_ready(self) -> None:
        """Waits for the first registration. Raises the error that made it impossible."""
        await self._has_begun.wait()
        if not self._is_ready:
            assert self._running is not None
            await self._running

    async def stop(self, timeout_s: float = 10.0) -> None:
        if self._running is not None:
            await end_tasks({self._running}, CLEAR_UP_S)
        try:
            await self._process.stop(timeout_s)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._folder.exists():
                self._leftovers.unlink(missing_ok=True)
            if self._connected is not None:
                await self._connected.close()

    @property
    def _state(self) -> RunState:
        assert self._connected is not None, "run() comes first"
        return self._connected

    async def _keep(self) -> None:
        spec = self._spec
        self._connected = await RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)
        # Frees the memory of versions staged by runs that were killed or lost this host.
        await asyncio.to_thread(remove_leftovers_of_dead_runs, self._run_dir.parent)
        self._make_folder()
        if self._name in await self._state.receivers():
            await self._note_restart("lost its keeper")
        give_up_at, pause_s = time.monotonic() + FIRST_START_S, SHORTEST_PAUSE_S
        while True:
            try:
                why = await self._live_once()
            except WeightSyncError as error:
                if not self._is_ready and time.monotonic() > give_up_at:
                    raise
                why = f"did not start: {error}"
            if self._is_ready:
                await self._note_restart(why)
            log.warning("%s %s: restarting it", self._name, why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _note_restart(self, why: str) -> None:
        await self._state.forget_receiver(self._name)
        await self._state.append_event("receiver_restarted", self._name, why)

    async def _live_once(self) -> str:
        """Runs the process once; returns how it ended. WeightSyncError: it did not start."""
        url = await self._process.start()
        await self._state.register_receiver(self._name, url)
        self._is_ready = True
        self._has_begun.set()
        dying = asyncio.create_task(self._process.wait_dead())
        stalling = asyncio.create_task(self._wait_silent(url))
        try:
            await asyncio.wait({dying, stalling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks({dying, stalling})
        if not dying.cancelled():
            code = dying.result()
            why = f": {self._process.last_words}" if code > 0 else ""
            return f"died (exit code {code}){why}"
        # A silent process still holds its staged versions and its folder.
        await self._process.stop(KILL_AFTER_S, should_remove=False)
        return f"did not answer for {stalling.result():.0f} s"

    async def _wait_silent(self, url: str) -> float:
        client = ReceiverClient(self._name, url, self._spec.weights_key)

        async def responds(timeout_s: float) -> bool:
            try:
                await client.status(timeout_s=timeout_s)
            except WeightSyncError as error:
                log.warning("%s", error)
                return False
            return True

        try:
            return await wait_silent(responds, self._spec.weight_sync.timeout_s)
        finally:
            await client.close()

    def _make_folder(self) -> None:
        """Listed before it is made, so that it is removed even if this process is killed."""
        write_list(self._leftovers, [self._folder])
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WeightSyncError(
                f"{self._name} cannot make {self._folder} ({error.strerror}); choose another "
                "folder with weight_sync.stage_dir"
            ) from error
