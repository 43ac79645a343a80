"""A receiver as a child process: starts it, tells when it has died, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_sync.types import ReceiverSpec, WeightSyncError

log = logging.getLogger(__name__)

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 16384


@dataclass(kw_only=True, slots=True, frozen=True)
class ReceiverInfo:
    name: str
    url: str
    """Another one after every start."""
    pid: int


@dataclass(kw_only=True, slots=True, frozen=True)
class ReceiverDied:
    name: str
    exit_code: int
    log_tail: str
    """The last lines of its log."""


class ReceiverProcess:
    """Used in one event loop. After it died it may be started again: staged versions stay."""

    def __init__(self, spec: ReceiverSpec, log_path: Path) -> None:
        self.spec = spec
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] | None = None
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
        if self._process is not None:
            _close_input(self._process)
        timeout_s += _staged_bytes(Path(self.spec.folder)) / self.spec.min_bandwidth
        loop = asyncio.get_running_loop()
        first_line: asyncio.Future[bytes] = loop.create_future()
        self._exited = loop.create_future()
        self._process = self._launch()
        watch = threading.Thread(
            target=_watch, args=(self._process, first_line, self._exited), daemon=True
        )
        watch.start()
        try:
            async with asyncio.timeout(timeout_s):
                line = await first_line
        except TimeoutError:
            await self.stop(should_remove=False)
            raise WeightSyncError(
                f"{self.spec.name} could not be called within {timeout_s:g} s of its start; "
                f"the last lines of {self._log_path}:\n{self.log_tail()}"
            ) from None
        except BaseException:
            await self.stop(should_remove=False)
            raise
        if not line:
            died = await self.wait_dead()
            raise WeightSyncError(
                f"{self.spec.name} ended at its start (exit code {died.exit_code}); "
                f"the last lines of {self._log_path}:\n{died.log_tail}"
            )
        said = json.loads(line)
        self._info = ReceiverInfo(name=self.spec.name, url=said["url"], pid=said["pid"])
        return self._info

    async def wait_dead(self) -> ReceiverDied:
        """Returns when the process has ended, also after `stop`."""
        assert self._exited is not None, "start() comes first"
        exit_code = await asyncio.shield(self._exited)
        return ReceiverDied(name=self.spec.name, exit_code=exit_code, log_tail=self.log_tail())

    async def stop(self, timeout_s: float = 10.0, should_remove: bool = True) -> None:
        """End the process; with `should_remove` its staged versions go, too."""
        process, exited = self._process, self._exited
        if process is not None and exited is not None:
            _close_input(process, b"remove\n" if should_remove else b"")
            done, _ = await asyncio.wait({exited}, timeout=timeout_s)
            if not done:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait({exited}, timeout=timeout_s)
        if should_remove:  # one that was killed, by us or another, could not clear up
            await asyncio.to_thread(shutil.rmtree, self.spec.folder, ignore_errors=True)

    def log_tail(self) -> str:
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"({self._log_path}: {error.strerror})"
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _launch(self) -> subprocess.Popen[bytes]:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if _is_loopback(self.spec.host):
            environment["NCCL_SOCKET_IFNAME"] = "lo"
        with self._log_path.open("ab") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "weight_sync.receiver.app", self.spec.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=environment,
                start_new_session=True,  # Ctrl-C in the shell is for the controller
            )
        assert process.stdin is not None
        # Not an argument or a variable: those can be read by others on the machine.
        process.stdin.write(self.spec.key.encode() + b"\n")
        process.stdin.flush()
        return process


def _staged_bytes(folder: Path) -> int:
    """What a receiver that starts in this folder finds there."""
    return sum(file.stat().st_size for file in folder.glob("slot-*/*.safetensors"))


def _close_input(process: subprocess.Popen[bytes], last_words: bytes = b"") -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already
        if not process.stdin.closed:
            process.stdin.write(last_words)
        process.stdin.close()


def _watch(
    process: subprocess.Popen[bytes], line: asyncio.Future[bytes], exited: asyncio.Future[int]
) -> None:
    assert process.stdout is not None
    with process.stdout:
        _tell(line, process.stdout.readline())
        process.stdout.read()  # it says no more; this ends with the process
    _tell(exited, process.wait())


def _tell(future: asyncio.Future[Any], result: Any) -> None:
    def tell() -> None:
        if not future.done():
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        future.get_loop().call_soon_threadsafe(tell)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
