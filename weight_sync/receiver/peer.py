"""Copies a staged version from another receiver's memory into this one's, by HTTP ranges."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from weight_sync.checksums import staged_checksums
from weight_sync.errors import ChecksumMismatch
from weight_sync.group import bucket_timeout_s
from weight_sync.layout import Layout, Manifest, mismatches
from weight_sync.types import WeightSyncError

_RANGE_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_LET_GO_S = 5.0
"""Longest wait for a peer that may have stopped to answer: its hold expires by itself."""


def _bytes_of(data: Tensor) -> memoryview:
    array: Any = data.numpy()  # numpy's types do not say that an array is a buffer
    return memoryview(array)


class Peer:
    """Another receiver, as a source of whole versions. Used by one thread; must be closed."""

    def __init__(
        self, url: str, key: str, who: str, *, timeout_s: float, min_bandwidth: float
    ) -> None:
        """`who` reads. `timeout_s` bounds each silence and with `min_bandwidth` the copy."""
        self._url = url
        self._key = key
        self._who = who
        self._timeout_s = timeout_s
        self._min_bandwidth = min_bandwidth
        parts = urlsplit(url)
        # Not ReceiverClient: http.client reads straight into the slot, while httpx needed ten times
        # the CPU for the same bytes. It also knows no proxies.
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=timeout_s
        )

    def copy(self, version: int, layout: Layout, data: Tensor) -> Manifest:
        """Fill `data` (uint8, a file's whole data) with `version`; verified.

        Raises WeightSyncError saying what was wrong with this peer.
        """
        try:
            self._hold(version)
            try:
                manifest = self._manifest(version, layout)
                self._read_all(version, _bytes_of(data))
            finally:
                self._let_go(version)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise WeightSyncError(f"{self._url}: {error!r}") from error
        if wrong := mismatches(layout, manifest.checksums, staged_checksums(layout, data)):
            raise ChecksumMismatch(f"{self._url}: {len(wrong)} tensors arrived damaged", wrong)
        return manifest

    def close(self) -> None:
        self._connection.close()

    def _manifest(self, version: int, layout: Layout) -> Manifest:
        fields = self._json("GET", f"/manifest/{version}")
        if not isinstance(fields, dict) or fields.get("layout_digest") != layout.digest:
            raise WeightSyncError(f"{self._url} holds another model's weights")
        return Manifest.from_wire(fields, layout)

    def _hold(self, version: int) -> None:
        """For the next range: a reader that dies in it keeps the peer's slot no longer than that.

        Raises WeightSyncError if the version is gone.
        """
        ttl_s = self._timeout_s + bucket_timeout_s(
            _RANGE_BYTES, self._timeout_s, self._min_bandwidth
        )
        self._json("POST", "/hold", {"version": version, "who": self._who, "ttl_s": ttl_s})

    def _let_go(self, version: int) -> None:
        self._connection.close()  # half an answer may be left in it
        self._connection.timeout = min(_LET_GO_S, self._timeout_s)
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, WeightSyncError):
            self._json("POST", "/let_go", {"version": version, "who": self._who})

    def _read_all(self, version: int, data: memoryview) -> None:
        limit_s = bucket_timeout_s(len(data), self._timeout_s, self._min_bandwidth)
        deadline = time.monotonic() + limit_s
        for start in range(0, len(data), _RANGE_BYTES):
            self._hold(version)
            part = data[start : start + _RANGE_BYTES]
            response = self._request(
                "GET",
                f"/data/{version}",
                headers={"Range": f"bytes={start}-{start + len(part) - 1}"},
            )
            if response.status != 206:
                raise WeightSyncError(self._refusal(response))
            filled = 0
            while filled < len(part):
                num_bytes = response.readinto(part[filled : filled + _READ_BYTES])
                if not num_bytes:
                    raise WeightSyncError(f"{self._url} ended at byte {start + filled}")
                filled += num_bytes
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"{self._url} gave {start + filled} bytes in {limit_s:.0f} s: slower than "
                        f"weight_sync.min_bandwidth={self._min_bandwidth:g}"
                    )
            response.read()  # so that the connection can be reused

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = self._request(method, path, body=None if body is None else json.dumps(body))
        if response.status != 200:
            raise WeightSyncError(self._refusal(response))
        return json.loads(response.read())

    def _request(
        self,
        method: str,
        path: str,
        body: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        secret = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._connection.request(method, path, body=body, headers={**secret, **(headers or {})})
        return self._connection.getresponse()

    def _refusal(self, response: http.client.HTTPResponse) -> str:
        words = response.read(500).decode("utf-8", "replace")
        return f"{self._url} answered {response.status}: {words}"
