"""Process groups by epoch: members that meet, talk, and leave, over real gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from configs.choices import Backend
from configs.schema import WeightSyncConfig
from weight_sync.group import (
    Message,
    WeightGroup,
    open_store,
    resolve_backend,
    store_at,
)
from weight_sync.timeouts import wire_s
from weight_sync.types import GroupSpec, WeightSyncError

LIMIT = timedelta(seconds=60)


@pytest.fixture
def store() -> TCPStore:
    return open_store("127.0.0.1", 20.0)


def make_spec(
    store: TCPStore, num_receivers: int = 1, epoch: int = 1, **changes: float
) -> GroupSpec:
    fields: dict[str, object] = {
        "epoch": epoch,
        "host": "127.0.0.1",
        "port": store.port,
        "name": "leash-test",
        "num_senders": 1,
        "receivers": tuple(f"node{i}" for i in range(num_receivers)),
        "backend": "gloo",
        "timeout_s": 60.0,
    }
    return GroupSpec(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def meet(pool: ThreadPoolExecutor, spec: GroupSpec) -> list[WeightGroup]:
    joins = [pool.submit(WeightGroup.join, spec, rank) for rank in range(spec.world_size)]
    return [join.result(60) for join in joins]


def test_auto_is_nccl_where_the_process_has_a_gpu() -> None:
    assert resolve_backend(Backend.auto, uses_gpu=True) == "nccl"
    assert resolve_backend(Backend.auto, uses_gpu=False) == "gloo"
    assert resolve_backend(Backend.gloo, uses_gpu=True) == "gloo"
    with pytest.raises(ValueError, match=r"weight_sync\.backend=nccl: .* no GPU; use gloo"):
        resolve_backend(Backend.nccl, uses_gpu=False)


def test_limit_of_a_wait_grows_with_the_bytes_in_front_of_it() -> None:
    limits = WeightSyncConfig(timeout_s=30.0, min_bandwidth=50e6)
    assert wire_s(0, limits) == 30.0
    assert wire_s(100_000_000, limits) == 32.0


@pytest.mark.parametrize("change", [{"port": "http"}, {"receivers": []}, {"timeout_s": 0}])
def test_group_that_makes_no_sense_is_refused(store: TCPStore, change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        msgspec.convert({**asdict(make_spec(store)), **change}, GroupSpec)
    with pytest.raises(ValueError, match="epoch"):
        msgspec.convert({}, GroupSpec)


def test_members_exchange_both_ways_at_once(store: TCPStore, pool: ThreadPoolExecutor) -> None:
    left, right = meet(pool, make_spec(store))
    sent, echoed = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    got, reply = torch.zeros(100, dtype=torch.uint8), torch.full((100,), 7, dtype=torch.uint8)
    for works in (
        left.exchange(Message(sent, 1, 0), Message(echoed, 1, 1)),
        right.exchange(Message(reply, 0, 1), Message(got, 0, 0)),
    ):
        for work in works:
            assert work is not None
            work.wait(LIMIT)
    assert torch.equal(got, sent) and torch.equal(echoed, reply)
    assert left.exchange(None, None) == (None, None)


def test_missing_member_is_named(store: TCPStore) -> None:
    with pytest.raises(WeightSyncError, match="receiver node1 did not join"):
        spec = make_spec(store, num_receivers=2, timeout_s=2.0)  # within which the others come
        with ThreadPoolExecutor(2) as pool:
            joins = [pool.submit(WeightGroup.join, spec, rank) for rank in (0, 1)]
            for join in joins:
                join.result(60)


def test_rendezvous_that_is_gone_is_an_error_of_this_epoch(store: TCPStore) -> None:
    spec = make_spec(store, port=1, timeout_s=0.5)
    with pytest.raises(WeightSyncError, match="epoch 1 of weight group 'leash-test'"):
        WeightGroup.join(spec, 0)


def test_silent_peer_is_an_error_when_the_limit_is_over(
    store: TCPStore, pool: ThreadPoolExecutor
) -> None:
    left, right = meet(pool, make_spec(store))
    with (
        pytest.raises(WeightSyncError, match="receiving bucket 0 failed"),
        right.naming("receiving bucket 0", 0),
    ):
        right.recv(torch.zeros(8, dtype=torch.uint8), 0, 0).wait(timedelta(seconds=0.2))
    left.close()
    left.close()


def test_address_that_leads_nowhere_is_an_error_of_this_epoch(store: TCPStore) -> None:
    spec = replace(make_spec(store, timeout_s=5.0), host="no such host")
    with pytest.raises(WeightSyncError, match=r"epoch 1 of weight group .*service not known"):
        WeightGroup.join(spec, 1, store=alone(store))


def test_each_chain_listens_on_the_interface_that_is_named_for_it(
    store: TCPStore, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere,lo")
    spec = replace(make_spec(store), num_senders=2, num_chains=2, host="192.0.2.1")
    with pytest.raises(WeightSyncError, match=r"chain 0 .* no network interface 'nowhere'"):
        WeightGroup.join(spec, 0, store=alone(store))
    stores = [store_at("127.0.0.1", store.port, 60.0) for _ in range(2)]
    second = [replace(spec, chain=1)] * 2
    left, right = pool.map(WeightGroup.join, second, range(2), stores, timeout=60)
    sent, received = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    works = [left.send(sent, 1, 0), right.recv(received, 0, 0)]
    assert all(work.wait(timedelta(seconds=60)) for work in works) and torch.equal(sent, received)


def test_members_of_one_machine_stay_on_loopback_whatever_interfaces_are_named(
    store: TCPStore, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere,neither")
    assert len(meet(pool, make_spec(store))) == 2


def alone(store: TCPStore) -> TCPStore:
    """A store in which everyone has come."""
    for rank in range(2):
        store.set(f"leash-test/1/0/here/{rank}", "1")
    return store


class NcclBackend(dist.ProcessGroupGloo):
    """A backend of torch's that notes with which variables and options it was made."""

    made: ClassVar[list[tuple[dict[str, str], Any]]] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta()

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, timedelta(seconds=60))
        variables = {name: value for name, value in os.environ.items() if "TORCH_NCCL" in name}
        self.made.append((variables, options))

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass


def test_nccl_group_of_weights_never_ends_the_process_and_has_streams_of_its_own(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclBackend, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    spec = replace(make_spec(store, num_receivers=0), backend="nccl")
    WeightGroup.join(spec, 0, store, torch.device("cpu"))
    [(variables, options)] = NcclBackend.made
    assert variables == {
        "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog, no monitor
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    assert options.is_high_priority_stream
    # The groups of training, made later, have theirs.
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


class NcclStandIn:
    """Counts what is left open, as NCCL does for the thread."""

    def __init__(self) -> None:
        self.num_open = 0
        self.failing = ""

    def _start_coalescing(self, device: torch.device) -> None:
        self.num_open += 1

    def _end_coalescing(self, device: torch.device) -> str:
        self.num_open -= 1
        if "end" in self.failing:
            raise RuntimeError("no end")
        return "both"

    def send(self, *_: object) -> None:
        if "send" in self.failing:
            raise RuntimeError("no send")

    def recv(self, *_: object) -> None:
        if "recv" in self.failing:
            raise RuntimeError("no recv")

    def abort(self) -> None:
        assert self.num_open == 0


@pytest.mark.parametrize("failing", ["send", "recv", "end", "send end"])
def test_exchange_that_fails_leaves_nothing_open(store: TCPStore, failing: str) -> None:
    spec = replace(make_spec(store, num_receivers=2), backend="nccl")
    nccl: Any = NcclStandIn()
    group = WeightGroup(spec, 1, nccl, torch.device("cpu"))
    outgoing = Message(torch.zeros(1, dtype=torch.uint8), 2, 3)
    incoming = Message(torch.zeros(1, dtype=torch.uint8), 0, 4)
    both: Any = group.exchange(outgoing, incoming)
    assert both == ("both", "both")
    nccl.failing = failing
    with pytest.raises(WeightSyncError, match=f"no {failing.split()[0]}"):
        group.exchange(outgoing, incoming)
    assert nccl.num_open == 0
