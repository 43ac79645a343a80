"""Runs the statements that test a program in a process separate from the program.

    program                                     statements
      has run to its end               ── "ran" ──►  start
      calls f                          ◄── "f(3)" ──  use a name of the program
      returns the result               ─── "9" ───►  compare 9 with the expected value

Only plain values are exchanged (`plain`); other objects stay in the program's process, and the
statements hold proxies by number. So a program sees the arguments of calls but never the expected
values, and whatever it does to Python or to these pipes only changes what its own functions return.
"""

from __future__ import annotations

import builtins
import os
import sys

from rollout_pool.sandbox import plain

TYPE_CHECKING = False  # avoids the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

NAME = "tests.py"
"""File name of the statements in tracebacks."""
GONE = 87
"""Exit code of the statements if the program ended before them."""
_RAN = b"ran"
_LARGEST = 64 * 2**20
"""Limit of one message in bytes."""
_PLAIN_RESULT = "compare the results of its methods instead"


class Gone(BaseException):
    """The other side has ended."""


class Pipes:
    """Pipes between the program and its statements; each side closes the other's ends."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        asked, asking = os.pipe()
        heard, telling = os.pipe()
        self._ends = {"program": (asked, telling), "statements": (heard, asking)}

    def close(self) -> None:
        """Called in the keeper."""
        for side in [*self._ends]:
            self._close(side)

    def of(self, side: str) -> Channel:
        """The channel of "program" or "statements"; called in that process."""
        self._close("program" if side == "statements" else "statements")
        return Channel(*self._ends[side])

    def _close(self, side: str) -> None:
        for descriptor in self._ends[side]:
            os.close(descriptor)


class Channel:
    """One side's two pipe ends. A message is its length in 8 bytes, then its bytes."""

    __slots__ = ("_read", "_reading", "_write", "_writing")

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._read, self._write = os.read, os.write  # a program may replace them in `os`

    def send(self, message: bytes) -> None:
        rest = len(message).to_bytes(8, "big") + message
        try:
            while rest:
                rest = rest[self._write(self._writing, rest) :]
        except BrokenPipeError:
            raise Gone from None

    def receive(self) -> bytes:
        """Raises Gone when the other side has closed its end."""
        size = int.from_bytes(self._receive(8), "big")
        if size > _LARGEST:
            raise ValueError(f"a message of {size} bytes")
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            if not (chunk := self._read(self._reading, size - len(content))):
                raise Gone
            content += chunk
        return content


# The program's side -------------------------------------------------------------------------------


class Server:
    """Serves the statements' calls into a program that has run to its end."""

    def __init__(
        self, channel: Channel, names: dict[str, Any], note: Callable[[BaseException], None]
    ) -> None:
        """`note` gets every error that a call raises."""
        self._channel = channel
        self._names = names
        self._note = note
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self) -> None:
        """Returns when the statements have ended."""
        try:
            self._channel.send(_RAN)
            while True:
                question = plain.decode(self._channel.receive(), self._objects.__getitem__)
                self._channel.send(self._reply(*question))
        except Gone:
            return

    def _reply(self, what: str, given: list[Any], named: dict[str, Any]) -> bytes:
        try:
            value = self._do(what, given, named)
            return plain.encode((None, value, given, named), self._refer)
        except Exception as error:
            if what != "name":  # most names that are looked up are not the program's
                self._note(error)
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return plain.encode((kinds, str(error), [], {}), self._refer)

    def _do(self, what: str, given: list[Any], named: dict[str, Any]) -> Any:
        if what == "name":
            if given[0] not in self._names:
                raise NameError(f"name {given[0]!r} is not defined")
            return self._names[given[0]]
        if what == "call":
            return given[0](*given[1:], **named)
        if what == "item":
            return given[0][given[1]]
        operations: dict[str, Callable[..., Any]] = {
            "attribute": getattr,
            "length": len,
            "iterator": iter,
            "next": next,
            "text": str,
        }
        return operations[what](*given)

    def _refer(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # kept alive, so that its id is not reused
        return number


# The statements' side -----------------------------------------------------------------------------


class Asker:
    """Calls into the program, and turns replies into values and errors.

    If the program has ended, this process ends at once: statements could catch an error.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._remotes: dict[int, Remote] = {}

    def wait_ran(self) -> None:
        """Waits until the program has run to its end."""
        if self._receive() != _RAN:
            os._exit(GONE)

    def ask(self, what: str, *given: Any, **named: Any) -> Any:
        """Raises what the program raised, as the closest built-in exception."""
        question = plain.encode((what, [*given], named), _number)
        try:
            self._channel.send(question)
        except Gone:
            os._exit(GONE)
        kinds, value, given_after, named_after = plain.decode(self._receive(), self._remote)
        if kinds is not None:
            error = _nearest(kinds)
            # A StopIteration from a call would silently end a map() of the statements.
            raise (RuntimeError if error is StopIteration and what != "next" else error)(value)
        after = (*given_after, *named_after.values())
        for mine, now in zip((*given, *named.values()), after, strict=True):
            _update(mine, now)
        return value

    def _receive(self) -> bytes:
        try:
            return self._channel.receive()
        except Gone:
            os._exit(GONE)

    def _remote(self, number: int) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))


class Remote:
    """A proxy of an object of the program. Comparison, containment and truth are refused, since the
    program could fake them."""

    __slots__ = ("_asker", "_number")

    def __init__(self, asker: Asker, number: int) -> None:
        self._asker, self._number = asker, number

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._asker.ask("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._asker.ask("attribute", self, name)

    def __len__(self) -> int:
        return int(self._asker.ask("length", self))

    def __getitem__(self, key: Any) -> Any:
        return self._asker.ask("item", self, key)

    def __iter__(self) -> Any:
        return self._asker.ask("iterator", self)

    def __next__(self) -> Any:
        return self._asker.ask("next", self)

    def __str__(self) -> str:
        return str(self._asker.ask("text", self))

    def __hash__(self) -> int:
        return hash((Remote, self._number))

    def _refuse(self, *_given: Any) -> Any:
        raise TypeError(f"a test cannot compare an object of the program: {_PLAIN_RESULT}")

    __bool__ = __contains__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


class NamedAsModule(Remote):
    """A name of the program that is also a standard library module's: `math.sqrt` is Python's,
    `calendar(2024)` calls the program's."""

    __slots__ = ("_name",)

    def __init__(self, asker: Asker, number: int, name: str) -> None:
        super().__init__(asker, number)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(__import__(self._name), name)


def run_statements(text: str, names: dict[str, Any], asker: Asker) -> None:
    """Run them with the program's names that they mention. Raises what they raise; if the program
    ends first, this process exits with GONE."""
    asker.wait_ran()
    code = compile(text, NAME, "exec", dont_inherit=True)
    for name in sorted(_mentioned(code)):
        if hasattr(builtins, name):
            continue  # always Python's own
        try:
            value = asker.ask("name", name)
        except NameError:
            continue
        if isinstance(value, Remote) and name in sys.stdlib_module_names:
            value = NamedAsModule(asker, value._number, name)
        names[name] = value
    exec(code, names)


def _mentioned(code: CodeType) -> set[str]:
    """Every name that may be looked up, including attributes."""
    names = {name for name in code.co_names if not name.startswith("__")}
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            names |= _mentioned(constant)
    return names


def _number(value: Any) -> int:
    if isinstance(value, Remote):
        return value._number
    raise TypeError(
        f"a test cannot pass {value!r} to a program: only numbers, strings, lists, tuples, sets, "
        "dicts, and objects that it returned"
    )


def _nearest(kinds: list[str]) -> type[Exception]:
    """The first of these names that is a built-in exception."""
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                found("")
            except TypeError:  # UnicodeDecodeError and others take more than a message
                continue
            return found
    return Exception


def _update(mine: Any, now: Any) -> None:
    """Applies what a call did to a list, dict or set argument."""
    if type(mine) is not type(now) or not isinstance(mine, (list, dict, set, bytearray)):
        return
    if plain.encode(mine, _number) == plain.encode(now, _number):
        return  # keep the objects' identity
    mine.clear()
    if isinstance(mine, (list, bytearray)):
        mine.extend(now)
    else:
        mine.update(now)
