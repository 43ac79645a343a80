"""The checkpoint engine: brings a policy version from the trainer to every inference engine.

It lives on trainer rank 0. One publish:

    all ranks   gather ──► Snapshot (host)          snapshot_s: training stands still
    rank 0                 │ pause every engine     ┐
                           │ broadcast bucket 0 ──► receive + load │ wire_s
                           │ broadcast bucket 1 ──► ...            │
                           │ resume, check the served version      ┘ pause_s, per engine

Engines load straight into the serving weights, so they stay paused for the whole transfer:
between two buckets the weights are neither version and must not decode. Engines that stage the
bytes and only pause for a local commit take the place of `_transfer`; everything around it stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from configs.schema import WeightSyncConfig
from weight_sync.group import join_as_sender, open_store, resolve_backend, sender_device
from weight_sync.snapshot import Snapshot
from weight_sync.types import CommitReport, EnginePort, GroupSpec, PublishReport

T = TypeVar("T")


class WeightSyncError(RuntimeError):
    """A publish or the meeting before it failed; the message names the engine and the step."""


class CheckpointEngine:
    """Sends versions to a fixed set of engines through one process group. Not thread-safe."""

    def __init__(
        self,
        ports: Sequence[EnginePort],
        config: WeightSyncConfig,
        *,
        run: str,
        host: str,
        uses_gpu: bool,
    ) -> None:
        self._ports = tuple(ports)
        self._config = config
        self._run = run
        self._host = host
        self._backend = resolve_backend(config.backend, uses_gpu=uses_gpu)
        self._snapshot = Snapshot(config.bucket_bytes, should_pin=uses_gpu)
        self._group: dist.ProcessGroup | None = None
        self._spec: GroupSpec | None = None
        self._version = -1

    def connect(self) -> None:
        """Meet all engines in a new group; returns when every one has joined.

        Raises WeightSyncError naming the engine that did not come.
        """
        store = open_store(self._host, self._config.timeout_s)
        spec = GroupSpec(
            host=self._host,
            port=store.port,
            name=f"leash-{self._run}-0",  # the number is the membership epoch
            world_size=1 + sum(port.num_ranks for port in self._ports),
            backend=self._backend,
            timeout_s=self._config.timeout_s,
        )
        joins: list[Future[None]] = []
        rank = 1
        for port in self._ports:
            joins.append(port.join_group(spec, rank))
            rank += port.num_ranks
        try:
            self._group = join_as_sender(store, spec)
        except RuntimeError as error:
            self._collect("joining the weight group", joins)
            raise WeightSyncError(f"the weight group did not form: {error}") from error
        self._collect("joining the weight group", joins)
        self._spec = spec

    def _capture(self, named_tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Copy the policy into host memory; returns the seconds it took."""
        start = time.perf_counter()
        self._snapshot.capture(named_tensors)
        return time.perf_counter() - start

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> PublishReport:
        """Make `version` the policy that every engine serves.

        `named_tensors` is consumed to its end before any engine pauses. Raises WeightSyncError if
        an engine did not take the version, and ValueError for a version that does not grow.
        """
        if version <= self._version:
            raise ValueError(f"version {version} was published after {self._version}: must grow")
        snapshot_s = self._capture(named_tensors)
        start = time.perf_counter()
        commits = self._transfer(version)
        wire_s = time.perf_counter() - start
        self._version = version
        return PublishReport(
            version=version,
            num_bytes=self._snapshot.num_bytes,
            snapshot_s=snapshot_s,
            wire_s=wire_s,
            commits=commits,
        )

    def _transfer(self, version: int) -> tuple[CommitReport, ...]:
        assert self._group is not None and self._spec is not None, "connect() comes first"
        device = sender_device(self._backend)
        self._collect("pausing", [port.pause() for port in self._ports])
        for bucket, flat in self._snapshot.buckets():
            received = [port.receive(bucket, self._spec, version) for port in self._ports]
            try:
                dist.broadcast(flat.to(device), src=0, group=self._group)
            except RuntimeError as error:
                self._collect(f"receiving bucket {bucket.index} of version {version}", received)
                raise WeightSyncError(
                    f"broadcast of bucket {bucket.index} of version {version} failed: {error}"
                ) from error
            self._collect(f"receiving bucket {bucket.index} of version {version}", received)
        commits = self._collect("resuming", [port.resume(version) for port in self._ports])
        for commit in commits:
            if commit.served_version != version:
                raise WeightSyncError(
                    f"{commit.engine} says that it serves version {commit.served_version} "
                    f"after the commit of version {version}"
                )
        return tuple(commits)

    def _collect(self, doing: str, futures: Sequence[Future[T]]) -> list[T]:
        results: list[T] = []
        for port, future in zip(self._ports, futures, strict=True):
            try:
                results.append(future.result(timeout=self._config.timeout_s))
            except TimeoutError as error:
                raise WeightSyncError(
                    f"{port.name} did not finish {doing} within weight_sync.timeout_s="
                    f"{self._config.timeout_s:g}"
                ) from error
            except Exception as error:
                raise WeightSyncError(f"{port.name} failed while {doing}: {error}") from error
        return results

    def close(self) -> None:
        """Leave the group; engines notice at their next receive."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
