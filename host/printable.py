"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.table import Table

_REPLACEMENT = "\ufffd"
_DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_SHOWN = (
    {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys((*range(0x80, 0xA0), *_DIRECTIONS, *range(0xD800, 0xE000)), _REPLACEMENT)
)


def printable(text: str) -> str:
    """The text with visible symbols for control characters except line ends and tabs.

    Raw escape sequences could move the cursor, write to the clipboard or set the window's title,
    and direction marks could reorder the text. The length does not change.
    """
    return text.translate(_SHOWN)


class PrintableStream:
    """A text stream that writes only printable text to another one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # Progress bars restart their line; `\r` alone is harmless in a log.
        parts = [printable(part) for part in text.split("\r")]
        return self._stream.write("\r".join(parts))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def table_of(rows: Sequence[Mapping[str, str]]) -> Table:
    """Each row has its cells by the names of their columns. They are plain text: no markup."""
    from rich import box  # each process of a run imports this module, and few draw tables
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row.values()))
    return table
