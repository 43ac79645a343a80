"""Client of a receiver's HTTP API: for the coordinator, the engines and other receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from tensors.layout import Layout
from weight_sync.types import (
    BY_STATUS,
    GroupSpec,
    Manifest,
    ManifestNote,
    ReceiverUnreachable,
    Transfer,
    UnknownLayout,
    WeightSyncError,
)

_LONG_POLL_SLACK_S = 10.0
T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class ReceiverStatus:
    name: str
    pid: int
    newest: int | None
    """Newest released version."""
    complete: tuple[int, ...]
    """Whole and verified versions, released or not."""
    receiving: Transfer | None
    """The version that is being received."""
    received: int
    """Number of its buckets, in the global order, that are placed."""
    epoch: int | None
    """Epoch of the weight group that it is a member of."""
    layout_digest: str | None
    """None unless there is room for every staged version of this model."""
    obstacle: str = ""
    """Why no slot is free for another version; empty if one is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StagedVersion:
    version: int
    path: str
    """Folder on the receiver's node that contains model.safetensors."""
    merge_s: float = 0.0
    """Time that an adapter's merging took."""


class ReceiverClient:
    """One receiver by its URL, with the methods of `Receiver`. Used in one event loop.

    Every call is bounded by its `timeout_s`. Calls raise ReceiverUnreachable without a response,
    and the errors of the receiver's method; any other refusal is a WeightSyncError with its
    message.
    """

    def __init__(self, name: str, url: str, key: str) -> None:
        self.name = name
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _http(self) -> aiohttp.ClientSession:
        """Opened by the first call, in its loop. Not httpx: a call takes it four times the CPU, and
        a version needs eight and more. No proxy is asked between machines of a cluster."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                self.url,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._opened

    async def status(self, *, timeout_s: float) -> ReceiverStatus:
        return await self._call("GET", "/status", None, timeout_s, ReceiverStatus)

    async def set_layout(self, layout: Layout, *, timeout_s: float) -> None:
        body = {"layout": layout.to_json(), "digest": layout.digest}
        await self._call("POST", "/layout", body, timeout_s, dict)

    async def join(self, spec: GroupSpec, *, timeout_s: float) -> None:
        await self._call("POST", "/join", {"group": spec}, timeout_s, dict)

    async def receive(self, transfer: Transfer, epoch: int, first: int, *, timeout_s: float) -> int:
        body = {"transfer": transfer, "epoch": epoch, "first": first}
        return await self._call("POST", "/receive", body, timeout_s, int)

    async def verify(self, manifest: Manifest, *, timeout_s: float) -> None:
        await self._call("POST", "/verify", manifest.note, timeout_s, dict)

    async def release(self, version: int, *, timeout_s: float) -> None:
        await self._call("POST", "/release", {"version": version}, timeout_s, dict)

    async def catch_up(
        self, version: int, peers: Sequence[str], layout: Layout, *, timeout_s: float
    ) -> str:
        """See `Receiver.catch_up`."""
        body = {"version": version, "peers": list(peers), "layout_digest": layout.digest}
        try:
            return await self._call("POST", "/catch_up", body, timeout_s, str)
        except UnknownLayout:
            await self.set_layout(layout, timeout_s=timeout_s)
            return await self._call("POST", "/catch_up", body, timeout_s, str)

    async def newest(self, above: int, *, timeout_s: float) -> StagedVersion | None:
        """The newest released version, as soon as it is above `above`; None at the timeout."""
        path = f"/newest?above={above}&timeout_s={timeout_s}"
        limit_s = timeout_s + _LONG_POLL_SLACK_S
        optional: Any = StagedVersion | None
        staged: StagedVersion | None = await self._call("GET", path, None, limit_s, optional)
        return staged

    async def hold(
        self, version: int, who: str, ttl_s: float, *, timeout_s: float, as_sent: bool = False
    ) -> None:
        body = {"version": version, "who": who, "ttl_s": ttl_s, "as_sent": as_sent}
        await self._call("POST", "/hold", body, timeout_s, dict)

    async def let_go(self, version: int, who: str, *, timeout_s: float) -> None:
        await self._call("POST", "/let_go", {"version": version, "who": who}, timeout_s, dict)

    async def manifest(self, version: int, layout: Layout, *, timeout_s: float) -> Manifest:
        """The manifest of a whole version. Raises UnknownVersion, UnknownLayout if that differs."""
        path = f"/manifest/{version}"
        note: ManifestNote = await self._call("GET", path, None, timeout_s, ManifestNote)
        if note.layout_digest != layout.digest:
            raise UnknownLayout(f"{self.name} has another model's weights")
        return Manifest.of(version, layout, note.checksums)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _call(
        self, method: str, path: str, body: object, timeout_s: float, reply_type: type[T]
    ) -> T:
        """The reply as `reply_type`."""
        try:
            async with asyncio.timeout(timeout_s):
                data = None if body is None else msgspec.json.encode(body)
                call = self._http.request(method, path, data=data, allow_redirects=False)
                async with call as response:
                    content = await response.read()
            if not response.ok:
                message = msgspec.json.decode(content)["error"]
                refusal = BY_STATUS.get(response.status, WeightSyncError)
                raise refusal(f"{self.name}: {message}")
            return msgspec.json.decode(content, type=reply_type)
        except TimeoutError as error:
            raise ReceiverUnreachable(
                f"{self.name} at {self.url} did not respond to {path} within {timeout_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise ReceiverUnreachable(
                f"{self.name} at {self.url} cannot be reached for {path}: {error!r}"
            ) from error
        except (ValueError, TypeError, KeyError) as error:  # another program has its port now
            raise ReceiverUnreachable(
                f"the server at {self.url} is not the receiver {self.name} ({path}): {error!r}"
            ) from error
