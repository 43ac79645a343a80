"""A receiver as a child process: starts it, waits for its end, stops it."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from host.network import is_loopback
from processes.child import Child
from processes.logs import last_lines
from weight_sync.types import ReceiverSpec, WeightSyncError


class ReceiverProcess:
    """Used in one event loop. It may be started again after it died: staged versions stay."""

    def __init__(
        self, spec: ReceiverSpec, log_path: Path, start_child: Callable[..., Child] = Child
    ) -> None:
        """`start_child` takes the arguments of `Child`."""
        self.spec = spec
        self._start_child = start_child
        self._log_path = log_path
        self._child: Child | None = None
        self.url = ""
        """Another one after every start."""

    @property
    def pid(self) -> int:
        """Another one after every start, too."""
        assert self._child is not None, "start() comes first"
        return self._child.pid

    async def start(self, timeout_s: float = 60.0) -> str:
        """Start it and wait until it is ready; returns its URL.

        Raises WeightSyncError with the end of its log if it dies or needs longer than `timeout_s`
        plus the time to verify versions that are staged already.
        """
        await self.stop(should_remove=False)
        staged = Path(self.spec.folder).glob("**/slot-*/*.safetensors")
        timeout_s += sum(file.stat().st_size for file in staged) / self.spec.min_bandwidth
        self._child = self._start_child(
            [sys.executable, "-m", "weight_sync.receiver.app", self.spec.to_json()],
            self._log_path,
            secret=self.spec.key,
            speaks=True,
            environment={"NCCL_SOCKET_IFNAME": "lo"} if is_loopback(self.spec.host) else {},
        )
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._child.first_line()
        except BaseException as error:
            await self.stop(should_remove=False)
            if isinstance(error, TimeoutError):
                problem = f"was not ready within {timeout_s:g} s of its start"
                raise WeightSyncError(self._failure(problem)) from None
            raise
        if not line:
            exit_code = await self.wait_dead()
            raise WeightSyncError(self._failure(f"ended at its start (exit code {exit_code})"))
        self.url = line.decode().strip()
        return self.url

    async def wait_dead(self) -> int:
        """Wait until the process has ended, also by `stop`; returns its exit code."""
        assert self._child is not None, "start() comes first"
        return await self._child.exit()

    async def stop(self, timeout_s: float = 10.0, should_remove: bool = True) -> None:
        """End the process; `should_remove` also deletes its staged versions."""
        if self._child is not None:
            last_words = b"remove\n" if should_remove else b""
            await asyncio.to_thread(self._child.stop, timeout_s, last_words)
        if should_remove:  # a killed process could not remove them
            await asyncio.to_thread(shutil.rmtree, self.spec.folder, ignore_errors=True)

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        return last_lines(self._log_path, 1).strip()

    def _failure(self, problem: str) -> str:
        return (
            f"{self.spec.name} {problem}; the last lines of {self._log_path}:\n"
            f"{last_lines(self._log_path)}"
        )
