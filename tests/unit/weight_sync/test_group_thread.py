"""A process's place in its epochs: who stands still costs the epoch, and nothing after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import WeightSyncConfig
from tensors.layout import Layout
from tensors.snapshots import Shard, Snapshots
from tests.support.weights.layouts import full_transfer, random_bytes, spec
from tests.support.weights.receiver_specs import receiver_spec
from weight_sync import delta, group
from weight_sync.group import WeightGroup, open_store
from weight_sync.group_thread import GroupThread, SerialThread
from weight_sync.receiver.receiver import Receiver
from weight_sync.sender.rank import Sender, SendingRank
from weight_sync.timeouts import Timeouts
from weight_sync.types import GroupSpec, TransferFailed, WeightSyncError

LIMIT = timedelta(seconds=60)
LAYOUT = Layout.of([spec("a", 50, 30)], num_ranks=1)


class Scene:
    """Sender 0 and receiver node0, who meet at one store."""

    def __init__(self) -> None:
        self.store = open_store("127.0.0.1", 60.0)
        self.go_on = threading.Event()
        """Lets stopped requests continue."""
        self.pool = ThreadPoolExecutor(4)

    def spec(self, epoch: int, timeout_s: float = 60.0) -> GroupSpec:
        return GroupSpec(
            epoch=epoch,
            host="127.0.0.1",
            port=self.store.port,
            name="leash-test",
            num_senders=1,
            receivers=("node0",),
            backend="gloo",
            timeout_s=timeout_s,
        )

    def peer(self, spec: GroupSpec) -> Any:
        return self.pool.submit(WeightGroup.join, spec, 1)

    @contextlib.contextmanager
    def stands_still_in(self, name: str) -> Iterator[None]:
        """A function of weight_sync.group, which comes to an end when `go_on` is set."""
        go_on, original = self.go_on, getattr(group, name)

        def stand_still(*arguments: Any) -> Any:
            assert go_on.wait(60)
            return original(*arguments)

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(group, name, stand_still)
            yield


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.go_on.set()
    scene.pool.shutdown()


@pytest.fixture
def group_thread() -> Iterator[GroupThread]:
    group_thread = GroupThread("test-group-thread", 2, torch.device("cpu"))
    yield group_thread
    group_thread.leave()


def bytes_of(number: int) -> torch.Tensor:
    return torch.full((4,), number, dtype=torch.uint8)


def send(group: WeightGroup) -> None:
    group.send(bytes_of(7), 1, 0).wait(LIMIT)


def test_steps_run_on_a_thread_that_lasts_until_one_fails(
    scene: Scene, group_thread: GroupThread
) -> None:
    threads = []

    def note(_: WeightGroup) -> None:
        threads.append(threading.current_thread())

    def fail(group: WeightGroup) -> None:
        note(group)
        raise WeightSyncError("lost my way")

    peer = scene.peer(scene.spec(1))
    group_thread.join(scene.spec(1), 0)
    assert peer.result(60)  # gloo's first member may be through while the others still connect
    group_thread.run(note, 60)
    with pytest.raises(WeightSyncError, match="lost my way"):
        group_thread.run(fail, 60)
    assert group_thread.spec is None
    peer = scene.peer(scene.spec(2))
    group_thread.join(scene.spec(2), 0)
    group_thread.run(note, 60)
    first, failed, fresh = threads
    assert first is failed and failed is not fresh
    failed.join(60)
    assert not failed.is_alive()


def test_meeting_that_stands_still_costs_its_epoch_alone(
    scene: Scene, group_thread: GroupThread
) -> None:
    """As NCCL's, when a member is stopped after all have come."""
    slow = scene.spec(1, timeout_s=2.0)  # within which both come
    with scene.stands_still_in("gloo_group"):
        late_peer = scene.peer(slow)
        with pytest.raises(WeightSyncError, match=r"epoch 1 .* did not form: .* one stopped"):
            group_thread.join(slow, 0)
    assert group_thread.spec is None
    peer = scene.peer(scene.spec(2))
    group_thread.join(scene.spec(2), 0)
    received = bytes_of(0)
    receiving = peer.result(60).recv(received, 0, 0)
    group_thread.run(send, 60)
    receiving.wait(LIMIT)
    assert received.tolist() == [7] * 4
    scene.go_on.set()  # the old epoch forms at last, and this process leaves it at once
    with pytest.raises(RuntimeError):
        late_peer.result(60).recv(bytes_of(0), 0, 0).wait(LIMIT)


def test_run_that_stands_still_is_given_up_and_touches_nothing_later(
    scene: Scene, group_thread: GroupThread
) -> None:
    touched: list[str] = []
    over = threading.Event()

    def stand_still(group: WeightGroup) -> None:
        try:
            with group.naming("starting to send bucket 0", 1):
                assert scene.go_on.wait(60)
            touched.append("the next bucket")
        finally:
            over.set()

    peer = scene.peer(scene.spec(1))
    group_thread.join(scene.spec(1), 0)
    assert peer.result(60)
    with pytest.raises(WeightSyncError, match=r"epoch 1 .* was given up: .* within 0\.2 s"):
        group_thread.run(stand_still, 0.2)
    assert group_thread.spec is None
    peer = scene.peer(scene.spec(2))
    group_thread.join(scene.spec(2), 0)
    assert peer.result(60)
    scene.go_on.set()
    assert over.wait(60) and not touched


def test_run_that_fails_leaves_the_group_and_the_peer_notices(
    scene: Scene, group_thread: GroupThread
) -> None:
    started = threading.Event()

    def wait_for_ever(group: WeightGroup) -> None:
        work = group.recv(bytes_of(0), 0, 5)
        started.set()
        with group.naming("receiving bucket 5", 0):
            work.wait(timedelta(seconds=300))  # a closed socket tells sooner

    def fail(group: WeightGroup) -> None:
        group.recv(bytes_of(0), 1, 6)
        raise WeightSyncError("lost my way")

    peer = GroupThread("test-peer", 2, torch.device("cpu"))
    joining = scene.pool.submit(peer.join, scene.spec(1), 1)
    group_thread.join(scene.spec(1), 0)
    joining.result(60)
    waiting = scene.pool.submit(peer.run, wait_for_ever, 300)
    assert started.wait(60)
    with pytest.raises(WeightSyncError, match="lost my way"):
        group_thread.run(fail, 60)
    named = "receiving bucket 5 failed between receiver node0 and sender 0 in epoch 1"
    with pytest.raises(WeightSyncError, match=named):
        waiting.result(60)
    peer.leave()


def test_left_group_is_noticed_at_once(scene: Scene, group_thread: GroupThread) -> None:
    joining = scene.peer(scene.spec(1))
    group_thread.join(scene.spec(1), 0)
    peer = joining.result(60)
    group_thread.leave()
    group_thread.leave()
    with pytest.raises(RuntimeError):
        peer.recv(bytes_of(0), 0, 0).wait(LIMIT)


def test_call_runs_even_if_another_thread_leaves_meanwhile(
    scene: Scene, group_thread: GroupThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another chain fails at once: it would be waited for until its time limit."""
    joining, submit = scene.peer(scene.spec(1)), SerialThread.submit
    group_thread.join(scene.spec(1), 0)
    joining.result(60)

    def leave_before(thread: SerialThread, call: Any) -> Any:
        leaving = threading.Thread(target=group_thread.leave)
        leaving.start()
        leaving.join(1)  # it waits for the call to be submitted
        return submit(thread, call)

    monkeypatch.setattr(SerialThread, "submit", leave_before)
    ran = threading.Event()
    group_thread.run(lambda _: ran.set(), 60)
    assert ran.is_set()


# What uses it ------------------------------------------------------------------------------------


class NoStreams(Snapshots):
    """None of its streams can be had, for this reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__(LAYOUT, 0)
        self._error = error

    def stream(self, index: int, version: int, timeout_s: float) -> torch.Tensor:
        raise self._error


def sending_rank(snapshots: Snapshots | None = None) -> SendingRank:
    config = WeightSyncConfig(timeout_s=0.5)
    timeouts = Timeouts(config=config, layout=LAYOUT, control_s=5.0)
    if snapshots is None:
        snapshots = two_versions()
    return SendingRank(timeouts, 0, snapshots, Sender(0, config, torch.device("cpu")))


def two_versions() -> Snapshots:
    snapshots = Snapshots(LAYOUT, 0)
    for version in (0, 1):
        values = random_bytes(3000, seed=version).view(torch.bfloat16)
        snapshots.capture(version, version, [Shard(name="a", tensor=values)])
    return snapshots


def test_rank_answers_a_join_that_stands_still(scene: Scene) -> None:
    """Silence would end training; an error is one failed attempt."""
    with scene.stands_still_in("gloo_group"):
        slow = scene.spec(1, timeout_s=2.0)  # within which both come
        peer = scene.peer(slow)
        reply = sending_rank().handle({"do": "join", "group": asdict(slow)})
        assert reply is not None and "trainer rank 0: epoch 1" in reply["error"]
        scene.go_on.set()
        peer.result(60).close()


def encode_command() -> dict[str, Any]:
    return {
        "do": "encode",
        "version": 1,
        "buffer": 1,
        "base_version": 0,
        "base_buffer": 0,
        "max_density": 1.0,
    }


def test_rank_without_memory_for_a_delta_sends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("40 GiB")

    rank = sending_rank()
    with monkeypatch.context() as patches:
        patches.setattr(delta, "encode", fail)
        reply = rank.handle(encode_command())
    assert reply is not None and reply["result"]["num_bytes"] is None
    again = rank.handle(encode_command())
    assert again is not None and again["result"]["num_bytes"] > 0
    assert again["result"]["copy_s"] > 0


@pytest.mark.parametrize("error", [OSError("no route"), AssertionError(), MemoryError()])
def test_rank_failures_are_replies(error: Exception) -> None:
    reply = sending_rank(NoStreams(error)).handle(encode_command())
    assert reply is not None and type(error).__name__ in reply["error"]


def test_receiver_answers_a_transfer_that_stands_still(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(receiver_spec("node0", tmp_path, timeout_s=0.2))
    receiver.set_layout(LAYOUT)
    trainer = scene.pool.submit(WeightGroup.join, scene.spec(1), 0)
    receiver.join(scene.spec(1))

    def stand_still(*_: object) -> None:
        assert scene.go_on.wait(60)

    monkeypatch.setattr(WeightGroup, "exchange", stand_still)
    with pytest.raises(TransferFailed, match=r"epoch 1 .* was given up"):
        receiver.receive(full_transfer(LAYOUT, version=1), 1, 0)
    assert receiver.status().epoch is None and trainer.result(60)
    scene.go_on.set()
    receiver.close(should_remove=True)
