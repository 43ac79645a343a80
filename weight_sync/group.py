"""Process groups that live beside torch's default one: how a sender meets its receivers.

SGLang joins through torch's own `_new_process_group_helper` under a key prefix that is the group's
name; the sender has to go the same way, or the two ends would look for each other under other keys.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from configs.schema import Backend as BackendChoice
from weight_sync.types import GroupSpec


def resolve_backend(choice: BackendChoice, *, uses_gpu: bool) -> str:
    """`auto` is nccl for processes that hold a GPU and gloo for the others."""
    if choice is BackendChoice.auto:
        return "nccl" if uses_gpu else "gloo"
    if choice is BackendChoice.nccl and not uses_gpu:
        raise ValueError("weight_sync.backend=nccl: these processes have no GPU; use gloo or auto")
    return str(choice.value)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A rendezvous server on a free port of `host` and on no other interface.

    TCPStore by itself would listen on every interface; handing it a bound socket prevents that, and
    also the race between finding a free port and taking it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_as_sender(store: TCPStore, spec: GroupSpec) -> dist.ProcessGroup:
    """Rank 0 of the group that `spec` describes.

    Blocks until every receiver has joined. Raises torch's DistStoreError at `spec.timeout_s`.
    """
    group, _ = _new_process_group_helper(
        spec.world_size,
        0,
        [],
        Backend(spec.backend),
        PrefixStore(spec.name, store),
        group_name=GroupName(spec.name),
        backend_options=None,
        timeout=timedelta(seconds=spec.timeout_s),
    )
    assert isinstance(group, dist.ProcessGroup)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(spec.world_size)}
    return group


def sender_device(backend: str) -> torch.device:
    """Where a bucket must lie to be sent."""
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
