"""Statements that are run behind a program, and kept from it until its own part has ended.

    keeper: statements, a random word          program
                ◄─────────── "ran" ───────────   its own part has come to its end
                 ── statements, then the word ──►  reads the statements and runs them
                ◄────────── the word ───────────   reads the word once they have held

Nothing that a program can find in its frames, print or exit with makes them hold. Yet they run in
the program's own process: one that was written to break this very protocol can break it, and one
whose objects equal everything need not even do that.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False  # so that modules are not imported just to be named
if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "tests.py"
"""What the statements are called in tracebacks."""
_RAN = b"ran"
_WORD_BYTES = 32
_CHUNK = 65536


class Line:
    """Two pipes between the keeper and the program; each side closes what is the other's."""

    __slots__ = ("_asked", "_asking", "_hearing", "_telling")

    def __init__(self) -> None:
        self._asked, self._asking = os.pipe()
        self._hearing, self._telling = os.pipe()

    def close_for_keeper(self) -> None:
        os.close(self._asking)
        os.close(self._hearing)

    def close_for_program(self) -> None:
        os.close(self._asked)
        os.close(self._telling)

    def hand_over(self, statements: bytes) -> bool:
        """The keeper's part, until the program has ended or has no more to say: did they hold?"""
        if os.read(self._asked, _CHUNK) != _RAN:
            return False
        word = os.urandom(_WORD_BYTES)
        rest = b"%d\n%b%b" % (len(statements), statements, word)
        try:
            while rest:
                rest = rest[os.write(self._telling, rest) :]
        except BrokenPipeError:
            return False
        return os.read(self._asked, _CHUNK) == word

    def prepare(self) -> Callable[[dict[str, object], dict[str, str]], None]:
        """The program's part, to be called with its names when it has run.

        It uses what there was before the program could change it, and puts the statements' text
        beside the program's. Raises what the statements raise.
        """
        asking, hearing, in_full = self._asking, self._hearing, _read
        write, trace, profile = os.write, sys.settrace, sys.setprofile
        to_code, execute, original = compile, exec, dict(builtins.__dict__)

        def run(names: dict[str, object], texts: dict[str, str]) -> None:
            trace(None)
            profile(None)
            write(asking, _RAN)
            text = in_full(hearing, None).decode()
            texts[NAME] = text
            names["__builtins__"] = original
            execute(to_code(text, NAME, "exec", dont_inherit=True), names)
            write(asking, in_full(hearing, _WORD_BYTES))

        return run


def _read(descriptor: int, size: int | None, read: Callable[[int, int], bytes] = os.read) -> bytes:
    """So many bytes; None: as many as the line before them says."""
    if size is None:
        digits = b""
        while (digit := read(descriptor, 1)) not in (b"\n", b""):
            digits += digit
        size = int(digits)
    content = b""
    while len(content) < size and (chunk := read(descriptor, size - len(content))):
        content += chunk
    return content
