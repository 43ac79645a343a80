"""A commit from GPU memory: SGLang's update_weights_from_ipc, in the protocol of checkpoint-engine.

For each GPU of the engine one socket, over which this process (REQ) leads and SGLang (REP) follows:

    handle of a GPU buffer ─►            ◄─ ""
    [{name, dtype, shape, offset}, ...] ─►   loads them from the buffer        ◄─ "" or its error
    ...                                      the other half is filled meanwhile
    None ─►                                  lets go of the buffer             ◄─ ""
    None ─►                                  post-processing                   ◄─ ""

(github.com/MoonshotAI/checkpoint-engine, checkpoint_engine/worker.py.) That protocol pickles what
goes to the engine, over a socket that only this machine can reach; what comes back is plain text,
and nothing here reads a pickle.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import WeightSyncConfig
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.staged_file import Batch, StagedFile
from rollout_pool.sampling.engine_client import EngineError

if TYPE_CHECKING:
    import torch
    import zmq

ALIGNMENT = 256
"""Of each tensor in the buffer, in bytes."""


class Ipc:
    """The engine copies from a buffer on its own GPU, which this process fills from the file."""

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
            why = "this SGLang server does not offer it"
        if why is not None:
            raise ValueError(
                f"weight_sync.commit=ipc: {why}; use weight_sync.commit=staged_disk, which works "
                "everywhere"
            )

    async def prepare(self, folder: Path) -> None:
        """Nothing: the buffer would take GPU memory while the engine decodes."""

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

    async def close(self) -> None:
        """Nothing is held between two commits."""

    def _gpu_keys(self) -> list[str]:
        """As SGLang looks for its own socket."""
        import torch

        gpus = range(self._tp_size)
        return [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]

    def _send(self, staged: StagedFile, gpu: int, address: str) -> None:
        """All of the file to the engine's rank on `gpu`; load_weights takes that rank's part."""
        import torch
        import zmq
        from torch.multiprocessing.reductions import reduce_tensor

        largest = max(tensor.num_bytes for tensor in staged.tensors)
        half = _aligned(max(self._config.bucket_bytes, largest))
        # Batches are cut by their bytes alone; what the alignment adds has to fit as well.
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
                raise EngineError(f"{self._client.name} fell silent in its load") from error
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
    """Lead the protocol on a bound REQ socket. `buffer` [bytes] has room for two batches.

    Raises EngineError with what the engine says if it cannot load one.
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
        _take_reply(socket)  # only now may the engine see these: it has loaded the batch before
        socket.send_pyobj(payload)
    for _ in ("let go of the buffer", "post-process"):
        _take_reply(socket)
        socket.send_pyobj(None)
    _take_reply(socket)


def _take_reply(socket: zmq.Socket[bytes]) -> None:
    if reply := socket.recv():
        # The engine waits for one more message, and raises if it is an error.
        socket.send_pyobj(RuntimeError("the load is given up"))
        raise EngineError(f"the engine could not load a batch: {reply.decode(errors='replace')}")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
