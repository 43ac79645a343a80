"""Serves the metrics of the catalogue to Prometheus, read from Redis at each scrape.

There is no password: anyone who can reach the port can read the metrics, but nothing else, in
particular no text of a trajectory. Only this machine can reach it, unless cluster.host is set.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from socketserver import TCPServer, ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

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
from host.loop_thread import LoopThread

SCRAPE_TIMEOUT_S = 5.0
"""Below Prometheus' default of 10 s, so that it gets a response even if Redis does not answer."""


class MetricsServer(Collector):
    """An HTTP server with its own threads; `close` it. Raises ValueError for a port in use."""

    def __init__(
        self, address: BufferAddress, host: str, port: int, timeout_s: float = SCRAPE_TIMEOUT_S
    ) -> None:
        self._run = address.run
        self._timeout_s = timeout_s
        self._redis = LoopThread("prometheus")
        self._totals = RecordTotals(address.run)
        self._engines = EngineGauges(address.run)
        self._last_id = STREAM_START
        self._num_errors = 0
        self._lock = threading.Lock()
        """Protects `_num_errors`: each scrape has its own thread."""
        registry = CollectorRegistry()
        try:
            place = address.url, address.run, address.settings
            self._buffer = self._redis.run(connect_buffer(*place))
            self._state = self._redis.run(RunState.connect(*place))
            registry.register(self)
            self._http = _listen(host, port, registry)
        except BaseException:
            self._redis.stop()
            raise
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        bound_host, bound_port = self._http.server_address[:2]
        name = f"[{bound_host!s}]" if ":" in str(bound_host) else str(bound_host)
        self.url = f"http://{name}:{bound_port}/metrics"

    def collect(self) -> Iterator[Family]:
        """All metrics; if Redis does not answer, only that it is down."""
        try:
            metrics = self._redis.run(self._read())
        except Exception:  # every scrape gets a response, and the response counts the error
            metrics = None
        with self._lock:
            self._num_errors += metrics is None
            num_errors = self._num_errors
        scrape = {"is_up": metrics is not None, "num_errors": num_errors}
        yield from families(self._run, "scrape", lambda metric: scrape[metric.field])
        if metrics is not None:
            yield from metrics
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
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._redis.stop(self._buffer.close(), self._state.close())


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape comes every few seconds."""


def _listen(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    class Server(ThreadingMixIn, WSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def server_bind(self) -> None:
            # HTTPServer's version does a reverse DNS lookup: seconds without a DNS server.
            TCPServer.server_bind(self)
            self.server_name, self.server_port = self.socket.getsockname()[:2]
            self.setup_environ()

    try:
        server = Server((host, port), _SilentHandler)
    except OSError as error:
        raise ValueError(
            f"run.prometheus_port={port}: cannot listen on {host}:{port} ({error.strerror}); "
            "choose another port (0 takes a free one), or null for no metrics"
        ) from None
    server.set_app(make_wsgi_app(registry))
    return server
