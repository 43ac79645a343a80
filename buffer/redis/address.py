"""Redis URLs and their passwords: given apart from each other, and never shown together."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

PASSWORD_VARIABLE = "LEASH_REDIS_PASSWORD"
MASK = "***"
"""What `config.yaml` says in place of a password."""


def address(url: str) -> str:
    """Where a URL points, without user name or password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    place = parts.netloc.rpartition("@")[2] or "localhost"
    return place if ":" in place else f"{place}:6379"


def has_password(url: str) -> bool:
    """Whether the URL brings its password along."""
    parts = urlsplit(url)
    given = [parts.password, *parse_qs(parts.query).get("password", [])]
    return any(password is not None and password != MASK for password in given)


def with_password(url: str, password_file: str | None = None) -> str:
    """The URL with the password of a file, or of the environment, unless it has one itself.

    Raises ValueError if the file cannot be read, or is named besides a password in the URL.
    """
    of_environment = password_of_environment()  # taken out of it in any case: others inherit it
    if has_password(url):
        if password_file is not None:
            raise ValueError(
                f"buffer.password_file={password_file}: buffer.url has a password too; leave it "
                "out of the URL"
            )
        return url
    password = of_environment if password_file is None else _password_of(Path(password_file))
    if password is None:
        return url
    url = re.sub(r"([?&])password=\*{3}(&|$)", r"\1", url).rstrip("?&")
    scheme, _, rest = url.partition("://")
    user, at, place = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}:{quote(password, safe='')}@{place if at else rest}"


def _password_of(path: Path) -> str:
    try:
        password = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"buffer.password_file={path} cannot be read: {error}") from None
    if not password:
        raise ValueError(f"buffer.password_file={path} is empty: write the password into it")
    return password


@cache
def password_of_environment() -> str | None:
    """Taken out of the environment, so that no process which this one starts inherits it."""
    return os.environ.pop(PASSWORD_VARIABLE, None) or None
