"""The newest published version, the waits for one, and the record of each publish.

In records `*_at` is Unix time and `*_s` is seconds.
"""

from __future__ import annotations

import asyncio
import time

from weight_sync.coordinator.broadcast import Delivery, EncodedVersion
from weight_sync.sender.snapshot_buffers import Captured
from weight_sync.types import VersionBoard, WeightSyncError

Fields = dict[str, float | int | str]


class Published:
    """Remembers the newest published version and wakes its waiters. Used in one event loop."""

    def __init__(
        self, board: VersionBoard, commit_timeout_s: float, tasks: asyncio.TaskGroup
    ) -> None:
        self._board = board
        self._commit_timeout_s = commit_timeout_s
        self._tasks = tasks
        self.newest: int | None = None
        self.at = 0.0
        """Unix time at which the newest version was published."""
        self._reports: dict[int, asyncio.Task[None]] = {}
        """By version: the tasks that will write the record of a publish."""
        self._has_changed = asyncio.Condition()
        self.obstacle = "no receiver is registered"
        """Why the next version has not been published yet."""

    def has(self, version: int) -> bool:
        return self.newest is not None and self.newest >= version

    async def add(self, version: int, record: asyncio.Future[Fields]) -> None:
        """Publish `version` on the board; a second call changes nothing.

        `record` resolves to the fields of the publish record when the broadcast has ended.
        """
        async with self._has_changed:
            if self.has(version):
                return
            await self._board.publish_weights(version)
            self.newest, self.at = version, time.time()
            self._reports[version] = self._tasks.create_task(self._report(version, record))
            self._has_changed.notify_all()

    async def _report(self, version: int, record: asyncio.Future[Fields]) -> None:
        """Write the record once every engine serves the version, or at the timeout."""
        converged_at = None
        try:
            engines = await self._board.wait_engines_at(version, self._commit_timeout_s)
            converged_at = time.time()
        except TimeoutError:
            engines = await self._board.engine_versions()
        fields = {**await record, "num_engines": len(engines)}
        if converged_at is not None:
            fields["converged_at"] = converged_at
            fields["convergence_s"] = converged_at - float(fields["snapshot_at"])
        await self._board.append_metrics(fields, "publish")
        del self._reports[version]

    async def wait(self, version: int, timeout_s: float) -> None:
        """Wait until `version` or later is published. Raises WeightSyncError with the obstacle."""
        try:
            async with asyncio.timeout(timeout_s), self._has_changed:
                await self._has_changed.wait_for(lambda: self.has(version))
        except TimeoutError:
            raise WeightSyncError(
                f"version {version} was not published within {timeout_s:g} s: {self.obstacle}"
            ) from None

    async def wait_committed(self, version: int, timeout_s: float) -> None:
        """Wait until every live engine (at least one) serves `version` or a later one.

        Raises WeightSyncError naming the engines that do not.
        """
        deadline = time.monotonic() + timeout_s
        await self.wait(version, timeout_s)
        try:
            await self._board.wait_engines_at(version, max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise WeightSyncError(str(error)) from None

    async def drain(self, version: int, timeout_s: float) -> None:
        """Wait until `version` is published and its record is written.

        Waits for engines, but not longer than weight_sync.commit_timeout_s. Raises WeightSyncError
        if it was not published in time.
        """
        deadline = time.monotonic() + timeout_s
        await self.wait(version, timeout_s)
        reports = [task for other, task in self._reports.items() if other <= version]
        if reports:
            await asyncio.wait(reports, timeout=max(0.0, deadline - time.monotonic()))


def skipped_record(captured: Captured) -> Fields:
    """Record of a version that a newer one replaced before any receiver had it."""
    return {**_snapshot(captured), "mode": "skipped"}


def publish_record(
    captured: Captured,
    encoded: EncodedVersion,
    delivery: Delivery,
    *,
    num_bytes: int,
    epoch: int,
    released_at: float,
) -> Fields:
    """Record of a published version, without the time at which all engines have it.

    `num_bytes`: size of the whole model.
    """
    return {
        **_snapshot(captured),
        "mode": "full" if encoded.transfer.is_full else "delta",
        "copy_s": encoded.copy_s,
        "encode_at": encoded.encode_at,
        "encode_s": encoded.encode_s,
        "wire_at": delivery.wire_at,
        "wire_s": delivery.wire_s,
        "verify_at": delivery.verify_at,
        "verify_s": delivery.verify_s,
        "released_at": released_at,
        "stage_s": released_at - encoded.encode_at,
        "bytes": num_bytes,
        "wire_bytes": encoded.transfer.num_wire_bytes,
        "density": encoded.density,
        "epoch": epoch,
        "num_receivers": len(delivery.arrived),
    }


def _snapshot(captured: Captured) -> Fields:
    return {
        "version": captured.version,
        "snapshot_wait_s": captured.wait_s,
        "snapshot_at": captured.snapshot_at,
        "snapshot_s": captured.snapshot_s,
    }
