"""Opens a run's buffer: for the controller, and for commands, also after the run's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from buffer.connect import Buffer, connect_buffer
from buffer.redis.address import MASK, PASSWORD_VARIABLE, has_password, with_password
from buffer.redis.address import address as server_address
from buffer.redis.client import EXPLAINED, BufferRedis
from buffer.redis.connection import connect_as
from buffer.redis.server import EmbeddedServer
from buffer.replay_buffer import CAPACITIES
from buffer.results import BufferStats
from buffer.run_state import RunState
from configs.checks import live_text
from configs.introspection import live_settings
from configs.schema import BufferConfig
from controller.ray_environment import LOOPBACK
from controller.run_dir import RunDir, RunDirError

T = TypeVar("T")

STOP_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 5.0
"""Longest that a command waits for one reply of a server that may be gone."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BufferAddress:
    """Where the buffer of a run is."""

    url: str
    run: str
    settings: BufferConfig


def impatient(settings: BufferConfig) -> BufferConfig:
    """The settings with a short outage: somebody waits for the command."""
    return replace(settings, outage_timeout_s=ANSWER_TIMEOUT_S)


@contextmanager
def buffer_address(run_dir: RunDir, url: str | None = None) -> Iterator[BufferAddress]:
    """The address of the run's buffer; `url` is for a run whose folder does not contain it.

    If a finished run had its own server, one is started on its data for the duration of the block.
    Raises RunDirError if the address is unknown, and ConnectionError for errors of the server.
    """
    settings = impatient(run_dir.read_config().buffer)
    if url is None:
        known = _known_url(run_dir, settings)
    else:
        known = with_password(url, None if has_password(url) else settings.password_file)
    server = None
    if known is None:
        server = _serve(run_dir, settings)
        known = server.url
    try:
        yield BufferAddress(url=known, run=run_dir.name, settings=settings)
    except EXPLAINED as error:
        raise ConnectionError(str(error)) from error
    finally:
        if server is not None:
            server.stop(STOP_TIMEOUT_S)


def _serve(run_dir: RunDir, settings: BufferConfig) -> EmbeddedServer:
    """A server on the data of the run's own server, which has ended."""
    folder = run_dir.path / "redis"
    if not (folder / "server.conf").is_file():
        raise RunDirError(
            f"{run_dir.name} is over and {folder} holds no data of a Redis server: give the "
            "address of its buffer with --url"
        )
    return EmbeddedServer.start(folder, settings, LOOPBACK, run_dir.log_of("redis"))


def _known_url(run_dir: RunDir, settings: BufferConfig) -> str | None:
    """The URL of a server that is running; None if it was the run's own and ended with it."""
    # A run that has ended may be writing its report.
    url, is_running = run_dir.read_redis_url(), run_dir.read_record().is_running
    if url is not None and (is_running or settings.url is not None):
        return url
    if is_running:
        raise RunDirError(f"{run_dir.name} is starting; its Redis is not up yet: try again soon")
    return None if settings.url is None else url_of(settings, settings.url)


def url_of(settings: BufferConfig, url: str) -> str:
    """`url` with its password. Raises RunDirError if it is only masked, as in a run's folder."""
    url = with_password(url, settings.password_file)
    if any(f"{sign}{MASK}" in url for sign in (":", "password=")):
        raise RunDirError(
            "buffer.url: the run's folder does not keep its password; set "
            f"{PASSWORD_VARIABLE} in the environment or buffer.password_file"
        )
    return url


@asynccontextmanager
async def opened_state(address: BufferAddress) -> AsyncIterator[RunState]:
    """A client of the run's other state in Redis, closed at the end of the block."""
    state = await RunState.connect(address.url, address.run, address.settings)
    try:
        yield state
    finally:
        await state.close()


@asynccontextmanager
async def opened(address: BufferAddress) -> AsyncIterator[Buffer]:
    """An open buffer, closed at the end of the block. Raises BufferConnectionError."""
    buffer = await connect_buffer(address.url, address.run, address.settings)
    try:
        yield buffer
    finally:
        await buffer.close()


@asynccontextmanager
async def raw_client(address: BufferAddress) -> AsyncIterator[BufferRedis]:
    """A client of its Redis, for reads that the buffer does not offer."""
    async with aclosing(await connect_as(address.url, address.settings)) as redis:
        yield redis


async def live_texts(address: BufferAddress, stats: BufferStats) -> dict[str, str]:
    """Live settings as the run's Redis has them, by their names there."""
    async with opened_state(address) as state:
        held = await state.live_settings(live_settings())
    for name in CAPACITIES:  # a shard holds its part
        held[name] = live_text(getattr(stats, name))
    return held


async def answer(
    address: BufferAddress, question: Awaitable[T], timeout_s: float = ANSWER_TIMEOUT_S
) -> T:
    """The result of a call to the buffer; raises ConnectionError if it takes too long."""
    try:
        # Not wait_for: in Python 3.11 it loses a Ctrl-C that arrives together with the reply.
        async with asyncio.timeout(timeout_s):
            return await question
    except TimeoutError:
        raise ConnectionError(
            f"Redis at {server_address(address.url)} did not answer within {timeout_s:g} s: "
            f"it is gone or busy; `make status` says how {address.run} is"
        ) from None


def ask(address: BufferAddress, verb: Callable[[Buffer], Awaitable[T]]) -> T:
    """One call to the buffer, from a command that has no event loop."""

    async def call() -> T:
        async with opened(address) as buffer:
            return await answer(address, verb(buffer))

    return asyncio.run(call())
