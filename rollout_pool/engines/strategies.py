"""Loads a staged version into one paused engine: a class for each weight_sync.commit.

    weight_sync.commit   the load, while the engine is paused
    staged_disk          the engine reads the staged file through its own loader
    direct               this process broadcasts the staged file to SGLang's own endpoint
    ipc                  the engine copies from a buffer in GPU memory that this process fills

This process reads a staged version as one safetensors file, mapped and cut into batches:

    header | embed | q 0 | k 0 | q 1 | ...        no copy is made: a batch is a range of the file
             └─ batch 0 ─┘└ batch 1 ┘
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from configs.choices import CommitStrategy
from configs.schema import WeightSyncConfig
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.commit import Strategy
from rollout_pool.sampling.engine_client import EngineError
from weight_sync.types import GroupSpec, TensorSpec

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import zmq


def make_strategy(
    client: SGLangClient, config: WeightSyncConfig, *, tp_size: int, host: str
) -> Strategy:
    """The strategy of weight_sync.commit, for one server, which listens on `host`."""
    match config.commit:
        case CommitStrategy.staged_disk:
            return StagedDisk(client, config.commit_timeout_s)
        case CommitStrategy.direct:
            return Direct(client, config, tp_size=tp_size, host=host)
        case CommitStrategy.ipc:
            return Ipc(client, config, tp_size=tp_size)


class StagedDisk(Strategy):
    """The engine's own loader reads the staged file; no data passes through this process."""

    name = "staged_disk"

    def __init__(self, client: SGLangClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def check(self) -> None:
        if not await self._client.can_update_from_disk():
            raise ValueError(
                "weight_sync.commit=staged_disk: this SGLang server cannot load from a folder; "
                "use weight_sync.commit=direct or a newer SGLang"
            )

    async def load(self, version: int, folder: Path) -> None:
        await self._client.update_from_disk(str(folder), version, self._timeout_s)


class Direct(Strategy):
    """SGLang's own broadcast: receives and loads alternate in the scheduler's thread.

    The baseline for the other strategies: what other systems do across a fleet, here from a local
    sender. Always gloo, since nccl refuses two members on one GPU.
    """

    name = "direct"

    def __init__(
        self, client: SGLangClient, config: WeightSyncConfig, *, tp_size: int, host: str
    ) -> None:
        self._client = client
        self._config = config
        self._tp_size = tp_size
        self._host = host
        self._spec: GroupSpec | None = None
        self._group: dist.ProcessGroup | None = None
        self._wants_session = False

    async def check(self) -> None:
        """Every SGLang server supports it."""
        self._wants_session = await self._client.wants_update_session()

    async def prepare(self, folder: Path) -> None:
        if self._group is None:
            await self._join()

    async def load(self, version: int, folder: Path) -> None:
        staged = await asyncio.to_thread(StagedFile.open, folder)
        if self._wants_session:
            await self._client.begin_update()
        assert self._spec is not None, "prepare() comes first"
        for batch in staged.batches(self._config.bucket_bytes):
            # If one end fails, the other waits until the group's timeout or the server's end.
            await asyncio.gather(
                self._client.receive(batch.tensors, self._spec, version),
                asyncio.to_thread(self._broadcast, batch),
            )
        if self._wants_session:
            await self._client.end_update()

    async def close(self) -> None:
        if self._group is not None:
            await asyncio.to_thread(self._leave)

    async def _join(self) -> None:
        # Imported here: torch costs a second and 200 MB, and only this strategy needs it.
        from weight_sync.group import join_as_sglang_sender, open_store

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the engine is local
        timeout_s = self._config.timeout_s
        store = await asyncio.to_thread(open_store, self._host, timeout_s)
        name = self._client.name
        spec = GroupSpec(
            epoch=0,
            host=self._host,
            port=store.port,
            name=f"direct-{name}",
            num_senders=1,
            receivers=tuple(f"{name}.{rank}" for rank in range(self._tp_size)),
            backend="gloo",
            timeout_s=timeout_s,
        )
        try:
            _, self._group = await asyncio.gather(
                self._client.join_broadcast(spec),
                asyncio.to_thread(
                    join_as_sglang_sender,
                    store,
                    name=spec.name,
                    world_size=spec.world_size,
                    backend=spec.backend,
                    timeout_s=timeout_s,
                ),
            )
        except RuntimeError as error:  # torch's DistStoreError is one
            raise EngineError(f"{name} did not join its sender: {error}") from error
        self._spec = spec

    def _broadcast(self, batch: Batch) -> None:
        import torch
        import torch.distributed as dist

        dist.broadcast(torch.from_numpy(batch.data), 0, self._group)

    def _leave(self) -> None:
        import torch.distributed as dist

        group, self._group = self._group, None
        dist.destroy_process_group(group)


ALIGNMENT = 256
"""Alignment of each tensor in the buffer, in bytes."""


class Ipc(Strategy):
    """The engine copies from a buffer on its own GPU, which this process fills from the file.

    The buffer exists only during a load: it would take GPU memory while the engine decodes.
    """

    name = "ipc"

    def __init__(self, client: SGLangClient, config: WeightSyncConfig, *, tp_size: int) -> None:
        self._client = client
        self._config = config
        self._tp_size = tp_size

    async def check(self) -> None:
        def missing() -> str | None:
            import torch

            if torch.cuda.device_count() < self._tp_size:
                return "this engine has no GPU of its own"
            if importlib.util.find_spec("checkpoint_engine") is None:
                return "the package checkpoint-engine is not installed (sglang[checkpoint-engine])"
            return None

        why = await asyncio.to_thread(missing)
        if why is None and not await self._client.can_update_from_ipc():
            why = "this SGLang server does not support it"
        if why is not None:
            raise ValueError(
                f"weight_sync.commit=ipc: {why}; use weight_sync.commit=staged_disk, which works "
                "everywhere"
            )

    async def load(self, version: int, folder: Path) -> None:
        staged = await asyncio.to_thread(StagedFile.open, folder)
        token = secrets.token_hex(8)
        addresses = [f"ipc://@leash-{token}-{gpu}" for gpu in range(self._tp_size)]
        keys = await asyncio.to_thread(self._gpu_keys)
        await asyncio.gather(
            self._client.update_from_ipc(
                dict(zip(keys, addresses, strict=True)), version, self._config.commit_timeout_s
            ),
            *(
                asyncio.to_thread(self._send, staged, gpu, address)
                for gpu, address in enumerate(addresses)
            ),
        )

    def _gpu_keys(self) -> list[str]:
        """The keys under which SGLang's ranks look up their sockets."""
        import torch

        gpus = range(self._tp_size)
        return [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]

    def _send(self, staged: StagedFile, gpu: int, address: str) -> None:
        """Sends the whole file to the rank on `gpu`; its load_weights takes its own shards."""
        import torch
        import zmq
        from torch.multiprocessing.reductions import reduce_tensor

        largest = max(tensor.num_bytes for tensor in staged.tensors)
        half = _aligned(max(self._config.bucket_bytes, largest))
        # Batches are sized without alignment, so leave room for it.
        half += ALIGNMENT * len(staged.tensors)
        with torch.cuda.device(gpu), zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.sndtimeo = socket.rcvtimeo = int(1000 * self._config.commit_timeout_s)
            socket.bind(address)
            buffer = torch.empty(2 * half, dtype=torch.uint8, device=f"cuda:{gpu}")
            try:
                send_weights(
                    socket,
                    reduce_tensor(buffer),  # type: ignore[no-untyped-call]
                    buffer,
                    staged.batches(self._config.bucket_bytes),
                    synchronize=torch.cuda.synchronize,
                )
            except zmq.Again as error:
                raise EngineError(f"{self._client.name} stopped answering in its load") from error
            finally:
                del buffer
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()


def send_weights(
    socket: zmq.Socket[bytes],
    handle: Any,
    buffer: torch.Tensor,
    batches: Iterable[Batch],
    synchronize: Callable[[], None],
) -> None:
    """The sender of checkpoint-engine's protocol: a bound REQ socket per GPU; SGLang is the REP.

        handle of a GPU buffer ─►                                             ◄─ ""
        [{name, dtype, shape, offset}, ...] ─►   loads them from the buffer   ◄─ "" or an error
        ...                                      the other half is filled meanwhile
        None ─►                                  releases the buffer          ◄─ ""
        None ─►                                  post-processing              ◄─ ""

    (github.com/MoonshotAI/checkpoint-engine, checkpoint_engine/worker.py.) Messages to the engine
    are pickled, over a socket that only this machine can reach; replies are plain text, so nothing
    is unpickled here. `buffer` [bytes] has room for two batches. Raises EngineError with the
    engine's error if it cannot load a batch.
    """
    import torch

    half = buffer.numel() // 2
    socket.send_pyobj(handle)
    for number, batch in enumerate(batches):
        offset = number % 2 * half
        payload, position = [], 0
        for tensor in batch.tensors:
            source = batch.data[position : position + tensor.num_bytes]
            buffer[offset : offset + tensor.num_bytes].copy_(torch.from_numpy(source))
            payload.append(
                {
                    "name": tensor.name,
                    "dtype": getattr(torch, tensor.dtype),
                    "shape": torch.Size(tensor.shape),
                    "offset": offset,
                }
            )
            position += tensor.num_bytes
            offset += _aligned(tensor.num_bytes)
        synchronize()
        _take_reply(socket)  # the engine has loaded the batch before
        socket.send_pyobj(payload)
    for _ in ("release the buffer", "post-process"):
        _take_reply(socket)
        socket.send_pyobj(None)
    _take_reply(socket)


def _take_reply(socket: zmq.Socket[bytes]) -> None:
    if reply := socket.recv():
        # The engine waits for one more message and raises if it is an error.
        socket.send_pyobj(RuntimeError("the load was aborted"))
        raise EngineError(f"the engine could not load a batch: {reply.decode(errors='replace')}")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


FILE_NAME = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LENGTH_BYTES = 8


@dataclass(kw_only=True, slots=True, frozen=True)
class Batch:
    """Whole tensors that are adjacent in the file."""

    tensors: tuple[TensorSpec, ...]
    data: npt.NDArray[np.uint8]
    """[bytes] of all of them, in this order."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StagedFile:
    tensors: tuple[TensorSpec, ...]
    """In the order of the file."""
    data: npt.NDArray[np.uint8]
    """Everything after the header, mapped copy-on-write."""

    @classmethod
    def open(cls, folder: Path) -> StagedFile:
        """Raises OSError, or ValueError for a file that no receiver staged."""
        path = folder / FILE_NAME
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        try:
            tensors = tuple(
                TensorSpec(name=name, dtype=_DTYPES[e["dtype"]], shape=tuple(e["shape"]))
                for name, e in entries
            )
        except KeyError as error:
            raise ValueError(f"{path}: a tensor has an unsupported dtype: {error}") from None
        data = np.memmap(path, np.uint8, mode="c", offset=_LENGTH_BYTES + length)
        if sum(tensor.num_bytes for tensor in tensors) != data.size:
            raise ValueError(f"{path}: its tensors do not cover the file")
        return cls(tensors=tensors, data=data)

    def batches(self, max_bytes: int) -> Iterator[Batch]:
        """All tensors in batches of at most `max_bytes`, each of at least one tensor."""
        start, size, tensors = 0, 0, list[TensorSpec]()
        for tensor in self.tensors:
            if tensors and size + tensor.num_bytes > max_bytes:
                yield Batch(tensors=tuple(tensors), data=self.data[start : start + size])
                start, size, tensors = start + size, 0, []
            tensors.append(tensor)
            size += tensor.num_bytes
        yield Batch(tensors=tuple(tensors), data=self.data[start : start + size])
