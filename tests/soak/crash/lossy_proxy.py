"""A TCP proxy that sometimes drops a reply: the request arrived, and the connection breaks."""

from __future__ import annotations

import asyncio
import random
import threading
from urllib.parse import urlsplit

_CHUNK = 1 << 16


class LossyProxy:
    """Runs in a thread of its own; connect to `url`."""

    def __init__(self, target_url: str, loss: float, seed: int) -> None:
        parts = urlsplit(target_url)
        self._host, self._port = parts.hostname, parts.port
        self._loss, self._dice = loss, random.Random(seed)
        self.num_lost = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        port = self._server.sockets[0].getsockname()[1]
        self.url = target_url.replace(f":{self._port}/", f":{port}/")

    def close(self) -> None:
        self._server.close()
        self._call(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, coroutine):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()  # what is still to be written would keep it open

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, server_writer}
        requests = asyncio.create_task(_copy(reader, server_writer))
        try:
            while data := await server_reader.read(_CHUNK):
                if self._dice.random() < self._loss:
                    self.num_lost += 1
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            return  # the client went away
        finally:
            requests.cancel()
            writer.close()
            server_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError:
        return
    finally:
        writer.close()
