"""Pictures as files: where a message or a data file says they are, and whether they can be used."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

MARK = "\ufffc"
"""Stands in a message's text where a picture is shown (Unicode's object replacement character)."""
FORMATS = ("PNG", "JPEG")
MAX_BYTES = 16 * 2**20
MAX_PIXELS = 2**25
MAX_RATIO = 200
"""Most by which a side may exceed the other; processors refuse a longer strip."""
KEPT = 64
"""Files that were read last, so that a group checks its pictures once and shares their bytes."""
_TYPES = ("image", "image_url")


def source_of(part: Mapping[str, Any], folder: Path, place: str) -> str:
    """An absolute path or a data URL: the picture of a message's part, in one of the forms

        {"type": "image", "image": "a.png"}      relative to `folder`; or "path" for "image"
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}

    Raises ValueError, which begins with `place`, for another one, or a picture that is unusable.
    """
    given = next((part[key] for key in ("image", "path", "image_url", "url") if key in part), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if part.get("type") not in _TYPES or not isinstance(given, str) or not given:
        raise ValueError(
            f'{place}: {dict(part)!r:.100} is no picture; write {{"type": "image", "image": '
            '"FILE"}, the file relative to the folder of the data, or a data: URL'
        )
    scheme, has_scheme, _ = given.partition("://")
    if has_scheme and scheme != "file":
        raise ValueError(
            f"{place}: {given!r:.100}: pictures are not fetched over the network; save it as a "
            "file and give its path"
        )
    if not given.startswith("data:"):
        path = unquote(given.removeprefix("file://")) if has_scheme else given
        given = str((folder / path).resolve())
    try:
        read_picture(given)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return given


class UnreadablePicture(ValueError):
    """A picture is missing or unusable."""


def read_picture(source: str) -> bytes:
    """The file that is now at an absolute path, or in a data URL. Raises UnreadablePicture saying
    what is wrong with one that is missing, too large, or neither PNG nor JPEG."""
    data = _from_url(source) if source.startswith("data:") else _from_file(source)
    what = f"the picture {source!r:.200}"
    if len(data) > MAX_BYTES:
        raise UnreadablePicture(
            f"{what} has {len(data)} bytes, and the most is {MAX_BYTES}; shrink it"
        )
    try:
        return _decodable(data)
    except Exception as error:  # damaged files raise a dozen types
        raise UnreadablePicture(
            f"{what} cannot be used: {error}; give a whole {' or '.join(FORMATS)} file"
        ) from None


@lru_cache(maxsize=KEPT)  # by content: an environment may write another picture to the same path
def _decodable(data: bytes) -> bytes:
    """The same bytes. Raises what Pillow raises, and ValueError for a size out of the limits."""
    from PIL import Image  # only those who have pictures should wait for it

    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if (pixels := image.width * image.height) > MAX_PIXELS:
            raise ValueError(f"it has {pixels} pixels, and the most is {MAX_PIXELS}; shrink it")
        if max(image.size) > MAX_RATIO * min(image.size):
            raise ValueError(
                f"its sides are {image.width} and {image.height} pixels, and the longer one may "
                f"have at most {MAX_RATIO} times as many as the other; cut it"
            )
        image.load()
    return data


def _from_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadablePicture(
            f"the picture {path!r:.200} cannot be read ({error.strerror}); correct its path"
        ) from None


def _from_url(url: str) -> bytes:
    head, _, text = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadablePicture(
            f"the picture {url!r:.60} cannot be read ({error}); write "
            "data:image/png;base64, and the file in base64"
        ) from None
