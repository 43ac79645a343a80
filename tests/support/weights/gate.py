"""Stands between the coordinator and a receiver's HTTP API, and can stop answering on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from urllib.parse import urlsplit


class Gate:
    """Passes requests on, one a connection. What is bytes between members does not come by here."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._came = asyncio.Condition()
        self._serving: set[asyncio.Task[None]] = set()
        self.num_requests: Counter[str] = Counter()
        """Number of requests by path."""
        self.stalls_at: str | None = None
        """From the first request for this path on nothing is answered any more, as by SIGSTOP."""
        self.withholds: str | None = None
        """Requests for this path are not answered; all others are."""
        self.loses_answers_to: str | None = None
        """Requests for this path arrive, but their answers do not."""

    async def start(self) -> str:
        """Returns the URL that leads through the gate."""
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def wait_requests(self, path: str, number: int, timeout_s: float) -> None:
        """Until so many have come in all."""
        async with asyncio.timeout(timeout_s), self._came:
            await self._came.wait_for(lambda: self.num_requests[path] >= number)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._serving.add(task)
        await asyncio.wait([task])
        self._serving.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._exchange(reader, writer)
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *headers = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        path = first.split()[1].decode().partition("?")[0]
        fields = dict(header.lower().split(b": ", 1) for header in headers)
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        async with self._came:
            self.num_requests[path] += 1
            self._came.notify_all()
        if path == self.stalls_at:
            self._open.clear()
        await self._open.wait()
        if path == self.withholds:
            await asyncio.Event().wait()
        kept = [header for header in headers if not header.lower().startswith(b"connection:")]
        head = b"\r\n".join([first, *kept, b"Connection: close"]) + b"\r\n\r\n"
        source, sink = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            sink.write(head + body)
            while chunk := await source.read(2**20):
                if path == self.loses_answers_to:
                    continue
                writer.write(chunk)
                await writer.drain()
        finally:
            sink.close()

    def go_on(self) -> None:
        self.stalls_at = self.withholds = None
        self._open.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
