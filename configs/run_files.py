"""Reads the files of a run's folder: one that is damaged is an error that names it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

T = TypeVar("T")
Scalar = float | int | str
"""A value of a record of `metrics.jsonl`, which is flat."""


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises FileNotFoundError, and ValueError if it cannot be read."""
    with open_bytes(path) as file:
        return file.read()


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file, to read from. Raises as `read_bytes`."""
    try:
        # Without the flag a named pipe would wait here for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{path} is not a regular file")
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The same as text in UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start})") from error


def read_json(path: Path, shape: type[T]) -> T:
    """The JSON in a file as `shape`, a dataclass or another type with all its fields."""
    return parse_json(read_bytes(path), shape, str(path))


@cache  # or each of a long file's lines would cost three times as much
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)


def parse_json(data: bytes | str, shape: type[T], where: str) -> T:
    """JSON as `shape`. Raises ValueError, which begins with `where`."""
    try:
        found: T = _decoder(cast(Any, shape)).decode(data)
        return found
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}") from error
