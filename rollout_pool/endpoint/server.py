"""The endpoint's HTTP server, in the event loop of its worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from rollout_pool.cancelling import end_tasks
from rollout_pool.endpoint.app import make_app
from rollout_pool.endpoint.groups import ExternalGroups
from rollout_pool.endpoint.sessions import Serving, Sessions
from weight_sync.http_server import HttpLimits, ServerConfig

BACKLOG = 4096
CLOSE_S = 5


class Endpoint:
    """Serves `sessions` and `groups` from `start` to `close`."""

    def __init__(
        self,
        serving: Serving,
        *,
        host: str,
        port: int = 0,
        admin_key: str | None = None,
        vocab_size: int | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        """`port` 0 takes a free one. Without `admin_key` one is generated. `vocab_size`: number of
        tokens that the model has embeddings for; by default the tokenizer's."""
        self.sessions = Sessions(serving)
        self.groups = ExternalGroups(self.sessions)
        self.admin_key = admin_key or f"sk-leash-admin-{secrets.token_urlsafe(24)}"
        self._vocab_size = len(serving.tokenizer) if vocab_size is None else vocab_size
        self._limits = limits or HttpLimits()
        self._host = host
        self._port = port
        self._url: str | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Without the /v1."""
        assert self._url is not None, "the endpoint has not been started"
        return self._url

    async def start(self) -> None:
        """Starts to accept requests. Raises OSError naming the address if it is taken."""
        listening = _listen(self._host, self._port)
        host, port = listening.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        app = make_app(
            self.sessions,
            self.groups,
            admin_key=self.admin_key,
            vocab_size=self._vocab_size,
        )
        self._server = _Server(ServerConfig(app, self._limits, close_s=CLOSE_S))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    def write_address(self, path: Path) -> None:
        """Writes the address and the admin key, for programs with access to the run's folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"url": self.url, "admin_key": self.admin_key}) + "\n"
        new = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        new.replace(path)

    async def close(self) -> None:
        """Ends every session and stops listening. May be called twice."""
        self.groups.close()
        await self.sessions.close_all("the run has ended")
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=2 * CLOSE_S)
        await end_tasks([self._serving])


class _Server(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Listens at once, so that no client that has the address is refused."""
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        problem = f"rollout.openai.port={port}: cannot listen on {host}: {error.strerror}"
        raise OSError(error.errno, problem) from error
    return listening
