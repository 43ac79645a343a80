"""A receiver as a child process: starts it, tells when it has died, ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from processes.child import Child
from processes.logs import last_lines
from weight_sync.types import ReceiverSpec, WeightSyncError


@dataclass(kw_only=True, slots=True, frozen=True)
class ReceiverInfo:
    name: str
    url: str
    """Another one after every start."""
    pid: int


class ReceiverProcess:
    """Used in one event loop. After it died it may be started again: staged versions stay."""

    def __init__(self, spec: ReceiverSpec, log_path: Path) -> None:
        self.spec = spec
        self._log_path = log_path
        self._child: Child | None = None
        self._info: ReceiverInfo | None = None

    @property
    def info(self) -> ReceiverInfo:
        """Of the process that was started last."""
        assert self._info is not None, "start() comes first"
        return self._info

    async def start(self, timeout_s: float = 60.0) -> ReceiverInfo:
        """Start it and wait until it can be called.

        Raises WeightSyncError with the end of its log if it dies or needs longer than `timeout_s`,
        besides the time in which it verifies what is staged already.
        """
        await self.stop(should_remove=False)
        timeout_s += _staged_bytes(Path(self.spec.folder)) / self.spec.min_bandwidth
        self._child = Child(
            [sys.executable, "-m", "weight_sync.receiver.app", self.spec.to_json()],
            self._log_path,
            secret=self.spec.key,
            speaks=True,
            environment={"NCCL_SOCKET_IFNAME": "lo"} if _is_loopback(self.spec.host) else {},
        )
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._child.first_line()
        except BaseException as error:
            await self.stop(should_remove=False)
            if isinstance(error, TimeoutError):
                problem = f"could not be called within {timeout_s:g} s of its start"
                raise WeightSyncError(self._failure(problem)) from None
            raise
        if not line:
            exit_code = await self.wait_dead()
            raise WeightSyncError(self._failure(f"ended at its start (exit code {exit_code})"))
        said = json.loads(line)
        self._info = ReceiverInfo(name=self.spec.name, url=said["url"], pid=said["pid"])
        return self._info

    async def wait_dead(self) -> int:
        """Its exit code, when the process has ended, also after `stop`."""
        assert self._child is not None, "start() comes first"
        return await self._child.exit()

    async def stop(self, timeout_s: float = 10.0, should_remove: bool = True) -> None:
        """End the process; with `should_remove` its staged versions go, too."""
        if self._child is not None:
            last_words = b"remove\n" if should_remove else b""
            await asyncio.to_thread(self._child.stop, timeout_s, last_words)
        if should_remove:  # one that was killed, by us or another, could not clear up
            await asyncio.to_thread(shutil.rmtree, self.spec.folder, ignore_errors=True)

    def _failure(self, problem: str) -> str:
        return (
            f"{self.spec.name} {problem}; the last lines of {self._log_path}:\n"
            f"{last_lines(self._log_path)}"
        )


def _staged_bytes(folder: Path) -> int:
    """What a receiver that starts in this folder finds there."""
    return sum(file.stat().st_size for file in folder.glob("slot-*/*.safetensors"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
