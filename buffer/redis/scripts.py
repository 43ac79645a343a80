"""Loads the scripts in `lua/` and runs them by their hash."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, cast

from hiredis import pack_command
from redis.exceptions import NoScriptError, ResponseError

from buffer.redis.client import BufferRedis, NotAllowedError
from buffer.redis.keys import Keys

Argument = str | int | bytes

_FOLDER = Path(__file__).parent.parent / "lua"
_LOOK_AGAIN_S = 0.2
_INCLUDE = re.compile(r"^-- @include (lib/\w+)$", re.MULTILINE)


class RunNotOpenError(RuntimeError):
    """The run has no settings in Redis: `open` was not called, or its keys were deleted."""


@cache
def source(name: str) -> str:
    """Text of a script, such as `trainer/form_batch`, as sent to the server."""
    return assemble(_FOLDER / f"{name}.lua")


def assemble(script: Path) -> str:
    """The files of lib/ that a script includes, each once, followed by the script.

    The script becomes the body of a function, so that settle() runs wherever it returns.
    """
    text = script.read_text()
    library: dict[str, str] = {}
    for name in ("lib/base", *_INCLUDE.findall(text)):
        _include(name, library)
    main = f"local function main()\n{text}end\nlocal reply = main()\nsettle()\nreturn reply\n"
    return "".join((*library.values(), main))


def _include(name: str, library: dict[str, str]) -> None:
    if name not in library:
        text = (_FOLDER / f"{name}.lua").read_text()
        for needed in _INCLUDE.findall(text):
            _include(needed, library)
        library[name] = text


@cache
def digest(name: str) -> str:
    """Hash by which the server knows a script."""
    return sha1(source(name).encode(), usedforsecurity=False).hexdigest()


@cache
def script_names() -> tuple[str, ...]:
    """All scripts, by folder and name."""
    paths = (path.relative_to(_FOLDER).with_suffix("") for path in _FOLDER.glob("*/*.lua"))
    return tuple(sorted(path.as_posix() for path in paths if path.parts[0] != "lib"))


class Scripts:
    """Runs scripts on one shard. Each is atomic and idempotent, so clients retry freely."""

    def __init__(self, redis: BufferRedis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._prefix = keys.prefix

    async def run(self, name: str, *arguments: Argument) -> Any:
        """The script's reply: int, bytes, None or a list of these."""
        deadline = time.monotonic() + self._redis.try_for_s
        while True:
            # Not by redis-py, whose calls cost more CPU time than these.
            command = self._packed(name, arguments)
            (reply,) = await self._redis.exchange([command], 1, self._prefix)
            if isinstance(reply, NoScriptError):
                # A new server, or a restarted one: scripts do not survive.
                await self._have_loaded(name, deadline, reply)
            elif isinstance(reply, ResponseError):
                raise self.explain(reply) from reply
            else:
                return reply

    async def load(self) -> None:
        """Loads all scripts into the server, for users who are not allowed to."""
        for name in script_names():
            await self._redis.script_load(source(name))

    async def _have_loaded(self, name: str, deadline: float, error: NoScriptError) -> None:
        """Loads all scripts, or waits for the run's controller to do so if the user may not."""
        if time.monotonic() > deadline:
            raise NotAllowedError(
                f"Redis at {self._redis.where} does not know the script {name!r} of this version "
                "of Leash, and the user in buffer.url may not load it: the controller of run "
                f"{self._keys.run!r} does; launch it with the same version"
            ) from error
        try:
            await self.load()
        except NotAllowedError:
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def exchange(
        self,
        parts: Sequence[bytes | memoryview],
        num_replies: int,
        name: str,
        arguments: Sequence[Argument],
    ) -> list[Any]:
        """Sends packed commands and runs the script after them, in one round trip.

        Returns the replies of the commands, then the script's; each may be an exception.
        """
        command = self._packed(name, arguments)
        *replies, answer = await self._redis.exchange(
            [*parts, command], num_replies + 1, self._prefix
        )
        if isinstance(answer, NoScriptError):  # a new server, or a restarted one
            answer = await self.run(name, *arguments)
        return [*replies, self.explain(answer) if isinstance(answer, ResponseError) else answer]

    def _packed(self, name: str, arguments: Sequence[Argument]) -> bytes:
        command = ("EVALSHA", digest(name), 1, self._prefix, *arguments)
        return cast(bytes, pack_command(cast(Any, command)))

    def explain(self, error: ResponseError) -> Exception:
        """The exception for an error reply of a script."""
        if "NOTOPEN" in str(error):  # a pipeline puts the command before it
            return RunNotOpenError(
                f"run {self._keys.run!r} is not open in this Redis: call ReplayBuffer.open() "
                "first, or check the run's name and the URL"
            )
        return error
