"""Reads the end of a log, to show why a process died."""

from __future__ import annotations

import os
from pathlib import Path

from host.printable import printable

_TAIL_BYTES = 16384
_LINE_LENGTH = 400


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, made safe for a terminal, or the reason why it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({log}: {error.strerror})"
    return (
        "\n".join(printable(line[:_LINE_LENGTH]) for line in lines[-count:]) or f"({log} is empty)"
    )
