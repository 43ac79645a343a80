"""Loads the scripts of `scripts/` and runs them by their hash."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from buffer.cancellation import cancellable
from buffer.keys import Keys

Argument = str | int | bytes

_FOLDER = Path(__file__).parent / "scripts"


class RunNotOpenError(RuntimeError):
    """The run has no settings in Redis: nobody called `open`, or its keys were deleted."""


@cache
def source(name: str) -> str:
    """Text of a script as the server gets it: the shared prelude, then its own."""
    return (_FOLDER / "common.lua").read_text() + (_FOLDER / f"{name}.lua").read_text()


@cache
def digest(name: str) -> str:
    """Hash by which the server knows a script."""
    return sha1(source(name).encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """Runs scripts for one run. Each is atomic and may be repeated, so clients retry freely."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def run(self, name: str, *arguments: Argument) -> Any:
        """The script's reply as redis-py hands it out: int, bytes, None or a list of these."""
        try:
            return await self._evaluate(name, arguments)
        except NoScriptError:  # a new server, or a restarted one: scripts do not survive
            await self._redis.script_load(source(name))
            return await self._evaluate(name, arguments)
        except ResponseError as error:
            raise self.explain(error) from error

    async def run_after_set(
        self, name: str, key: str, value: bytes, expiry_ms: int, *arguments: Argument
    ) -> Any:
        """Sets `key` unless it exists, then runs the script, in one round trip.

        The value travels outside of the script, for Lua would copy it; it expires by itself unless
        the script makes it stay.
        """
        try:
            return await self._evaluate_after_set(name, key, value, expiry_ms, arguments)
        except NoScriptError:
            await self._redis.script_load(source(name))
            return await self._evaluate_after_set(name, key, value, expiry_ms, arguments)
        except ResponseError as error:
            raise self.explain(error) from error

    async def _evaluate(self, name: str, arguments: tuple[Argument, ...]) -> Any:
        return await self._redis.evalsha(digest(name), 1, self._keys.prefix, *arguments)

    async def _evaluate_after_set(
        self, name: str, key: str, value: bytes, expiry_ms: int, arguments: tuple[Argument, ...]
    ) -> Any:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(key, value, px=expiry_ms, nx=True)
            pipe.evalsha(digest(name), 1, self._keys.prefix, *arguments)
            _, reply = await cancellable(pipe.execute())
        return reply

    def explain(self, error: ResponseError) -> Exception:
        """The error to raise for one that a script replied with."""
        if "NOTOPEN" in str(error):  # a pipeline puts the command before it
            return RunNotOpenError(
                f"run {self._keys.run!r} is not open in this Redis: call ReplayBuffer.open() "
                "first, or check the run's name and the URL"
            )
        return error
