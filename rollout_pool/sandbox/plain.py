"""Encodes the plain values that a program and the process of its tests exchange.

    None, bool, int, float, complex, str, bytes        exactly as they are
    list, tuple, set, frozenset, dict, bytearray       with plain values in them
    anything else                                      by reference, as a number

An instance of a subclass is sent as its base type. Decoding builds only these types, whatever the
bytes are.
"""

from __future__ import annotations

TYPE_CHECKING = False  # avoids the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_LISTS: dict[bytes, Any] = {b"l": list, b"t": tuple, b"s": set, b"z": frozenset}


def encode(value: object, refer: Callable[[Any], int]) -> bytes:
    """`refer` gives the number of an object that is not plain. Raises what `refer` raises."""
    parts: list[bytes] = []
    _put(value, refer, parts)
    return b"".join(parts)


def decode(content: bytes, resolve: Callable[[int], Any]) -> Any:
    """`resolve` gives the object of a number. Raises ValueError for invalid bytes."""
    value, end = _take(content, 0, resolve)
    if end != len(content):
        raise ValueError("more than one value")
    return value


def _put(value: Any, refer: Callable[[Any], int], parts: list[bytes]) -> None:
    for letter, constant in _CONSTANTS.items():
        if value is constant:
            parts.append(letter)
            return
    if isinstance(value, int):
        _put_text(b"i", int.__format__(value, "x"), parts)
    elif isinstance(value, float):
        _put_text(b"f", float.hex(value), parts)
    elif isinstance(value, complex):
        parts.append(b"c")
        _put(value.real, refer, parts)
        _put(value.imag, refer, parts)
    elif isinstance(value, str):
        _put_text(b"u", value, parts)
    elif isinstance(value, (bytes, bytearray)):
        letter = b"b" if isinstance(value, bytes) else b"a"
        parts += (b"%b%d:" % (letter, len(value)), bytes(value))
    elif isinstance(value, dict):
        parts.append(b"d%d:" % len(value))
        for key, item in value.items():
            _put(key, refer, parts)
            _put(item, refer, parts)
    else:
        for letter, kind in _LISTS.items():
            if isinstance(value, kind):
                parts.append(b"%b%d:" % (letter, len(value)))
                for item in value:
                    _put(item, refer, parts)
                return
        parts.append(b"o%d:" % refer(value))


def _put_text(letter: bytes, text: str, parts: list[bytes]) -> None:
    content = str.encode(text, "utf-8", "surrogatepass")
    parts.append(b"%b%d:%b" % (letter, len(content), content))


def _take(content: bytes, place: int, resolve: Callable[[int], Any]) -> tuple[Any, int]:
    """The value at `place`, and where it ends."""
    letter, place = content[place : place + 1], place + 1
    if letter in _CONSTANTS:
        return _CONSTANTS[letter], place
    if letter == b"c":
        real, place = _take(content, place, resolve)
        imaginary, place = _take(content, place, resolve)
        if not (isinstance(real, float) and isinstance(imaginary, float)):
            raise ValueError("invalid complex number")
        return complex(real, imaginary), place
    colon = content.index(b":", place)
    size, place = int(content[place:colon]), colon + 1
    if letter in _LISTS:
        items, place = _take_many(size, content, place, resolve)
        return _LISTS[letter](items), place
    if letter == b"d":
        items, place = _take_many(2 * size, content, place, resolve)
        return dict(zip(items[::2], items[1::2], strict=True)), place
    if letter == b"o":
        return resolve(size), place
    if not 0 <= size <= len(content) - place:
        raise ValueError("truncated value")
    return _of_bytes(letter, content[place : place + size]), place + size


def _take_many(
    count: int, content: bytes, place: int, resolve: Callable[[int], Any]
) -> tuple[list[Any], int]:
    items = []
    for _ in range(count):
        item, place = _take(content, place, resolve)
        items.append(item)
    return items, place


def _of_bytes(letter: bytes, content: bytes) -> Any:
    if letter == b"i":
        return int(content, 16)
    if letter == b"f":
        return float.fromhex(content.decode())
    if letter == b"u":
        return content.decode("utf-8", "surrogatepass")
    if letter == b"b":
        return content
    if letter == b"a":
        return bytearray(content)
    raise ValueError(f"unknown type of value: {letter!r}")
