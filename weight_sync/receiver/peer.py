"""Copies a staged version from another receiver's memory into this one's, by HTTP ranges."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from tensors.checksums import mismatches, staged_checksums
from tensors.layout import Layout
from weight_sync.receiver.client import ReceiverClient
from weight_sync.timeouts import wire_s
from weight_sync.types import ChecksumMismatch, Manifest, ReceiverSpec, WeightSyncError

RANGE_BYTES = 64 * 2**20
_LET_GO_S = 5.0
"""Longest wait for a peer that may no longer respond: its hold expires by itself."""


async def copy_from_peer(
    url: str, version: int, layout: Layout, data: Tensor, spec: ReceiverSpec
) -> Manifest:
    """Fill `data` (uint8, a file's whole data) with `version`, and verify it.

    `spec` is that of the reading receiver. Blocks the event loop, so run it in a loop of its own.
    Raises WeightSyncError naming this peer's failure.
    """
    array: Any = data.numpy()  # numpy's types do not say that an array is a buffer
    client, reader = ReceiverClient(url, url, spec.key), f"receiver {spec.name}"
    limit_s = spec.timeout_s
    # For the next range: a reader that dies holds the peer's slot no longer than that.
    ttl_s = limit_s + wire_s(RANGE_BYTES, spec)
    source = _Source(url, version, len(array), spec)
    try:
        await client.hold(version, reader, ttl_s, timeout_s=limit_s, as_sent=True)
        manifest = await client.manifest(version, layout, timeout_s=limit_s)
        for start in range(0, len(array), RANGE_BYTES):
            await client.hold(version, reader, ttl_s, timeout_s=limit_s, as_sent=True)
            source.read(start, memoryview(array)[start : start + RANGE_BYTES])
    finally:
        source.close()
        with contextlib.suppress(WeightSyncError):
            await client.let_go(version, reader, timeout_s=min(_LET_GO_S, limit_s))
        await client.close()
    if wrong := mismatches(layout, manifest.checksums, staged_checksums(layout, data)):
        raise ChecksumMismatch(f"{url}: {len(wrong)} tensors arrived damaged")
    return manifest


class _Source:
    """The bytes of one version at a peer. The reader's min_bandwidth bounds the whole copy."""

    # Not through ReceiverClient: http.client reads straight into the slot, while asyncio needed
    # ten times the CPU for the same bytes.

    def __init__(self, url: str, version: int, num_bytes: int, spec: ReceiverSpec) -> None:
        self._url = url
        self._path = f"/data/{version}"
        self._spec = spec
        self._limit_s = wire_s(num_bytes, spec)
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=spec.timeout_s
        )
        self._is_late = False
        # A peer that sends a byte now and then never times out, and keeps one read for days.
        self._timer = threading.Timer(self._limit_s, self._cut_off)
        self._timer.daemon = True
        self._timer.start()

    def read(self, start: int, part: memoryview) -> None:
        """Fill `part`, which begins at byte `start` of the version. Raises WeightSyncError."""
        filled = 0
        try:
            if not self._is_late:
                filled = self._read(start, part)
        except (OSError, http.client.HTTPException) as error:
            if not self._is_late:
                raise WeightSyncError(f"{self._url}: {error!r}") from error
        if self._is_late:
            raise WeightSyncError(
                f"{self._url} did not send {start + len(part)} bytes in {self._limit_s:.0f} s: "
                f"slower than weight_sync.min_bandwidth={self._spec.min_bandwidth:g}"
            )
        if filled < len(part):
            raise WeightSyncError(f"{self._url} ended at byte {start + filled}")

    def _read(self, start: int, part: memoryview) -> int:
        headers = {
            "Authorization": f"Bearer {self._spec.key}",
            "Range": f"bytes={start}-{start + len(part) - 1}",
        }
        self._connection.request("GET", self._path, headers=headers)
        response = self._connection.getresponse()
        if response.status != 206:
            words = response.read(500).decode("utf-8", "replace")
            raise WeightSyncError(f"{self._url} responded with {response.status}: {words}")
        filled = 0
        while filled < len(part) and (count := response.readinto(part[filled:])):
            filled += count
        response.read()  # so that the connection can be reused
        return filled

    def _cut_off(self) -> None:
        self._is_late = True
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._timer.cancel()
        self._connection.close()
