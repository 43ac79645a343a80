"""Loads a staged version into one engine: a class for each weight_sync.commit, one for adapters.

    weight_sync.commit   the load, while the engine is paused
    staged_disk          the engine reads the staged file through its own loader
    ipc                  the engine copies from a buffer in GPU memory that this process fills

    model.lora.mode      the load, while the engine decodes
    versions             the engine reads the staged file as an adapter of the version's name

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
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from configs.choices import CommitStrategy
from configs.schema import WeightSyncConfig
from rollout_pool.engines.engine import Strategy
from rollout_pool.engines.sglang.client import (
    FROM_DISK_PATH,
    FROM_IPC_PATH,
    LOAD_ADAPTER_PATH,
    SGLangClient,
)
from rollout_pool.sampling.engine_client import EngineError
from rollout_pool.types import AdapterSpec
from tensors.layout import TensorSpec

if TYPE_CHECKING:
    import torch
    import zmq


def make_strategy(
    client: SGLangClient,
    config: WeightSyncConfig,
    *,
    tp_size: int,
    adapter: AdapterSpec | None = None,
) -> Strategy:
    """The strategy of weight_sync.commit, or that of an adapter's versions, for one server."""
    if adapter is not None:
        return AdapterVersions(client, config.commit_timeout_s, adapter)
    match config.commit:
        case CommitStrategy.staged_disk:
            return StagedDisk(client, config.commit_timeout_s)
        case CommitStrategy.ipc:
            return Ipc(client, config, tp_size=tp_size)


class StagedDisk(Strategy):
    """The engine's own loader reads the staged file; no data passes through this process."""

    name = "staged_disk"

    def __init__(self, client: SGLangClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def check(self) -> None:
        await self._client.require(FROM_DISK_PATH, "weight_sync.commit=staged_disk")

    async def load(self, version: int, folder: Path) -> None:
        await self._client.update_from_disk(str(folder), version, self._timeout_s)


class AdapterVersions(Strategy):
    """The engine gets each version as an adapter of its own, beside those of earlier requests."""

    name = "adapter"
    pauses = False

    def __init__(self, client: SGLangClient, timeout_s: float, adapter: AdapterSpec) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._adapter = adapter
        self._own: Path | None = None
        """Where the version is that is loaded next, or was loaded last."""

    async def check(self) -> None:
        await self._client.require(LOAD_ADAPTER_PATH, "model.lora.mode=versions")

    async def prepare(self, folder: Path) -> None:
        try:
            await asyncio.to_thread(self._write, folder)
        except OSError as error:
            raise EngineError(
                f"{self._client.name} cannot copy its staged adapter: {error}; each engine needs "
                "room in weight_sync.stage_dir for buffer.max_staleness + 3 copies of it"
            ) from error

    async def load(self, version: int, folder: Path) -> None:
        await self._client.load_adapter(str(self._own), version, self._timeout_s)
        # The engine has mapped earlier files, and so keeps what it still needs of them. The reply
        # is that of its first GPU; others may still be about to read this one.
        await asyncio.to_thread(self._remove_all_but, self._own, folder.parent)

    async def close(self) -> None:
        if self._own is not None:
            await asyncio.to_thread(self._remove_all_but, None, self._own.parent)

    @property
    def _prefix(self) -> str:
        return f"adapter-of-{self._client.name}-"

    def _remove_all_but(self, kept: Path | None, parent: Path) -> None:
        for own in parent.glob(f"{self._prefix}*"):
            if own != kept:
                shutil.rmtree(own, ignore_errors=True)

    def _write(self, folder: Path) -> None:
        """Writes the adapter as peft does, beside the staged versions: the receiver removes it if
        this process dies.

        A copy: the engine maps the file, and the receiver writes later versions into its own.
        """
        adapter = self._adapter
        own = self._own = Path(tempfile.mkdtemp(prefix=self._prefix, dir=folder.parent))
        shutil.copyfile(folder / FILE_NAME, own / "adapter_model.safetensors")
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "target_modules": list(adapter.layers),
        }
        (own / "adapter_config.json").write_text(json.dumps(fields))


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
        self._pinned: dict[Path, tuple[int, torch.Tensor]] = {}
        """By folder: which file, and its bytes, locked for copies to the GPU."""

    async def prepare(self, folder: Path) -> None:
        try:
            await asyncio.to_thread(self._pin, folder)
        except OSError as error:
            raise EngineError(
                f"{self._client.name} has lost its staged version: {error}"
            ) from error

    def _pin(self, folder: Path) -> None:
        """Once for each slot: the receiver writes version after version into the same file."""
        from tensors.host_memory import HostMemory

        with (folder / FILE_NAME).open("r+b") as file:
            status, known = os.fstat(file.fileno()), self._pinned.get(folder)
            if known is not None and known[0] == status.st_ino:
                return
            memory = HostMemory(status.st_size, file.fileno())
        memory.pin()
        self._pinned[folder] = status.st_ino, memory.tensor()

    async def close(self) -> None:
        self._pinned.clear()

    async def check(self) -> None:
        def missing() -> str | None:
            import torch

            if torch.cuda.device_count() < self._tp_size:
                return "this engine has no GPU of its own"
            if importlib.util.find_spec("checkpoint_engine") is None:
                return "the package checkpoint-engine is not installed (sglang[checkpoint-engine])"
            return None

        why = await asyncio.to_thread(missing)
        if why is not None:
            raise ValueError(
                f"weight_sync.commit=ipc: {why}; use weight_sync.commit=staged_disk, which works "
                "everywhere"
            )
        await self._client.require(FROM_IPC_PATH, "weight_sync.commit=ipc")

    async def load(self, version: int, folder: Path) -> None:
        _, data = self._pinned[folder]
        staged = await asyncio.to_thread(StagedFile.open, folder, data.numpy())
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
    batches: Iterable[StagedFile],
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
class StagedFile:
    """All tensors of a staged file, or those of a batch, which are adjacent in it."""

    tensors: tuple[TensorSpec, ...]
    """In the order of the file."""
    data: npt.NDArray[np.uint8]
    """[bytes] of all of them, in this order."""

    @classmethod
    def open(cls, folder: Path, mapped: npt.NDArray[np.uint8] | None = None) -> StagedFile:
        """`mapped`: its bytes; None maps them copy-on-write. Raises OSError, or ValueError for a
        file that no receiver staged."""
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
        data = np.memmap(path, np.uint8, mode="c") if mapped is None else mapped
        data = data[_LENGTH_BYTES + length :]
        if sum(tensor.num_bytes for tensor in tensors) != data.size:
            raise ValueError(f"{path}: its tensors do not cover the file")
        return cls(tensors=tensors, data=data)

    def batches(self, max_bytes: int) -> Iterator[StagedFile]:
        """All tensors in batches of at most `max_bytes`, each of at least one tensor."""
        start, size, tensors = 0, 0, list[TensorSpec]()
        for tensor in self.tensors:
            if tensors and size + tensor.num_bytes > max_bytes:
                yield StagedFile(tensors=tuple(tensors), data=self.data[start : start + size])
                start, size, tensors = start + size, 0, []
            tensors.append(tensor)
            size += tensor.num_bytes
        yield StagedFile(tensors=tuple(tensors), data=self.data[start : start + size])
