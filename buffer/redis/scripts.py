"""Loads the scripts in `lua/` and runs them by their hash."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha1
from itertools import islice
from pathlib import Path
from typing import Any, cast

from hiredis import pack_command
from redis.exceptions import NoScriptError, ResponseError

from buffer.redis.batching import Message
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
            try:
                return await self._redis.evalsha(digest(name), 1, self._prefix, *arguments)
            except NoScriptError as error:
                # A new server, or a restarted one: scripts do not survive.
                await self._have_loaded(name, deadline, error)
            except ResponseError as error:
                raise self.explain(error) from error

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

    def after_sets(
        self,
        values: Sequence[tuple[str, bytes | memoryview]],
        expiry_ms: int,
        *arguments: Argument,
    ) -> Message:
        """A message for `exchange` that sets each key unless it exists, then passes `arguments`.

        The values are not passed through the script because Lua would copy them. They expire after
        `expiry_ms` unless the script persists them.
        """
        parts: list[bytes | memoryview] = []
        end = b""
        for key, value in values:
            raw = key.encode()
            parts.append(
                b"%b*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (end, len(raw), raw, len(value))
            )
            parts.append(value)
            end = b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n$2\r\nNX\r\n" % (len(str(expiry_ms)), expiry_ms)
        parts.append(end)
        return Message(parts, len(values), arguments)

    async def exchange(
        self, name: str, first: Sequence[Argument], messages: Sequence[Message]
    ) -> list[Any]:
        """Sends the messages and runs the script once for all. Returns a reply or exception each.

        The script gets the arguments `first`, then those of each message in order, and replies with
        one item per message.
        """
        arguments = [*first, *(argument for m in messages for argument in m.arguments)]
        command = ("EVALSHA", digest(name), 1, self._prefix, *arguments)
        parts = [part for message in messages for part in message.parts]
        parts.append(pack_command(cast(Any, command)))
        num_sets = sum(message.num_replies for message in messages)
        *of_sets, answers = await self._redis.exchange(parts, num_sets + 1, self._prefix)
        if isinstance(answers, NoScriptError):  # a new server, or a restarted one
            answers = await self.run(name, *arguments)
        if isinstance(answers, ResponseError):
            answers = [self.explain(answers)] * len(messages)
        rest = iter(of_sets)
        return [
            _error(islice(rest, message.num_replies)) or answer
            for message, answer in zip(messages, answers, strict=True)
        ]

    def explain(self, error: ResponseError) -> Exception:
        """The exception for an error reply of a script."""
        if "NOTOPEN" in str(error):  # a pipeline puts the command before it
            return RunNotOpenError(
                f"run {self._keys.run!r} is not open in this Redis: call ReplayBuffer.open() "
                "first, or check the run's name and the URL"
            )
        return error


def _error(replies: Iterable[Any]) -> Exception | None:
    """The first error among them; consumes all."""
    return next((reply for reply in list(replies) if isinstance(reply, Exception)), None)
