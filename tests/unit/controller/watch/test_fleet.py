"""Engines of a run that are lost, given up, added or removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from buffer.connect import Buffer
from buffer.run_state import STREAM_START, MetricsEntry, RunState
from configs.load import load_config
from configs.schema import BufferConfig
from controller.watch import fleet
from controller.watch.fleet import Fleet
from controller.watch.supervise import RunFailed
from rollout_pool.pool import HasLeft


class Ref:
    """The reference to one result of an actor."""

    def __init__(self) -> None:
        self.result: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.result


class Pool:
    """The part of RolloutPool that Fleet uses. Every engine's calls are answered by the test."""

    def __init__(self, num_engines: int) -> None:
        self.refs: dict[tuple[str, str], Ref] = {}
        self.engine_names = [f"engine-{index}" for index in range(num_engines)]
        self.worker_names = ["worker-0"]
        self.receivers = {"a": "receiver-0"}
        self.removed: list[str] = []
        self.restarted: list[str] = []
        self.told: list[str] = []
        self.draining: frozenset[str] = frozenset()

    def _ref(self, call: str, engine: str) -> Ref:
        return self.refs.setdefault((call, engine), Ref())

    def answer(self, call: str, engine: str, result: Any = None) -> None:
        # A later call is another one.
        self._ref(call, engine).result.set_result(result)

    def fail(self, call: str, engine: str, error: Exception | None = None) -> None:
        error = error or RayActorError(error_msg="it died")
        self.refs.pop((call, engine)).result.set_exception(error)

    given_up, lost = partialmethod(_ref, "given_up"), partialmethod(_ref, "lost")
    node, noticed = partialmethod(_ref, "node"), partialmethod(_ref, "noticed")

    def notify(self, name: str) -> Ref:
        self.told.append(name)
        ref = Ref()
        ref.result.set_result(None)
        return ref

    def draining_nodes(self) -> frozenset[str]:
        return self.draining

    def drain_worker(self, name: str, limit_s: float) -> Ref:
        assert limit_s == 20.0
        return self._ref("drain", name)

    def restart(self, name: str) -> None:
        self.restarted.append(name)

    def leave(self, engine: str, drain_s: float) -> Ref:
        self.drain_s = drain_s
        return self._ref("leave", engine)

    def add_engine(self) -> tuple[str, Ref]:
        name = next(n for n in map("engine-{}".format, range(9)) if n not in self.engine_names)
        self.engine_names.append(name)
        self.refs = {key: ref for key, ref in self.refs.items() if key[1] != name}
        return name, self._ref("ready", name)

    def remove_engine(self, name: str) -> None:
        self.engine_names.remove(name)
        self.removed.append(name)

    def receiver_for(self, engine: str, node: str) -> None:
        self.receivers.setdefault(node, f"receiver-{len(self.receivers)}")

    def receivers_given_up(self) -> dict[str, Ref]:
        return {name: self._ref("given_up", name) for name in self.receivers.values()}


class Scene:
    def __init__(self, pool: Pool, state: RunState, buffer: Buffer) -> None:
        self.pool, self.state, self.buffer = pool, state, buffer
        self.said: list[str] = []
        self.fleet = Fleet(
            pool,  # type: ignore[arg-type]
            state,
            load_config(["rollout.num_engines=2"]),
            log_of=lambda name: Path(f"{name}.log"),
            say=self.said.append,
        )
        self.running = asyncio.create_task(self.fleet.run())

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.01)

    async def events(self, at_least: int = 0) -> list[tuple[str, str]]:
        async with asyncio.timeout(60):
            while len(entries := await self.state.read_metrics(STREAM_START, 0)) < at_least:
                await asyncio.sleep(0.01)
        return [(str(e.record["event"]), str(e.record["who"])) for e in entries]


@pytest_asyncio.fixture
async def scene(
    redis_url: str,
    run_name: str,
    buffer_factory: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Scene]:
    """Two engines that serve version 3."""
    monkeypatch.setattr(fleet, "FIRST_PAUSE_S", 0.3)
    monkeypatch.setattr(fleet, "LOOK_AGAIN_S", 0.05)
    buffer = await buffer_factory()
    state = await RunState.connect(redis_url, run_name, BufferConfig())
    for name in ("engine-0", "engine-1"):
        await state.register_engine(name, "http://127.0.0.1:1")
    await state.record_commits({"engine-0": 3, "engine-1": 3})
    scene = Scene(Pool(2), state, buffer)
    yield scene
    scene.running.cancel()
    await asyncio.gather(scene.running, return_exceptions=True)
    await state.close()


async def test_lost_engine_gets_no_requests_and_a_receiver_at_its_new_place(scene: Scene) -> None:
    await scene.until(lambda: ("lost", "engine-1") in scene.pool.refs)
    scene.pool.fail("lost", "engine-1")
    await scene.until(lambda: ("node", "engine-1") in scene.pool.refs)
    assert await scene.state.engine_versions() == {"engine-0": 3}
    assert scene.said == ["engine-1 lost its process; Ray starts it again"]
    scene.pool.answer("node", "engine-1", "b")
    await scene.until(lambda: ("lost", "engine-1") in scene.pool.refs)  # it is watched again
    assert scene.pool.receivers == {"a": "receiver-0", "b": "receiver-1"}
    assert await scene.events() == [("engine_lost", "engine-1")]
    assert not scene.running.done() and scene.pool.removed == []


async def test_worker_without_a_place_is_reported(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "ROOM_S", 0.05)
    await scene.until(lambda: ("lost", "worker-0") in scene.pool.refs)
    scene.pool.fail("lost", "worker-0")
    await scene.until(lambda: len(scene.said) == 2)
    scene.pool.answer("node", "worker-0", "b")
    await scene.until(lambda: ("lost", "worker-0") in scene.pool.refs)
    assert scene.said == [
        "worker-0 lost its process; Ray starts it again",
        "worker-0 waits: Ray has found no room for it so far",
    ]


async def test_run_goes_on_without_an_engine_that_is_given_up_and_another_joins_later(
    scene: Scene,
) -> None:
    await scene.until(lambda: ("given_up", "engine-0") in scene.pool.refs)
    scene.pool.answer("given_up", "engine-0", "died (exit code -9), after 3 restarts")
    await scene.until(lambda: "engine-0" in scene.pool.engine_names[1:])
    assert scene.pool.removed == ["engine-0"]
    assert (await scene.state.engine_versions()) == {"engine-1": 3}
    assert "engine-0 died (exit code -9), after 3 restarts; the last lines of" in scene.said[0]
    assert "The run goes on with 1 engine; another one joins in 0 s" in scene.said[0]
    await scene.until(lambda: scene.said[1:] == ["engine-0 joins the run"])
    assert await scene.events() == [("engine_left", "engine-0")]


async def test_run_goes_on_without_an_engine_whose_actor_fails(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FIRST_PAUSE_S", 60.0)
    await scene.until(lambda: ("given_up", "engine-0") in scene.pool.refs)
    full = OSError(28, "No space left on device")
    scene.pool.fail("given_up", "engine-0", RayTaskError("keep", "", full))
    await scene.until(lambda: bool(scene.said) or scene.running.done())
    assert scene.said[0].startswith(f"engine-0 failed: OSError: {full}; the last lines of ")
    assert scene.pool.removed == ["engine-0"] and not scene.running.done()


async def test_run_ends_with_its_last_engine(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "FIRST_PAUSE_S", 60.0)
    await scene.until(lambda: ("given_up", "engine-1") in scene.pool.refs)
    scene.pool.answer("given_up", "engine-0", "did not restart")
    await scene.until(lambda: bool(scene.said))  # that the run goes on with the other one
    assert scene.pool.removed == ["engine-0"]
    scene.pool.fail("given_up", "engine-1")
    failed = await scene.running
    assert isinstance(failed, RunFailed) and str(failed).startswith("engine-1 died")


async def test_run_ends_with_the_last_of_engines_that_end_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FIRST_PAUSE_S", 60.0)
    await scene.until(lambda: ("given_up", "engine-1") in scene.pool.refs)
    may_go_on = {name: asyncio.Event() for name in ("engine-0", "engine-1")}
    monkeypatch.setattr(scene.state, "remove_engine", lambda engine: may_go_on[engine].wait())
    scene.pool.answer("given_up", "engine-0", "did not restart")
    await scene.until(lambda: "engine-0" not in scene.fleet._keeping)
    scene.pool.fail("given_up", "engine-1")
    await scene.until(lambda: "engine-1" not in scene.fleet._keeping)
    may_go_on["engine-0"].set()
    await scene.until(lambda: scene.pool.removed == ["engine-0"])
    may_go_on["engine-1"].set()
    assert str(await scene.running).startswith("engine-1 died")


async def test_engines_join_and_leave_as_the_setting_says(scene: Scene) -> None:
    pool = scene.pool
    await scene.buffer.change_settings({"num_engines": "4"})
    await scene.until(lambda: ("node", "engine-3") in pool.refs)
    for name in ("engine-2", "engine-3"):
        pool.answer("node", name, "b")
        pool.answer("ready", name)
    await scene.state.register_engine("engine-3", "http://127.0.0.1:2")
    assert {*await scene.events(2)} == {
        ("engine_joined", "engine-2"),
        ("engine_joined", "engine-3"),
    }
    await scene.buffer.change_settings({"num_engines": "3"})
    await scene.until(lambda: ("leave", "engine-3") in pool.refs)
    assert pool.engine_names == ["engine-0", "engine-1", "engine-2", "engine-3"]  # it drains
    assert pool.drain_s == 60.0
    pool.answer("leave", "engine-3")
    await scene.until(lambda: pool.removed == ["engine-3"])
    await scene.events(3)
    assert scene.said == [
        "engine-2 joins the run",
        "engine-3 joins the run",
        "engine-3 leaves the run, once its requests have ended",
    ]
    assert not scene.running.done()


async def test_engine_that_is_told_to_end_leaves_and_another_joins_at_once(scene: Scene) -> None:
    pool = scene.pool
    await scene.until(lambda: ("noticed", "engine-0") in pool.refs)
    pool.answer("noticed", "engine-0")
    await scene.until(lambda: ("leave", "engine-0") in pool.refs)
    assert pool.engine_names == ["engine-0", "engine-1", "engine-2"] and pool.drain_s == 20.0
    pool.answer("node", "engine-2", "b")
    pool.answer("ready", "engine-2")
    pool.answer("leave", "engine-0")
    await scene.until(lambda: pool.removed == ["engine-0"])
    # No loss, and no failure for which a next one would wait.
    assert {*await scene.events(2)} == {("engine_joined", "engine-2"), ("engine_left", "engine-0")}
    assert scene.said == [
        "engine-0 was told to end: it leaves the run, once its requests have ended",
        "engine-2 joins the run",
    ]
    assert not scene.running.done()


async def test_engine_that_came_back_is_still_heard_when_it_is_told_to_end(scene: Scene) -> None:
    pool = scene.pool
    await scene.until(lambda: ("noticed", "engine-1") in pool.refs)
    pool.fail("noticed", "engine-1")
    pool.answer("node", "engine-1", "a")
    await scene.until(lambda: ("noticed", "engine-1") in pool.refs)
    pool.answer("noticed", "engine-1")
    await scene.until(lambda: ("leave", "engine-1") in pool.refs)


async def test_worker_that_is_told_to_end_is_restarted_when_its_groups_have_ended(
    scene: Scene,
) -> None:
    pool = scene.pool
    await scene.until(lambda: ("noticed", "worker-0") in pool.refs)
    pool.answer("noticed", "worker-0")
    await scene.until(lambda: ("drain", "worker-0") in pool.refs)
    assert pool.restarted == []
    pool.answer("drain", "worker-0")
    await scene.until(lambda: pool.restarted == ["worker-0"])
    del pool.refs["noticed", "worker-0"], pool.refs["drain", "worker-0"]
    pool.fail("lost", "worker-0")
    pool.answer("node", "worker-0", "b")
    await scene.until(lambda: ("noticed", "worker-0") in pool.refs)  # of its next process
    assert scene.said == [
        "worker-0 was told to end: it starts no more groups, and those that it has may end for "
        "20 s",
        "worker-0 has ended; Ray starts it again",
    ]
    assert (await scene.state.counters())["workers_drained"] == 1


async def test_worker_that_is_lost_while_it_drains_is_left_to_ray(scene: Scene) -> None:
    pool = scene.pool
    await scene.until(lambda: ("noticed", "worker-0") in pool.refs)
    pool.answer("noticed", "worker-0")
    await scene.until(lambda: ("drain", "worker-0") in pool.refs)
    pool.fail("drain", "worker-0")
    pool.refs.pop(("noticed", "worker-0"))
    pool.fail("lost", "worker-0")
    pool.answer("node", "worker-0", "b")
    await scene.until(lambda: ("noticed", "worker-0") in pool.refs)
    assert pool.restarted == [] and "workers_drained" not in await scene.state.counters()


async def test_processes_on_a_node_that_ray_empties_are_told_to_end(scene: Scene) -> None:
    pool = scene.pool
    for name, node in (("engine-0", "a"), ("engine-1", "b"), ("worker-0", "b")):
        pool.answer("node", name, node)
    pool.draining = frozenset({"b"})
    await scene.until(lambda: {"engine-1", "worker-0"} == {*pool.told})


async def test_engine_that_leaves_while_ray_empties_a_node_costs_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, node_of = scene.pool, scene.pool.node

    def node(name: str) -> Any:
        if name == "engine-0":
            raise HasLeft("engine-0 has left the run")
        return node_of(name)

    monkeypatch.setattr(pool, "node", node)
    pool.answer("node", "engine-1", "b")
    pool.draining = frozenset({"b"})
    await scene.until(lambda: "engine-1" in pool.told)
    assert not scene.running.done()


async def test_engine_that_leaves_as_it_gets_its_place_costs_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receiver_for(engine: str, node: str) -> None:
        raise HasLeft(f"{engine} has left the run")

    monkeypatch.setattr(scene.pool, "receiver_for", receiver_for)
    await scene.buffer.change_settings({"num_engines": "3"})
    await scene.until(lambda: ("node", "engine-2") in scene.pool.refs)
    scene.pool.answer("node", "engine-2", "b")
    await scene.buffer.change_settings({"num_engines": "2"})
    left = ("leave", "engine-2")
    await scene.until(lambda: left in scene.pool.refs or scene.running.done())
    assert not scene.running.done()


async def test_notice_of_an_engine_that_leaves_already_changes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, noticed_of = scene.pool, scene.pool.noticed
    # In the loop itself: the waiting task is woken before the one that `_leave` cancels.
    notice: Any = Ref()
    notice.result = asyncio.get_running_loop().create_future()

    def noticed(name: str) -> Ref:
        return notice if name == "engine-2" else noticed_of(name)

    def say(text: str) -> None:
        scene.said.append(text)
        if text.startswith("engine-3 leaves"):
            notice.result.set_result(None)

    monkeypatch.setattr(pool, "noticed", noticed)
    monkeypatch.setattr(scene.fleet, "say", say)
    await scene.buffer.change_settings({"num_engines": "4"})
    await scene.until(lambda: ("noticed", "engine-3") in pool.refs)
    await scene.buffer.change_settings({"num_engines": "2"})
    await scene.until(lambda: {("leave", f"engine-{n}") for n in (2, 3)} <= pool.refs.keys())
    assert scene.said[-2:] == [
        f"engine-{n} leaves the run, once its requests have ended" for n in (3, 2)
    ]
    for name in ("engine-2", "engine-3"):
        pool.answer("leave", name)
    await scene.until(lambda: len(pool.removed) == 2 or scene.running.done())
    assert not scene.running.done()


@pytest.mark.parametrize("error", [None, ActorUnschedulableError("its node does not exist")])
async def test_receiver_that_goes_with_its_node_is_forgotten_and_one_given_up_ends_the_run(
    scene: Scene, error: Exception | None
) -> None:
    await scene.state.register_receiver("receiver-0", "http://10.0.0.1:1")
    await scene.until(lambda: ("given_up", "receiver-0") in scene.pool.refs)
    scene.pool.fail("given_up", "receiver-0", error)
    async with asyncio.timeout(60):
        while await scene.state.receivers():
            await asyncio.sleep(0.01)
        entries: list[MetricsEntry] = []
        while not entries:
            entries = await scene.state.read_metrics(STREAM_START, block_s=1.0)
    assert [(one.record["event"], one.record["who"]) for one in entries] == [
        ("receiver_left", "receiver-0")
    ]
    assert not scene.running.done()
    await scene.until(lambda: ("lost", "engine-1") in scene.pool.refs)
    scene.pool.fail("lost", "engine-1")
    scene.pool.answer("node", "engine-1", "b")
    await scene.until(lambda: ("given_up", "receiver-1") in scene.pool.refs)
    scene.pool.answer("given_up", "receiver-1", "was given up: no room")
    assert str(await scene.running).startswith("receiver-1 was given up: no room")
