"""Process groups beside torch's default one: one weight group for each chain of each
membership epoch.

It is not registered in torch.distributed, belongs to its owner and ends when the owner drops it.
Its senders come first; the receivers follow.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from socket import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore, Work
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from configs.choices import Backend as BackendChoice
from host.network import address_of, is_loopback, listen, own_address_towards
from weight_sync.types import GroupSpec, WeightSyncError

_FAILURE_KEY = "exception_dump"
"""A failed NCCL group sets it for all users of its store, whatever their epoch, and they would dump
and end."""
_ENVIRONMENT = threading.Lock()


def resolve_backend(choice: BackendChoice, *, uses_gpu: bool) -> str:
    """`auto` means nccl for processes with a GPU and gloo for all others."""
    if choice is BackendChoice.auto:
        return "nccl" if uses_gpu else "gloo"
    if choice is BackendChoice.nccl and not uses_gpu:
        raise ValueError("weight_sync.backend=nccl: these processes have no GPU; use gloo or auto")
    return str(choice.value)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A rendezvous server on a free port of `host`, and on no other interface."""
    listener, _ = listen(host, 0)
    return store_at(host, listener.getsockname()[1], timeout_s, listener)


def store_at(host: str, port: int, timeout_s: float, listener: socket | None = None) -> TCPStore:
    """A connection to the rendezvous store at this address, or its server with a `listener`."""
    # TCPStore alone would listen on every interface. A bound socket prevents that, and also the
    # race between finding a free port and taking it.
    return TCPStore(
        host,
        port,
        None,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def forget_epochs(store: TCPStore, name: str, before: int) -> None:
    """Delete the keys that group `name` wrote in epochs earlier than `before`.

    torch never does. A member that still looks for such a key is too late anyway.
    """
    for key in store.list_keys():
        group, _, rest = key.partition("/")
        epoch = rest.partition("/")[0]
        is_earlier = group == name and epoch.isdecimal() and int(epoch) < before
        if is_earlier or key == _FAILURE_KEY:
            store.delete_key(key)


class Message(NamedTuple):
    """One tensor (uint8, contiguous) to or from one peer."""

    tensor: Tensor
    peer: int
    tag: int


class WeightGroup:
    """This process's membership in one epoch. Used by one thread; any failure is final.

    group = WeightGroup.join(spec, rank=0)          # blocks until every member has joined
    work = group.send(bucket, dst=1, tag=0)
    with group.naming("sending bucket 0", 1):       # an error names both members and the epoch
        work.wait(timeout)
    group.close()                                   # the others notice at once
    """

    def __init__(self, spec: GroupSpec, rank: int, group: ProcessGroup, device: torch.device):
        self.spec = spec
        self.rank = rank
        self.device = device
        """Tensors must be on this device to be sent or received."""
        self._group: ProcessGroup | None = group

    @classmethod
    def join(
        cls,
        spec: GroupSpec,
        rank: int,
        store: TCPStore | None = None,
        device: torch.device | None = None,
    ) -> WeightGroup:
        """Block until every member has joined.

        `store` is a connection to the rendezvous store; None opens one. `device` is this process's
        GPU, for nccl. Raises WeightSyncError naming the members that did not join within
        `spec.timeout_s`. The epoch is then spent: its number must not be used again.
        """
        if not 0 <= rank < spec.world_size:
            raise ValueError(f"rank {rank} of a weight group of {spec.world_size} members")
        try:
            store = store or store_at(spec.host, spec.port, spec.timeout_s)
            meeting = PrefixStore(f"{spec.name}/{spec.epoch}/{spec.chain}", store)
            _await_members(meeting, spec, rank)
            if spec.backend == "gloo":
                device = torch.device("cpu")
                address = _address_in(spec)
                group = gloo_group(meeting, rank, spec.world_size, address, spec.timeout_s)
            else:
                assert device is not None, "nccl needs a device"
                group = _nccl_group(meeting, spec, rank, device)
        except (RuntimeError, OSError) as error:  # from torch's stores and groups; a name's lookup
            message = f"{epoch_name(spec)} did not form at {member_name(spec, rank)}: {error}"
            raise WeightSyncError(message) from error
        return cls(spec, rank, group, device)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """`tag` is the bucket's index. Raises WeightSyncError if `dst` is known to be lost."""
        assert self._group is not None, "the group was closed"
        with self.naming(f"starting to send bucket {tag}", dst):
            return self._group.send([tensor], dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int) -> Work:
        assert self._group is not None, "the group was closed"
        with self.naming(f"starting to receive bucket {tag}", src):
            return self._group.recv([tensor], src, tag)

    def exchange(
        self, outgoing: Message | None, incoming: Message | None
    ) -> tuple[Work | None, Work | None]:
        """Start a send and a receive that run at the same time; either may be None.

        gloo overlaps them by itself. nccl runs one operation after the other unless they are
        coalesced, and then returns one Work for both.
        """
        assert self._group is not None, "the group was closed"
        group = self._group
        if self.spec.backend != "nccl" or outgoing is None or incoming is None:
            sending = None if outgoing is None else self.send(*outgoing)
            return sending, None if incoming is None else self.recv(*incoming)
        group._start_coalescing(self.device)
        try:
            self.send(*outgoing)
            self.recv(*incoming)
        except BaseException:
            # Left open, it would swallow every later NCCL call of this thread.
            with contextlib.suppress(Exception):
                group._end_coalescing(self.device)
            raise
        with self.naming(f"exchanging buckets {outgoing.tag} and {incoming.tag}", outgoing.peer):
            both = group._end_coalescing(self.device)
        return both, both

    @contextlib.contextmanager
    def naming(self, doing: str, peer: int) -> Iterator[None]:
        """Turn torch's errors into WeightSyncErrors that name the operation and the peer."""
        try:
            yield
            # A thread that was blocked here while the group was closed must not continue.
            if not self.is_open:
                raise RuntimeError("the group was closed meanwhile")
        except RuntimeError as error:
            raise WeightSyncError(
                f"{doing} failed between {member_name(self.spec, self.rank)} and "
                f"{member_name(self.spec, peer)} in {epoch_name(self.spec)}: {error}"
            ) from error

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def close(self) -> None:
        """Leave the group; the other members notice at once. May be called twice."""
        # gloo closes its sockets when the last reference to the group and its Works is gone.
        group, self._group = self._group, None
        if group is not None and self.spec.backend == "nccl":
            group.abort()


def member_name(spec: GroupSpec, rank: int) -> str:
    senders = spec.senders
    if rank < len(senders):
        return f"sender {senders[rank]}"
    return f"receiver {spec.receivers[rank - len(senders)]}"


def epoch_name(spec: GroupSpec) -> str:
    chain = f"chain {spec.chain} of " if spec.num_chains > 1 else ""
    return f"{chain}epoch {spec.epoch} of weight group {spec.name!r}"


def _address_in(spec: GroupSpec) -> str:
    """This machine's address for one of several chains: a link each, by GLOO_SOCKET_IFNAME."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if len(names) == 1 or spec.num_chains == 1 or is_loopback(spec.host):
        return own_address_towards(spec.host)
    return address_of(names[spec.chain % len(names)].strip())


def _await_members(store: PrefixStore, spec: GroupSpec, rank: int) -> None:
    # torch's rendezvous would hang, and could not name the missing members.
    keys = [f"here/{member}" for member in range(spec.world_size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, timedelta(seconds=spec.timeout_s))
    except dist.DistStoreError:
        missing = [member_name(spec, i) for i, key in enumerate(keys) if not store.check([key])]
        raise WeightSyncError(
            f"{', '.join(missing)} did not join within weight_sync.timeout_s={spec.timeout_s:g}"
        ) from None


def gloo_group(
    store: Store, rank: int, world_size: int, address: str, timeout_s: float
) -> ProcessGroup:
    """A group that belongs to its owner alone. `address`: this machine's, towards the others."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Without a device gloo resolves the machine's name, which may not lead to the interface towards
    # the other members, nor to any of its own.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    kind = ProcessGroup.BackendType.GLOO
    return _group_of(store, rank, world_size, backend, kind, torch.device("cpu"))


def _nccl_group(
    store: PrefixStore, spec: GroupSpec, rank: int, device: torch.device
) -> ProcessGroup:
    # CUDA streams of one priority share the queues of a GPU, where a kernel of this group that
    # waits for its peers would delay those of training.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(days=1)  # each wait has its own timeout, scaled with its bytes
    with _errors_stay_in_the_group():
        backend = dist.ProcessGroupNCCL(store, rank, spec.world_size, options)
    # Connected now, all sends and receives share one communicator; later each pair would make one.
    backend.eager_connect_single_device(device)
    kind = ProcessGroup.BackendType.NCCL
    return _group_of(store, rank, spec.world_size, backend, kind, device)


def _group_of(
    store: Store,
    rank: int,
    world_size: int,
    backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL,
    kind: ProcessGroup.BackendType,
    device: torch.device,
) -> ProcessGroup:
    """A group of this backend, which is not registered in torch.distributed."""
    backend._set_sequence_number_for_group()
    group = ProcessGroup(store, rank, world_size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


@contextlib.contextmanager
def _errors_stay_in_the_group() -> Iterator[None]:
    """Keep torch's NCCL watchdog from ending the process, and training, when a peer is lost."""
    # It reads these variables when a group is made; the process's other groups keep theirs. A group
    # has no watchdog only if its waits block. A watchdog that sees an error raises a flag of the
    # process, at which the monitor of the training's group ends it some minutes later.
    settings = {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    with _ENVIRONMENT:  # a receiver's chains make their groups at the same time
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
