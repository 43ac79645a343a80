"""Loads the scripts of `scripts/` and runs them by their hash."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
_LIBRARY = ("common", "groups", "lineage", "batches")
_WORD = re.compile(r"[A-Za-z_]\w*")


class RunNotOpenError(RuntimeError):
    """The run has no settings in Redis: nobody called `open`, or its keys were deleted."""


@cache
def source(name: str) -> str:
    """Text of a script as the server gets it.

    Its own text becomes the body of a function, so that what it gathered is written at whichever
    point it returns. Before it comes what it needs of the library, and no more: the server makes
    every function of a script anew at every call.
    """
    end = f"local function main()\n{_text(name)}end\nlocal reply = main()\nsettle()\nreturn reply\n"
    needed, parts = set(_WORD.findall(end)), [end]
    for statement in reversed(_library()):
        names = _names(statement)
        if not names or not needed.isdisjoint(names):
            needed.update(_WORD.findall(statement))
            parts.append(statement)
    return "".join(reversed(parts))


@cache
def digest(name: str) -> str:
    """Hash by which the server knows a script."""
    return sha1(source(name).encode(), usedforsecurity=False).hexdigest()


@cache
def _library() -> tuple[str, ...]:
    """The statements of the library in their order; each begins at the start of a line."""
    statements: list[str] = []
    for line in "".join(map(_text, _LIBRARY)).splitlines(keepends=True):
        if line.startswith(("local ", "if ")):
            statements.append(line)
        elif not line.startswith("--") and line.strip():
            statements[-1] += line
    return tuple(statements)


def _names(statement: str) -> list[str]:
    """What a statement defines; nothing if it only does something."""
    if not statement.startswith("local "):
        return []
    defined = statement.removeprefix("local ").removeprefix("function ")
    return _WORD.findall(re.split(r"[=(]", defined, maxsplit=1)[0])


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text()


class Scripts:
    """Runs scripts for one shard. Each is atomic and may be repeated, so clients retry freely."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def run(self, name: str, *arguments: Argument) -> Any:
        """The script's reply as redis-py hands it out: int, bytes, None or a list of these."""
        try:
            try:
                return await self._evaluate(name, arguments)
            except NoScriptError:  # a new server, or a restarted one: scripts do not survive
                await self._redis.script_load(source(name))
                return await self._evaluate(name, arguments)
        except ResponseError as error:
            raise self.explain(error) from error

    async def run_after_sets(
        self, name: str, values: Sequence[tuple[str, bytes]], expiry_ms: int, *arguments: Argument
    ) -> Any:
        """Sets each key unless it exists, then runs the script, all in one round trip.

        The values travel outside of the script, for Lua would copy them; they expire by themselves
        unless the script makes them stay.
        """
        try:
            try:
                return await self._evaluate_after_sets(name, values, expiry_ms, arguments)
            except NoScriptError:
                await self._redis.script_load(source(name))
                return await self._evaluate(name, arguments)
        except ResponseError as error:
            raise self.explain(error) from error

    async def _evaluate(self, name: str, arguments: tuple[Argument, ...]) -> Any:
        return await self._redis.evalsha(digest(name), 1, self._keys.prefix, *arguments)

    async def _evaluate_after_sets(
        self,
        name: str,
        values: Sequence[tuple[str, bytes]],
        expiry_ms: int,
        arguments: tuple[Argument, ...],
    ) -> Any:
        async with self._redis.pipeline(transaction=False) as pipe:
            for key, value in values:
                pipe.set(key, value, px=expiry_ms, nx=True)
            pipe.evalsha(digest(name), 1, self._keys.prefix, *arguments)
            return (await cancellable(pipe.execute()))[-1]

    def explain(self, error: ResponseError) -> Exception:
        """The error to raise for one that a script replied with."""
        if "NOTOPEN" in str(error):  # a pipeline puts the command before it
            return RunNotOpenError(
                f"run {self._keys.run!r} is not open in this Redis: call ReplayBuffer.open() "
                "first, or check the run's name and the URL"
            )
        return error
