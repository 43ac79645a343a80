"""Reads the end of a log, for the message that says why a process died."""

from __future__ import annotations

import os
from pathlib import Path

from configs.printable import printable

_TAIL_BYTES = 16384
_LINE_LENGTH = 400


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, fit to be shown on a terminal, or why there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({log}: {error.strerror})"
    return (
        "\n".join(printable(line[:_LINE_LENGTH]) for line in lines[-count:]) or f"({log} is empty)"
    )
