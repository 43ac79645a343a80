"""One SGLang server as a child process: start, readiness, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import sys
import time
import uuid
from pathlib import Path

import psutil

from configs.choices import PauseMode
from configs.schema import WeightSyncConfig
from processes import tree
from processes.child import Child
from processes.leftovers import write_list
from processes.logs import last_lines
from processes.socket_folder import make_socket_folder
from rollout_pool.engines.engine import EngineInfo, EngineSpec, Strategy
from rollout_pool.engines.sglang.arguments import (
    engine_environment,
    server_arguments,
    shared_memory_bytes,
)
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.strategies import make_strategy
from rollout_pool.sampling.engine_client import EngineError

log = logging.getLogger(__name__)

PORT_ATTEMPTS = 3
RESTART_STOP_S = 5.0
"""Longest wait for a server to exit before it is killed."""
PROBE_INTERVAL_S = 0.25
PROGRESS_INTERVAL_S = 10.0
LOOK_INTERVAL_S = 2.0
LOG_TAIL_LINES = 20


class SGLangEngine:
    """The Engine of SGLang: a server process, its folder of sockets and its log."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._server: _Server | None = None
        self._client: SGLangClient | None = None
        self._info: EngineInfo | None = None
        self._reserved: socket.socket | None = None
        """Reserves the port for the next server after one has died."""

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() comes first"
        return self._info

    @property
    def client(self) -> SGLangClient:
        if self._client is None:
            raise EngineError(f"{self.spec.name} has no server")
        return self._client

    async def start(self) -> EngineInfo:
        deadline = time.monotonic() + self.spec.config.start_timeout_s
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            self._reserved = _reserve_port(self.spec.host)
            try:
                return await self._start_at(self._reserved, deadline)
            except BaseException as error:
                self._let_port_go()
                was_taken = "address already in use" in self.log_tail().lower()
                if not (isinstance(error, EngineError) and was_taken and attempts_left):
                    raise
                log.warning("%s: its port was taken, trying another", self.spec.name)
        raise AssertionError("unreachable")

    def _check_shared_memory(self) -> None:
        needed = shared_memory_bytes(self.spec.config.tp_size)
        free = shutil.disk_usage(tree.SHARED_MEMORY).free
        if free < needed:
            raise EngineError(
                f"{self.spec.name}: no room in {tree.SHARED_MEMORY} for its server, which "
                f"needs {needed} bytes; {free} bytes are free. Delete files there, or make it "
                "larger (in a container: --shm-size)"
            )

    async def restart(self) -> EngineInfo:
        if self._reserved is None:
            return await self.start()
        await self._end_server(RESTART_STOP_S)
        deadline = time.monotonic() + self.spec.config.start_timeout_s
        return await self._start_at(self._reserved, deadline)

    async def _start_at(self, reserved: socket.socket, deadline: float) -> EngineInfo:
        port = int(reserved.getsockname()[1])
        self._check_shared_memory()
        self._launch(port)
        try:
            return await self._wait_ready(port, deadline)
        except BaseException:
            await self._end_server(RESTART_STOP_S)
            raise

    async def wait_dead(self) -> int:
        assert self._server is not None, "start() comes first"
        return await self._server.child.exit()

    async def stop(self, timeout_s: float = 10.0) -> None:
        try:
            await self._end_server(timeout_s)
        finally:
            self._let_port_go()

    def strategy(self, config: WeightSyncConfig) -> Strategy:
        spec = self.spec
        return make_strategy(self.client, config, tp_size=spec.config.tp_size, adapter=spec.adapter)

    async def _end_server(self, timeout_s: float) -> None:
        client, self._client = self._client, None
        try:
            if self._server is not None:
                await asyncio.to_thread(self._server.stop, timeout_s)
        finally:
            if client is not None:
                await client.close()

    def _let_port_go(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def log_tail(self) -> str:
        return last_lines(self.spec.log_path, LOG_TAIL_LINES)

    def _launch(self, port: int) -> None:
        spec = self.spec
        served_name = f"leash-{spec.name}-{uuid.uuid4().hex[:8]}"  # unique
        self._server = _Server(served_name, server_arguments(spec, served_name, port), spec)
        self._client = SGLangClient(
            spec.name,
            _url(spec.host, port),
            key=spec.key,
            request_timeout_s=spec.config.request_timeout_s,
            has_prefix_cache=spec.config.radix_cache,
            keys_prefix_by_version=spec.pause_mode is PauseMode.in_place,
            has_overlap_schedule=spec.uses_gpu,
            needs_seeds=spec.config.deterministic,
            returns_routes=spec.config.routing_replay,
            keeps_versions=spec.adapter is not None,
        )

    async def _wait_ready(self, port: int, deadline: float) -> EngineInfo:
        server, started = self._server, time.monotonic()
        assert server is not None
        next_word, next_look = started + PROGRESS_INTERVAL_S, started
        while not await self.client.is_ready(server.served_name, timeout_s=5.0):
            now = time.monotonic()
            if (exit_code := server.child.wait(0.0)) is not None:
                raise EngineError(f"{self._failed_start('ended')} (exit code {exit_code})")
            if now > deadline:
                limit = f"rollout.engine.start_timeout_s={self.spec.config.start_timeout_s:g}"
                raise EngineError(self._failed_start(f"was not ready within {limit}"))
            if now > next_word:
                log.info("%s: starting for %.0f s", self.spec.name, now - started)
                next_word += PROGRESS_INTERVAL_S
            if now > next_look:  # a killed server leaves what it has created
                server.note_family()
                next_look = now + LOOK_INTERVAL_S
            # There is an event for the end of a process, but none for its readiness.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await server.child.exit()
        # SGLang tries it itself, but without its warm-up before it listens. On a CPU each flush of
        # the cache collects garbage: half a second if all that was imported is walked through.
        await self.client.freeze_garbage()
        log.info("%s: ready after %.1f s", self.spec.name, time.monotonic() - started)
        server.note_family()
        self._info = EngineInfo(
            name=self.spec.name,
            url=_url(self.spec.host, port),
            pid=server.child.pid,
        )
        return self._info

    def _failed_start(self, what: str) -> str:
        return (
            f"{self.spec.name}: the SGLang server {what} during its start; the last lines of "
            f"{self.spec.log_path}:\n{self.log_tail()}\n"
        )


class _Server:
    """The process, and the list of what it leaves if it is killed."""

    def __init__(self, served_name: str, arguments: list[str], spec: EngineSpec) -> None:
        self.served_name = served_name
        self._socket_folder = str(make_socket_folder("leash-sglang-"))
        self._shared_memory: frozenset[Path] = frozenset()
        self._children: list[psutil.Process] = []
        self._leftovers_path = spec.leftovers_path
        command = [sys.executable, "-m", "rollout_pool.engines.sglang.server", self._socket_folder]
        try:
            self._note_leftovers()
            self.child = Child(
                [*command, *arguments],
                spec.log_path,
                secret=spec.key,
                environment=engine_environment(spec),
            )
        except OSError:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            raise

    def note_family(self) -> None:
        """Notes what a killed server would leave: children and shared memory."""
        family = tree.family(self.child.pid)
        self._children = family[1:]
        if not (found := tree.shared_memory_files(family)) <= self._shared_memory:
            self._shared_memory |= found
            self._note_leftovers()

    def _note_leftovers(self) -> None:
        write_list(
            self._leftovers_path, [self._socket_folder, *sorted(map(str, self._shared_memory))]
        )

    def stop(self, timeout_s: float) -> None:
        """Blocks. Also removes what a killed server has left."""
        children = [*self._children, *tree.descendants(self.child.pid)]
        self.child.stop(timeout_s, whole_group=False)  # `tree.kill` ends the right ones
        tree.kill(children, timeout_s)
        for path in self._shared_memory:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._leftovers_path.unlink(missing_ok=True)


def _reserve_port(host: str) -> socket.socket:
    """A free port, held until the socket is closed.

    The server binds its port only after loading its model. Until then a bound socket that does not
    listen reserves the port, and SO_REUSEADDR on both lets the server bind it.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, 0))
    except OSError as error:
        holder.close()
        raise EngineError(
            f"no server can listen on cluster.host={host!r} on this machine: {error}"
        ) from error
    return holder


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
