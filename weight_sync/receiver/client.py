"""Client of a receiver's HTTP API: for the coordinator and the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from weight_sync.errors import (
    ChecksumMismatch,
    ReceiverUnreachable,
    StoreBusyError,
    StoreFullError,
    TransferFailed,
    UnknownLayout,
    UnknownVersion,
)
from weight_sync.layout import Layout, Manifest, Transfer
from weight_sync.types import GroupSpec, WeightSyncError

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
    receiving: int | None
    """Version that has begun and has not finished."""
    received: int
    """Number of its buckets, in the global order, that are placed."""
    epoch: int | None
    """Epoch of the weight group that it is a member of."""
    layout_digest: str | None


@dataclass(kw_only=True, slots=True, frozen=True)
class ReceiveReport:
    received: int
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class CatchUpReport:
    peer: str | None
    """URL of the peer that it was copied from; None if the version was here already."""
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class StagedVersion:
    version: int
    path: str
    """Folder on the receiver's node that holds model.safetensors."""


class ReceiverClient:
    """One receiver by its URL. Used in one event loop.

    Every call is bounded by its `timeout_s`. Calls raise ReceiverUnreachable when no answer came,
    and the errors that their docstrings name; any other refusal is a WeightSyncError with the
    receiver's message.
    """

    def __init__(self, name: str, url: str, key: str) -> None:
        self.name = name
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,  # no proxy between machines of a cluster
            timeout=None,
        )

    async def status(self, *, timeout_s: float) -> ReceiverStatus:
        return await self._call(
            "GET",
            "/status",
            None,
            timeout_s,
            lambda reply: ReceiverStatus(**{**reply, "complete": tuple(reply["complete"])}),
        )

    async def begin(self, transfer: Transfer, layout: Layout, *, timeout_s: float) -> int:
        """Prepare a free slot; returns how many buckets of this transfer it has already.

        `layout` is that of the transfer. Raises StoreFullError if the stage folder has no room for
        the model's staged versions, StoreBusyError if every slot is being read, and WeightSyncError
        if a delta's base is not staged.
        """
        # Not one call with `receive`: preparing may copy a whole model, for which the silence
        # between two buckets leaves no time, and a receiver that refuses must not join the epoch.
        return await self._call_with_layout(
            "/begin", transfer.to_json(), layout, timeout_s, lambda reply: int(reply["received"])
        )

    async def join(self, spec: GroupSpec, rank: int, *, timeout_s: float) -> None:
        """Leave the last epoch's group and join this one; returns when it has formed."""
        body = {"group": spec.to_json(), "rank": rank}
        await self._call("POST", "/join", body, timeout_s, _nothing)

    async def receive(
        self, epoch: int, version: int, first: int, *, timeout_s: float
    ) -> ReceiveReport:
        """Receive the buckets from `first` on. Raises TransferFailed with those that arrived."""
        body = {"epoch": epoch, "version": version, "first": first}
        return await self._call(
            "POST", "/receive", body, timeout_s, lambda reply: ReceiveReport(**reply)
        )

    async def finish(self, manifest: Manifest, *, timeout_s: float) -> float:
        """Compare the whole version with its manifest (a delta is applied first).

        Returns the seconds it took. Raises ChecksumMismatch: the version is discarded.
        """
        return await self._call(
            "POST", "/finish", manifest.to_wire(), timeout_s, lambda reply: float(reply["verify_s"])
        )

    async def release(self, version: int, *, timeout_s: float) -> None:
        """Make a finished version visible to the engines."""
        await self._call("POST", "/release", {"version": version}, timeout_s, _nothing)

    async def catch_up(
        self, version: int, peers: Sequence[str], layout: Layout, *, timeout_s: float
    ) -> CatchUpReport:
        """Copy `version` from the first of the peers (URLs) that has it, and release it.

        Raises TransferFailed with the answer of each peer.
        """
        body = {"version": version, "peers": list(peers), "layout_digest": layout.digest}
        return await self._call_with_layout(
            "/catch_up", body, layout, timeout_s, lambda reply: CatchUpReport(**reply)
        )

    async def newest(self, above: int, *, timeout_s: float) -> StagedVersion | None:
        """The newest released version, as soon as it is above `above`; None at the timeout."""
        path = f"/newest?above={above}&timeout_s={timeout_s}"
        return await self._call(
            "GET",
            path,
            None,
            timeout_s + _LONG_POLL_SLACK_S,
            lambda reply: StagedVersion(**reply) if reply else None,
        )

    async def hold(self, version: int, who: str, ttl_s: float, *, timeout_s: float) -> None:
        """Keep `version` staged while `who` reads it. Raises UnknownVersion."""
        body = {"version": version, "who": who, "ttl_s": ttl_s}
        await self._call("POST", "/hold", body, timeout_s, _nothing)

    async def let_go(self, version: int, who: str, *, timeout_s: float) -> None:
        body = {"version": version, "who": who}
        await self._call("POST", "/let_go", body, timeout_s, _nothing)

    async def manifest(self, version: int, layout: Layout, *, timeout_s: float) -> Manifest:
        """Of a complete version. Raises UnknownVersion, and UnknownLayout if it has another one."""

        def read(reply: Mapping[str, Any]) -> Manifest:
            if reply["layout_digest"] != layout.digest:
                raise UnknownLayout(f"{self.name} holds another model's weights")
            return Manifest.from_wire(reply, layout)

        return await self._call("GET", f"/manifest/{version}", None, timeout_s, read)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call_with_layout(
        self,
        path: str,
        body: Mapping[str, Any],
        layout: Layout,
        timeout_s: float,
        read: Callable[[dict[str, Any]], T],
    ) -> T:
        """The layout itself is sent only to a receiver that does not know its digest."""
        try:
            return await self._call("POST", path, body, timeout_s, read)
        except UnknownLayout:
            body = {**body, "layout": layout.to_json()}
            return await self._call("POST", path, body, timeout_s, read)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        read: Callable[[dict[str, Any]], T],
    ) -> T:
        try:
            async with asyncio.timeout(timeout_s):  # httpx bounds each silence, not the whole call
                response = await self._client.request(method, path, json=body)
            reply = dict(response.json())
            if response.is_error:
                raise _refusal(self.name, response.status_code, reply)
            return read(reply)
        except TimeoutError as error:
            raise ReceiverUnreachable(
                f"{self.name} at {self.url} did not answer {path} within {timeout_s:g} s"
            ) from error
        except httpx.TransportError as error:
            raise ReceiverUnreachable(
                f"{self.name} at {self.url} cannot be reached for {path}: {error!r}"
            ) from error
        except (ValueError, TypeError, KeyError) as error:  # another program has its port now
            raise ReceiverUnreachable(
                f"what answers {path} at {self.url} is not the receiver {self.name}: {error!r}"
            ) from error


def _nothing(reply: object) -> None:
    """For a call without a result."""


def _refusal(name: str, status: int, reply: Mapping[str, Any]) -> WeightSyncError:
    message = f"{name}: {reply.get('error', f'HTTP status {status}')}"
    match status:
        case 404:
            return UnknownVersion(message)
        case 412:
            return UnknownLayout(message)
        case 422:
            return ChecksumMismatch(message, reply["tensors"])
        case 423:
            return StoreBusyError(message)
        case 502:
            return TransferFailed(message, reply["received"])
        case 507:
            return StoreFullError(message)
    return WeightSyncError(message)
