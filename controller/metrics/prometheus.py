"""Serves the metrics of the catalogue to Prometheus, read from Redis at each scrape.

There is no password: anyone who can reach the port can read the metrics, but nothing else, in
particular no text of a trajectory. Only this machine can reach it, unless cluster.host is set.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from buffer.connect import connect_buffer
from buffer.run_state import STREAM_START, RunState
from controller.buffer_access import BufferAddress
from controller.metrics.prometheus_metrics import (
    EngineGauges,
    RecordTotals,
    Value,
    buffer_families,
    counter_families,
    families,
)
from host.http_server import HttpLimits, ServerConfig
from host.loop_thread import LoopThread
from host.network import listen_for

SCRAPE_TIMEOUT_S = 5.0
"""Below Prometheus' default of 10 s, so that it gets a response even if Redis does not answer."""


class MetricsServer(Collector):
    """An HTTP server in a thread of its own; `close` it. Raises ValueError for a port in use."""

    def __init__(
        self, address: BufferAddress, host: str, port: int, timeout_s: float = SCRAPE_TIMEOUT_S
    ) -> None:
        self._run = address.run
        self._timeout_s = timeout_s
        self._totals = RecordTotals(address.run)
        self._engines = EngineGauges(address.run)
        self._last_id = STREAM_START
        self._num_errors = 0
        self._reading = set[asyncio.Task[list[Family]]]()
        self.parts: Mapping[str, Mapping[str, float]] = {}
        """The parts of the run with an alarm and with a hint, as the controller saw them last."""
        self._found: list[Family] | None = None
        """Read by the last scrape; None if Redis did not answer."""
        registry = CollectorRegistry()
        registry.register(self)
        self._respond = make_asgi_app(registry)
        self._server = uvicorn.Server(ServerConfig(self, HttpLimits(), close_s=1))
        otherwise = ", or null for no metrics"
        listener, url = listen_for("run.prometheus_port", host, port, otherwise)
        self.url = f"{url}/metrics"
        self._loop = LoopThread("prometheus")
        try:
            self._loop.run(self._open(address, listener))
        except BaseException:
            self._loop.stop()
            listener.close()
            raise

    async def _open(self, address: BufferAddress, listener: socket.socket) -> None:
        self._buffer = await connect_buffer(address.url, address.run, address.settings)
        self._state = await RunState.connect(address.url, address.run, address.settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = asyncio.create_task(self._read())
        self._reading.add(reading)
        await asyncio.wait({reading})
        self._reading.discard(reading)
        if reading.cancelled() or reading.exception() is not None:
            self._found = None  # every scrape gets a response, and the response counts the error
            self._num_errors += 1
        else:
            self._found = reading.result()
        await self._respond(scope, receive, send)  # which collects before it waits for anything

    def collect(self) -> Iterator[Family]:
        """All metrics; if Redis does not answer, only that it is down."""
        scrape: dict[str, Value] = {"is_up": self._found is not None, **self.parts}
        scrape["num_errors"] = self._num_errors
        yield from families(self._run, "scrape", lambda metric: scrape.get(metric.field))
        if self._found is not None:
            yield from self._found
            yield from self._totals.registry.collect()

    async def _read(self) -> list[Family]:
        run, state = self._run, self._state
        async with asyncio.timeout(self._timeout_s):
            await self._follow_records()
            served = await state.engine_versions()
            weights: dict[str, Value] = {
                "published": await state.available_version(),
                "num_receivers": len(await state.receivers()),
                "num_engines": len(served),
                "staged": await state.staged_versions(),
                "served": served,
            }
            return [
                *buffer_families(run, await self._buffer.stats()),
                *counter_families(run, await state.counters()),
                *self._engines.families(),
                *families(run, "weights", lambda metric: weights[metric.field]),
            ]

    async def _follow_records(self) -> None:
        while True:
            since = self._last_id
            entries = await self._state.read_metrics(since, 0)
            if self._last_id != since:
                continue  # another scrape took them meanwhile
            if not entries:
                return
            self._last_id = entries[-1].id
            for entry in entries:
                self._totals.add(entry)
                self._engines.add(entry)

    def close(self) -> None:
        """Stop the server, also during a scrape."""
        self._loop.stop(self._end_serving(), self._buffer.close(), self._state.close())

    async def _end_serving(self) -> None:
        self._server.should_exit = True
        for reading in self._reading:  # Redis may not answer
            reading.cancel()
        await self._serving
