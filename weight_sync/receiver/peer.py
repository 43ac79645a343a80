"""Copies a staged version from another receiver's memory into this one's, by HTTP ranges."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from torch import Tensor

from weight_sync.checksums import staged_checksums
from weight_sync.errors import ChecksumMismatch
from weight_sync.group import bucket_timeout_s
from weight_sync.layout import Layout, Manifest, mismatches
from weight_sync.receiver.client import ReceiverClient
from weight_sync.types import WeightSyncError

_RANGE_BYTES = 64 * 2**20
_LET_GO_S = 5.0
"""Longest wait for a peer that may have stopped to answer: its hold expires by itself."""


async def copy_from_peer(
    peer: ReceiverClient,
    reader: str,
    version: int,
    layout: Layout,
    data: Tensor,
    *,
    timeout_s: float,
    min_bandwidth: float,
) -> Manifest:
    """Fill `data` (uint8, a file's whole data) with `version`, and verify it.

    `timeout_s` bounds each silence and, with `min_bandwidth`, the whole copy. Raises
    WeightSyncError saying what was wrong with this peer.
    """
    # For one range at a time: a reader that dies keeps the peer's slot no longer than that.
    hold_s = timeout_s + bucket_timeout_s(_RANGE_BYTES, timeout_s, min_bandwidth)
    array: Any = data.numpy()  # numpy's types do not say that an array is a buffer
    view = memoryview(array)
    limit_s = bucket_timeout_s(len(view), timeout_s, min_bandwidth)
    await peer.hold(version, reader, hold_s, timeout_s=timeout_s)
    try:
        manifest = await peer.manifest(version, layout, timeout_s=timeout_s)
        async with asyncio.timeout(limit_s):
            for start in range(0, len(view), _RANGE_BYTES):
                await peer.hold(version, reader, hold_s, timeout_s=timeout_s)
                part = view[start : start + _RANGE_BYTES]
                await peer.read(version, start, part, timeout_s=timeout_s)
    except TimeoutError as error:
        raise WeightSyncError(
            f"{peer.name} did not give {len(view)} bytes in {limit_s:.0f} s: slower than "
            f"weight_sync.min_bandwidth={min_bandwidth:g}"
        ) from error
    finally:
        with contextlib.suppress(WeightSyncError):
            await peer.let_go(version, reader, timeout_s=min(_LET_GO_S, timeout_s))
    if wrong := mismatches(layout, manifest.checksums, staged_checksums(layout, data)):
        raise ChecksumMismatch(f"{len(wrong)} tensors arrived damaged", wrong)
    return manifest
