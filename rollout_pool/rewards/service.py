"""Calls to a scoring service: retried, rate-limited, bounded in number. Keys are never logged."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from configs.rollout_schema import RewardConfig
from host.http_server import has_more_values
from rollout_pool.rewards.reward import Reward
from rollout_pool.tasks.task import Task

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_AT_ONCE = 64
"""Concurrent calls of one part."""
MAX_RESPONSE_BYTES = 64 * 2**20
MAX_SCORE = 1e9
"""A larger number is no reward: models may repeat a digit without end."""
_WORTH_ANOTHER_TRY = (408, 425, 429)
"""In addition to every 5xx."""


class RemoteFailure(RuntimeError):
    """A service gave no usable response in all attempts; the message says why."""


class Refused(Exception):
    """One attempt failed; another may succeed."""

    def __init__(self, why: str, pause_s: float | None = None) -> None:
        """`pause_s`: the service's Retry-After."""
        super().__init__(why)
        self.pause_s = pause_s


class ServiceClient:
    """The client of one reward part's service. Used in one event loop."""

    def __init__(
        self, part: str, config: RewardConfig, *, path: str = "", max_values: int = 100_000
    ) -> None:
        """`path` is appended to the configured URL; a response has at most `max_values` JSON
        values. Raises ValueError if the key is missing."""
        assert config.url is not None, part
        self.config = config
        self._max_values = max_values
        self._url = config.url.rstrip("/") + path if path else config.url
        self._name = _without_secrets(self._url)
        self._key = _key(part, config.api_key_env)
        self._next_call = 0.0
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._client = httpx.AsyncClient(
            # A few KiB that are compressed may be GiB of text.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=config.timeout_s,
            limits=httpx.Limits(max_connections=MAX_AT_ONCE),
            trust_env=_is_outside(self._url),  # no proxy to the cluster's own services
        )

    async def ask(self, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The service's response, a JSON object. `key` is the same for all attempts, so that the
        service can recognise a retry. Raises RemoteFailure."""
        content = json.dumps(body).encode()
        async with self._room:
            for attempt in range(self.config.max_retries + 1):
                await self._wait_turn()
                try:
                    return await self._attempt(content, key)
                except Refused as error:
                    if attempt == self.config.max_retries:
                        tries = f"{attempt + 1} attempts" if attempt else "1 attempt"
                        raise RemoteFailure(f"{self._name}: {error} ({tries})") from error
                    await asyncio.sleep(_pause_s(attempt, error.pause_s))
        raise AssertionError("the last attempt returns or raises")

    async def _wait_turn(self) -> None:
        if per_second := self.config.max_per_second:
            now = time.monotonic()
            mine = max(now, self._next_call)
            self._next_call = mine + 1.0 / per_second
            await asyncio.sleep(mine - now)

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, content: bytes, key: str) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        request = self._client.build_request("POST", self._url, content=content, headers=headers)
        try:
            # httpx limits each read only, which a slow trickle never exceeds.
            async with asyncio.timeout(self.config.timeout_s):
                response = await self._client.send(request, stream=True)
                try:
                    content = await _read(response)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException) as error:
            raise Refused(f"no response within {self.config.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        return self.checked(response, content)

    def checked(self, response: httpx.Response, content: bytes) -> dict[str, Any]:
        """The JSON object in `content`. Raises Refused if a retry may help, else RemoteFailure."""
        status = response.status_code
        if status in _WORTH_ANOTHER_TRY or status >= 500:
            raise Refused(f"HTTP {status}", _retry_after_s(response.headers))
        if status >= 300:
            text = content.decode("utf-8", "replace")
            detail = text.replace(self._key, "(key)") if self._key else text
            raise RemoteFailure(f"{self._name}: HTTP {status}: {detail[:200]}")
        if has_more_values(content, self._max_values):
            raise RemoteFailure(
                f"{self._name}: the response holds more than {self._max_values} JSON values"
            )
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RemoteFailure(f"{self._name}: the response is not JSON") from error
        if not isinstance(parsed, dict):
            raise RemoteFailure(f"{self._name}: the response is not a JSON object")
        return parsed


class RemoteService(Reward):
    """A part that a service scores."""

    path: str = ""
    max_values: ClassVar[int] = 100_000
    """JSON values of a response."""

    def __init__(self, part: str, config: RewardConfig, task: Task | None) -> None:
        """Raises ValueError if the key is missing."""
        super().__init__(part, config, task)
        self._service = ServiceClient(part, config, path=self.path, max_values=self.max_values)
        self.ask = self._service.ask

    async def close(self) -> None:
        await self._service.close()


def _is_outside(url: str) -> bool:
    """Returns whether a proxy may be needed: not for names without a dot and private addresses."""
    host = httpx.URL(url).host
    try:
        return ip_address(host).is_global
    except ValueError:
        return "." in host


async def _read(response: httpx.Response) -> bytes:
    content = bytearray()
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise httpx.DecodingError(f"the response has Content-Encoding {encoding!r:.100}, unasked")
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_RESPONSE_BYTES:
            raise httpx.DecodingError(f"more than {MAX_RESPONSE_BYTES} bytes")
    return bytes(content)


def _pause_s(attempt: int, retry_after_s: float | None) -> float:
    # Exponential back-off with jitter.
    longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt)
    pause_s = random.uniform(longest / 2, longest)
    return pause_s if retry_after_s is None else min(MAX_PAUSE_S, retry_after_s) + pause_s / 10


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """In seconds, from a number or a date."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _key(part: str, variable: str | None) -> str:
    """ "" if the service needs none."""
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "")):
        raise ValueError(
            f"task.rewards.{part}.api_key_env={variable!r}: this environment variable is not set "
            "for the rollout workers; set it before launching the run"
        )
    return key


def _without_secrets(url: str) -> str:
    """The URL without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
