"""An embedded server that is killed and restarted with its data at the same address."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from buffer.redis.server import EmbeddedServer
from configs.schema import BufferConfig


class MortalServer:
    """Its `url` stays the same across restarts."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "server.log"
        self._server = EmbeddedServer.start(folder, BufferConfig(), "127.0.0.1", self._log)
        self.url = self._server.url

    def kill(self) -> None:
        """SIGKILL: only the current content of the append-only file survives."""
        os.kill(self._server.pid, signal.SIGKILL)
        assert self._server.wait(60) is not None

    def restart(self) -> None:
        self._server.restart()

    def stop(self) -> None:
        self._server.stop(timeout_s=60)

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else "(no log)"
