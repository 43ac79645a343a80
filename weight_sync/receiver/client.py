"""A receiver from outside, through its HTTP API: for the coordinator and for the engines."""

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
    """Version that has begun and is not finished."""
    received: int
    """Its buckets of the global order that are placed."""
    epoch: int | None
    """Of the weight group that it is a member of."""
    layout_digest: str | None


@dataclass(kw_only=True, slots=True, frozen=True)
class ReceiveReport:
    received: int
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class CatchUpReport:
    peer: str | None
    """URL of the peer whose copy was taken; None: the version was here already."""
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class StagedVersion:
    version: int
    path: str
    """Folder on the receiver's node that holds model.safetensors."""


class ReceiverClient:
    """One receiver by its URL. Used in one event loop.

    Every call is bounded by its `timeout_s`. They raise ReceiverUnreachable when no answer came,
    and the errors that their docstrings name; whatever else the receiver refuses is a
    WeightSyncError with its words.
    """

    def __init__(self, name: str, url: str, key: str) -> None:
        self.name = name
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,  # a proxy for the internet must not come between
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

    async def layout(self, layout: Layout, *, timeout_s: float) -> None:
        """Room for this model's staged versions; the same layout again changes nothing.

        Raises StoreFullError when the stage folder has too little of it.
        """
        digest = await self._call(
            "POST", "/layout", layout.to_json(), timeout_s, lambda reply: str(reply["digest"])
        )
        if digest != layout.digest:
            raise WeightSyncError(
                f"{self.name} reads the model's layout differently: {digest} is not "
                f"{layout.digest}; trainer and receiver must run the same release"
            )

    async def begin(self, transfer: Transfer, *, timeout_s: float) -> int:
        """Prepares a free slot; returns how many buckets of this transfer it has already.

        Raises StoreBusyError when every slot is being read, WeightSyncError when a delta's base is
        not staged.
        """
        return await self._call(
            "POST", "/begin", transfer.to_json(), timeout_s, lambda reply: int(reply["received"])
        )

    async def join(self, spec: GroupSpec, rank: int, *, timeout_s: float) -> None:
        """Returns when the epoch's group has formed; leaves the group of an earlier epoch."""
        body = {"group": spec.to_json(), "rank": rank}
        await self._call("POST", "/join", body, timeout_s, _nothing)

    async def receive(
        self, epoch: int, version: int, first: int, *, timeout_s: float
    ) -> ReceiveReport:
        """Takes the buckets from `first` on. Raises TransferFailed, with what arrived before."""
        body = {"epoch": epoch, "version": version, "first": first}
        return await self._call(
            "POST", "/receive", body, timeout_s, lambda reply: ReceiveReport(**reply)
        )

    async def finish(self, manifest: Manifest, *, timeout_s: float) -> float:
        """Compares the whole version with its manifest (a delta is applied first).

        Returns the seconds it took. Raises ChecksumMismatch: the version is discarded.
        """
        return await self._call(
            "POST", "/finish", manifest.to_json(), timeout_s, lambda reply: float(reply["verify_s"])
        )

    async def release(self, version: int, *, timeout_s: float) -> None:
        """Makes a finished version visible to the engines."""
        await self._call("POST", "/release", {"version": version}, timeout_s, _nothing)

    async def catch_up(
        self, version: int, peers: Sequence[str], layout: Layout, *, timeout_s: float
    ) -> CatchUpReport:
        """Copies `version` from the first of the peers (URLs) that can give it, and releases it.

        Raises TransferFailed naming what each peer answered.
        """
        body = {"version": version, "peers": list(peers), "layout": layout.to_json()}
        return await self._call(
            "POST", "/catch_up", body, timeout_s, lambda reply: CatchUpReport(**reply)
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
        """Keeps `version` staged while `who` reads it. Raises UnknownVersion."""
        body = {"version": version, "who": who, "ttl_s": ttl_s}
        await self._call("POST", "/hold", body, timeout_s, _nothing)

    async def let_go(self, version: int, who: str, *, timeout_s: float) -> None:
        body = {"version": version, "who": who}
        await self._call("POST", "/let_go", body, timeout_s, _nothing)

    async def manifest(self, version: int, *, timeout_s: float) -> Manifest:
        """Of a complete version. Raises UnknownVersion."""
        path = f"/manifest/{version}"
        return await self._call("GET", path, None, timeout_s, Manifest.from_json)

    async def close(self) -> None:
        await self._client.aclose()

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
    """Of a call that only has to be done."""


def _refusal(name: str, status: int, reply: Mapping[str, Any]) -> WeightSyncError:
    message = f"{name}: {reply.get('error', f'HTTP status {status}')}"
    match status:
        case 404:
            return UnknownVersion(message)
        case 422:
            return ChecksumMismatch(message, reply["tensors"])
        case 423:
            return StoreBusyError(message)
        case 502:
            return TransferFailed(message, reply["received"])
        case 507:
            return StoreFullError(message)
    return WeightSyncError(message)
