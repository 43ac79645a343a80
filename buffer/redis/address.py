"""Redis URLs and their passwords, which are configured separately and never shown together."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

PASSWORD_VARIABLE = "LEASH_REDIS_PASSWORD"
MASK = "***"
"""Written to `config.yaml` in place of a password."""


def address(url: str) -> str:
    """Host and port, or socket path, of a URL."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    place = parts.netloc.rpartition("@")[2] or "localhost"
    # In a URL that is cut off or not quoted right, a password stands where a port should.
    place = re.sub(r"^([^:\[]*):(?!\d*$).*", r"\1", place)
    return place if ":" in place else f"{place}:6379"


def has_password(url: str) -> bool:
    """Returns whether the URL contains a password."""
    parts = urlsplit(url)
    given = [parts.password, *parse_qs(parts.query).get("password", [])]
    return any(password is not None and password != MASK for password in given)


def with_password(url: str, password_file: str | None = None) -> str:
    """The URL with the password from a file or the environment, unless it has one itself.

    Raises ValueError if the file cannot be read, or if the URL has a password too.
    """
    of_environment = password_of_environment()  # removed in any case: child processes inherit it
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
        raise ValueError(
            f"buffer.password_file={path} cannot be read: {error}; name a text file of this user"
        ) from None
    if not password:
        raise ValueError(f"buffer.password_file={path} is empty: write the password to it")
    return password


@cache
def password_of_environment() -> str | None:
    """Removes the password from the environment, so that no child process inherits it."""
    return os.environ.pop(PASSWORD_VARIABLE, None) or None
