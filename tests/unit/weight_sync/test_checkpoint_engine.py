"""The checkpoint engine against real receivers: other processes, a real gloo group, real bytes.

Each receiver joins in the way that SGLang does (a rendezvous by address under the group's name).
"""

import multiprocessing as mp
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch

from configs.schema import Backend, WeightSyncConfig
from weight_sync.engine import CheckpointEngine, WeightSyncError
from weight_sync.types import Bucket, CommitReport, GroupSpec

Named = list[tuple[str, torch.Tensor]]


def receiver(pipe: Connection) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import (
        Backend as TorchBackend,
    )
    from torch.distributed.distributed_c10d import (
        GroupName,
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    group: dist.ProcessGroup | None = None
    weights: dict[str, torch.Tensor] = {}
    while True:
        try:
            verb, *args = pipe.recv()
        except EOFError:
            return
        if verb == "join":
            spec, rank = args
            limit = timedelta(seconds=spec.timeout_s)
            url = f"tcp://{spec.host}:{spec.port}"
            store, _, _ = next(rendezvous(url, rank, spec.world_size, timeout=limit))
            group, _ = _new_process_group_helper(  # type: ignore[assignment]
                spec.world_size,
                rank,
                [],
                TorchBackend(spec.backend),
                PrefixStore(spec.name, store),
                group_name=GroupName(spec.name),
                timeout=limit,
            )
            assert group is not None
            _world.pg_group_ranks[group] = {i: i for i in range(spec.world_size)}
            pipe.send(None)
        elif verb == "receive":
            (bucket,) = args
            flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=group)
            start = 0
            for spec in bucket.tensors:
                part = flat[start : start + spec.num_bytes]
                weights[spec.name] = part.view(getattr(torch, spec.dtype)).view(spec.shape)
                start += spec.num_bytes
            pipe.send(None)
        elif verb == "weights":
            pipe.send({name: tensor.double().sum().item() for name, tensor in weights.items()})


class ProcessPort:
    """An EnginePort whose engine is a process that receives for real and records the calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_ranks = 1
        self.calls: list[str] = []
        self.lie_about_version = 0
        self._pipe, child = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=receiver, args=(child,), daemon=True)
        self._process.start()
        child.close()
        self._executor = ThreadPoolExecutor(1)

    def _ask(self, *message: object) -> Future[None]:
        def ask() -> None:
            self._pipe.send(message)
            self._pipe.recv()

        return self._executor.submit(ask)

    def join_group(self, spec: GroupSpec, rank_offset: int) -> Future[None]:
        return self._ask("join", spec, rank_offset)

    def pause(self) -> Future[None]:
        return self._executor.submit(self.calls.append, "pause")

    def receive(self, bucket: Bucket, spec: GroupSpec, version: int) -> Future[None]:
        self.calls.append(f"receive {bucket.index}")
        return self._ask("receive", bucket)

    def resume(self, version: int) -> Future[CommitReport]:
        self.calls.append("resume")
        served = version + self.lie_about_version
        report = CommitReport(engine=self.name, version=version, pause_s=0.0, served_version=served)
        return self._executor.submit(lambda: report)

    def sums(self) -> dict[str, float]:
        self._pipe.send(("weights",))
        return self._pipe.recv()  # type: ignore[no-any-return]

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def close(self) -> None:
        self.kill()
        self._executor.shutdown()
        self._pipe.close()


@pytest.fixture
def ports() -> Iterator[list[ProcessPort]]:
    made = [ProcessPort("engine-0"), ProcessPort("engine-1")]
    yield made
    for port in made:
        port.close()


@pytest.fixture
def engine(ports: list[ProcessPort]) -> Iterator[CheckpointEngine]:
    config = WeightSyncConfig(backend=Backend.gloo, bucket_bytes=64, timeout_s=30)
    engine = CheckpointEngine(ports, config, run="test", host="127.0.0.1", uses_gpu=False)
    engine.connect()
    yield engine
    engine.close()


def weights(scale: float) -> Named:
    return [
        ("a", torch.full((4, 4), scale)),
        ("b", torch.full((3,), -scale)),
        ("c", torch.ones(30)),
    ]


def test_every_engine_gets_every_byte_of_each_version(
    engine: CheckpointEngine, ports: list[ProcessPort]
) -> None:
    for version, scale in ((0, 1.0), (1, 2.0), (5, 3.0)):
        report = engine.publish(version, iter(weights(scale)))
        assert report.version == version
        assert report.num_bytes == (16 + 3 + 30) * 4
        assert [c.served_version for c in report.commits] == [version, version]
        for port in ports:
            assert port.sums() == {"a": 16 * scale, "b": -3 * scale, "c": 30.0}


def test_engines_are_paused_before_the_first_byte_and_resumed_after_the_last(
    engine: CheckpointEngine, ports: list[ProcessPort]
) -> None:
    engine.publish(0, weights(1.0))
    for port in ports:
        assert port.calls == ["pause", "receive 0", "receive 1", "receive 2", "resume"]


def test_versions_only_grow(engine: CheckpointEngine) -> None:
    engine.publish(3, weights(1.0))
    with pytest.raises(ValueError, match="version 3 was published after 3"):
        engine.publish(3, weights(1.0))


def test_an_engine_that_serves_another_version_is_an_error(
    engine: CheckpointEngine, ports: list[ProcessPort]
) -> None:
    ports[1].lie_about_version = -1
    with pytest.raises(WeightSyncError, match="engine-1 says that it serves version 6"):
        engine.publish(7, weights(1.0))


def test_a_dead_engine_is_named_and_does_not_hang_the_sender(
    engine: CheckpointEngine, ports: list[ProcessPort]
) -> None:
    engine.publish(0, weights(1.0))
    ports[0].kill()
    with pytest.raises(WeightSyncError, match="engine-0 failed while receiving bucket 0"):
        engine.publish(1, weights(1.0))


def test_nccl_without_a_gpu_is_refused_with_the_fix() -> None:
    config = WeightSyncConfig(backend=Backend.nccl)
    with pytest.raises(ValueError, match=r"weight_sync\.backend=nccl"):
        CheckpointEngine([], config, run="test", host="127.0.0.1", uses_gpu=False)
