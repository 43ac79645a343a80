"""Loads the scripts in `lua/` and runs them by their hash.

A request is a MessagePack map, `request` in the script, whose head lists its fields. A reply is a
number, a text, or an array that becomes a struct:

    class Failure(Reply):
        num_failures: int
        is_quarantined: bool

    failure = await scripts.run("rollout/fail_group", Failure, group_id="group-1", ...)
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import msgspec
from hiredis import pack_command
from redis.exceptions import NoScriptError, ResponseError

from buffer.redis.client import BufferRedis, DamagedRunError, NotAllowedError
from buffer.redis.keys import Keys

R = TypeVar("R")

_FOLDER = Path(__file__).parent.parent / "lua"
_LOOK_AGAIN_S = 0.2
BOUND = 32
"""Groups that one script call may move: far below 10 ms even at a busy server."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_DEFINITION = re.compile(r"^local (?:function )?([\w, ]+)", re.MULTILINE)


class RunNotOpenError(RuntimeError):
    """The run has no settings in Redis: `open` was not called, or its keys were deleted."""


@cache
def source(name: str) -> str:
    """Text of a script, such as `trainer/form_batch`, as sent to the server."""
    return assemble(_FOLDER / f"{name}.lua")


def assemble(script: Path) -> str:
    """The script after the files of lib/ that define what it uses, each once, base.lua first.

    The script becomes the body of a function, so that settle() runs wherever it returns.
    """
    linked: dict[str, str] = {}
    _link("base", linked)
    main = f"local function main()\n{script.read_text()}end\n"
    for needed in _libraries_of(main):
        _link(needed, linked)
    return "".join((*linked.values(), main, "local reply = main()\nsettle()\nreturn reply\n"))


def _link(library: str, linked: dict[str, str]) -> None:
    """Adds a file of lib/ to `linked`, after those that define what it uses."""
    text = (_FOLDER / "lib" / f"{library}.lua").read_text()
    for needed in _libraries_of(text):
        if needed not in (library, *linked):
            _link(needed, linked)
    linked.setdefault(library, text)


def _libraries_of(text: str) -> list[str]:
    """The files of lib/ that define a name in this text."""
    homes = _homes()
    return sorted({homes[word] for word in _WORD.findall(_code(text)) if word in homes})


@cache
def _homes() -> dict[str, str]:
    """The file of lib/ that defines each name."""
    return {
        name: path.stem
        for path in (_FOLDER / "lib").glob("*.lua")
        for names in _DEFINITION.findall(_code(path.read_text()))
        for name in _WORD.findall(names)
    }


def _code(text: str) -> str:
    """The text without comments and strings."""
    return re.sub(r"'[^']*'", "''", re.sub(r"--.*", "", text))


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

    @overload
    async def run(self, name: str, kind: type[R], /, *raw: bytes | str, **request: Any) -> R: ...

    @overload
    async def run(self, name: str, kind: Any, /, *raw: bytes | str, **request: Any) -> Any: ...

    async def run(self, name: str, kind: Any, /, *raw: bytes | str, **request: Any) -> Any:
        """The reply of the script to these fields, as `kind`. `raw` follows the request as it is.

        Raises DamagedRunError for a reply of another kind.
        """
        # Not by redis-py, whose calls cost more CPU time than these.
        return await self._run(name, kind, self._packed(name, request, raw))

    async def _run(self, name: str, kind: Any, command: bytes) -> Any:
        deadline = time.monotonic() + self._redis.try_for_s
        while True:
            (reply,) = await self._redis.exchange([command], 1, self._prefix)
            if isinstance(reply, NoScriptError):
                # A new server, or a restarted one: scripts do not survive.
                await self._have_loaded(name, deadline, reply)
            elif isinstance(reply, ResponseError):
                raise self.explain(reply) from reply
            else:
                return self._typed(name, reply, kind)

    def _typed(self, name: str, reply: Any, kind: Any) -> Any:
        if type(reply) is kind:
            return reply
        try:
            return msgspec.convert(reply, kind, strict=False)
        except msgspec.ValidationError as error:
            raise DamagedRunError(
                f"the run's data in Redis at {self._redis.where} was changed by something other "
                f"than Leash: {name} replied {str(reply)[:80]} ({error}). Launch the run under "
                "another run.name"
            ) from None

    async def load(self) -> None:
        """Loads all scripts into the shard's server, for users who are not allowed to."""
        loads = [_pack("SCRIPT", "LOAD", source(name)) for name in script_names()]
        for reply in await self._redis.exchange(loads, len(loads), self._prefix):
            if isinstance(reply, ResponseError):
                raise reply

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
        kind: Any,
        /,
        **request: Any,
    ) -> list[Any]:
        """Sends packed commands and runs the script after them, in one round trip.

        Returns the replies of the commands, then the script's; each may be an exception.
        """
        command = self._packed(name, request)
        *replies, last = await self._redis.exchange(
            [*parts, command], num_replies + 1, self._prefix
        )
        if isinstance(last, NoScriptError):  # a new server, or a restarted one
            return [*replies, await self._run(name, kind, command)]
        if isinstance(last, ResponseError):
            return [*replies, self.explain(last)]
        return [*replies, self._typed(name, last, kind)]

    def _packed(
        self, name: str, request: Mapping[str, Any], raw: Sequence[bytes | str] = ()
    ) -> bytes:
        encoded = msgspec.msgpack.encode(request)
        return _pack("EVALSHA", digest(name), 1, self._prefix, encoded, *raw)

    def explain(self, error: ResponseError) -> Exception:
        """The exception for an error reply of a script."""
        if "NOTOPEN" in str(error):  # a pipeline puts the command before it
            return RunNotOpenError(
                f"run {self._keys.run!r} is not open in this Redis: call ReplayBuffer.open() "
                "first, or check the run's name and the URL"
            )
        return error


def _pack(*command: bytes | str | int) -> bytes:
    return cast(bytes, pack_command(cast(Any, command)))
