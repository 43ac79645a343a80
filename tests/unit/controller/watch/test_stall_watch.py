"""The answer to a stall: alarm, stacks, command and webhook, and the policy."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from buffer.results import BufferStats
from configs.choices import OnStall
from configs.load import load_config
from configs.schema import StallConfig
from controller.metrics.history import Record
from controller.run_dir import RunDir
from controller.watch import stall_watch
from controller.watch.finding import log_once
from controller.watch.run_view import RunView
from controller.watch.stall_watch import Stalled, StallWatch
from processes.child import Child, has_ended
from tests.support.collector import collecting
from tests.support.controller.records import STATS, settings_of_run, step_record

HUNG = replace(STATS, trainer_version=6)


class Answer(Future[Any]):
    """A process that answers, or hangs."""

    def __init__(self, answers: bool = True) -> None:
        super().__init__()
        if answers:
            self.set_result(1)

    def future(self) -> Future[Any]:
        return self


class Run:
    """A run whose trainer has held its groups for a minute."""

    def __init__(self, run_dir: RunDir, *hung: str, looks_until: int = 67, **settings: Any) -> None:
        self.view = RunView(run="night", config=settings_of_run(90), started=0.0)
        self.view.apply(Record(t=0.0, kind="phase", values={"phase": "training"}))
        for step in range(6):
            self.view.apply(step_record(step, float(step)))
        for t in range(6, looks_until):
            self.view.observe(float(t), HUNG, {}, {})
        self.hung, self.said = hung, list[str]()
        self.recorded = list[tuple[str, Mapping[str, Any]]]()
        self.restarted = list[tuple[Stalled, Sequence[str]]]()
        self.has_ended = asyncio.Event()
        self.watch = StallWatch(
            StallConfig(**settings),
            self.view,
            run_dir,
            processes=self._processes,
            restart=lambda why, names: self.restarted.append((why, names)),
            record=self._record,
            say=self.said.append,
        )
        self.task = asyncio.create_task(self.watch.run())

    def _processes(self, part: str) -> Mapping[str, Answer]:
        assert part == "trainer"
        return {name: Answer(name not in self.hung) for name in ("trainer-0", "trainer-1")}

    def _record(self, kind: str, values: Mapping[str, Any]) -> None:
        self.recorded.append((kind, values))
        if kind == "stall_ended":
            self.has_ended.set()

    async def until_said(self, words: str) -> str:
        async with asyncio.timeout(60):
            while not (found := [line for line in self.said if words in line]):
                await asyncio.sleep(0.01)
        return found[0]

    async def go_on(self) -> None:
        """It trains its step, and the stall ends."""
        self.view.apply(step_record(6, 67.0))
        async with asyncio.timeout(60):
            await self.has_ended.wait()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(stall_watch, "ANSWER_S", 2.0)


async def test_stall_is_told_once_with_its_stacks_and_so_is_its_end(run_dir: RunDir) -> None:
    run = Run(run_dir)
    said = await run.until_said("Stacks are in")
    path = Path(said.removeprefix("Stacks are in ").removesuffix("."))
    assert path.parent == run_dir.path / "stacks" and "0 processes" in path.read_text()
    await run.go_on()
    await run.close()
    assert [kind for kind, _ in run.recorded] == ["stall", "stall_ended"]
    assert "rollouts wait for the trainer, which has its 16 groups" in run.said[0]
    assert run.said[-1].startswith("The stall has ended after 1m") and run.restarted == []


async def test_process_that_does_not_answer_is_named_and_alone_starts_again(
    run_dir: RunDir,
) -> None:
    run = Run(run_dir, "trainer-1", policy=OnStall.restart)
    await run.until_said("Stacks")
    await run.go_on()
    await run.close()
    (why, names), (_, values) = run.restarted[0], run.recorded[0]
    assert list(names) == ["trainer-1"] and values["part"] == "trainer-1"
    assert str(why).startswith("the run stalled: no step for ")
    assert "which has its 16 groups; trainer-1 does not answer; stacks are in /" in str(why)
    assert len(run.restarted) == 1
    assert [values["part"] for _, values in run.recorded] == ["trainer-1", "trainer-1"]


async def test_processes_are_asked_before_the_time_is_up_and_named_then(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = Run(run_dir, "trainer-1", looks_until=25), asyncio.Event()
    processes = run.watch.processes

    def ask(part: str) -> Mapping[str, Answer]:
        run.view.observe(27.0, HUNG, {}, {})  # while it is asked
        asked.set()
        return processes(part)

    run.watch.processes = ask
    await asyncio.sleep(0.1)  # nothing tells that something was not done
    assert not asked.is_set()
    run.view.observe(25.5, HUNG, {}, {})
    await run.until_said("trainer-1 does not answer")
    await run.close()
    assert run.recorded[0][1]["part"] == "trainer-1"


async def test_other_stall_than_the_one_that_was_asked_about_is_asked_about_for_itself(
    run_dir: RunDir,
) -> None:
    run, asked = Run(run_dir), list[str]()

    def ask(part: str) -> Mapping[str, Answer]:
        asked.append(part)
        if len(asked) == 1:  # the trainer gives its groups back, and rollouts stall
            for t in range(67, 180):
                run.view.observe(float(t), replace(HUNG, leased=0, ready=3), {}, {})
        return {f"{part}-0": Answer()}

    run.watch.processes = ask
    await run.until_said("Stacks")
    await run.close()
    assert asked[:2] == ["trainer", "workers"]
    assert [values["part"] for _, values in run.recorded] == ["workers"]


async def test_stall_does_not_end_before_its_ranks_train_again(run_dir: RunDir) -> None:
    run = Run(run_dir, policy=OnStall.restart)
    await run.until_said("Stacks")
    for phase in (stall_watch.RESTARTING, "training"):
        run.view.apply(Record(t=68.0, kind="phase", values={"phase": phase}))
        await asyncio.sleep(0.1)  # nothing tells that something was not done
        assert not run.has_ended.is_set()
    await run.go_on()
    await run.close()


@pytest.mark.parametrize("policy", [OnStall.restart, OnStall.end])
@pytest.mark.parametrize("when", ["asked", "told"])
async def test_ranks_that_start_again_meanwhile_are_left_alone(
    run_dir: RunDir, policy: OnStall, when: str
) -> None:
    run, begun = Run(run_dir, policy=policy), asyncio.Event()

    def begin() -> None:
        phase = {"phase": stall_watch.RESTARTING}
        run.view.apply(Record(t=68.0, kind="phase", values=phase))
        begun.set()

    def ask(part: str) -> Mapping[str, Answer]:
        if when == "asked":
            begin()
        return {}

    def say(line: str) -> None:
        if line.startswith("Stacks"):
            begin()

    run.watch.processes, run.watch.say = ask, say
    async with asyncio.timeout(60):
        await begun.wait()
    await asyncio.sleep(0.1)  # nothing tells that something was not done
    assert run.restarted == [] and not run.task.done()
    assert [kind for kind, _ in run.recorded] == ["stall"] * (when == "told")
    await run.close()


async def test_rollouts_that_all_answer_do_not_start_again(run_dir: RunDir) -> None:
    run = Run(run_dir, policy=OnStall.restart)
    run.view.observe(67.0, replace(HUNG, leased=0, ready=3), {}, {})  # the trainer waits for them
    for t in range(68, 180):
        run.view.observe(float(t), replace(HUNG, leased=0, ready=3), {}, {})
    run.watch.processes = lambda _: {"engine-0": Answer()}
    await run.until_said("Nothing starts again")
    await run.close()
    assert run.restarted == [] and run.recorded[0][1]["part"] == "workers"


async def test_policy_may_end_the_run_once_that_is_told(run_dir: RunDir, tmp_path: Path) -> None:
    run = Run(run_dir, policy=OnStall.end, command=f"cat > {tmp_path}/heard")
    async with asyncio.timeout(60):
        assert "has its 16 groups" in str(await run.task)
    assert json.loads((tmp_path / "heard").read_text())["policy"] == "end"


async def test_watch_that_fails_ends_nothing(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    run = Run(run_dir)
    whole, run.view.stats = run.view.stats, cast("BufferStats", "broken")
    async with asyncio.timeout(60):
        while not caplog.records:
            await asyncio.sleep(0.01)
    run.view.stats = whole
    await run.until_said("Stacks are in")
    await run.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the watch for stalls failed, and the run goes on without"
    ]


async def test_stacks_that_cannot_be_written_end_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir.path / "stacks").write_text("in the way")
    run = Run(run_dir, policy=OnStall.restart)
    await run.until_said("no stacks could be written: FileExistsError")
    await run.go_on()
    await run.close()
    assert list(run.restarted[0][1]) == ["trainer"]


async def test_command_gets_both_events_on_its_input(run_dir: RunDir, tmp_path: Path) -> None:
    run = Run(run_dir, command=f"cat >> {tmp_path}/heard; exit 3")
    line = await run.until_said("run.stall.command ended with exit code 3")
    assert line.endswith("stall-command.log may say why")
    run.said.clear()
    await run.go_on()
    await run.until_said("exit code 3")
    await run.close()
    begun, ended = map(json.loads, (tmp_path / "heard").read_text().splitlines())
    assert (begun["event"], ended["event"]) == ("stall", "stall_ended")
    assert begun["run"] == run_dir.name and begun["part"] == "trainer" and begun["since"] == 6.0
    assert Path(begun["stacks"]).is_file()


async def test_command_that_does_not_end_is_killed(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_watch, "COMMAND_S", 0.2)
    run = Run(run_dir, command="sleep 1000")
    await run.until_said("exit code -9")
    await run.close()


async def test_command_ends_with_the_run(run_dir: RunDir, tmp_path: Path) -> None:
    run, begun = Run(run_dir, command=f"echo $$ > {tmp_path}/pid; sleep 1000"), tmp_path / "pid"
    async with asyncio.timeout(60):
        while not (begun.exists() and begun.read_text()):
            await asyncio.sleep(0.01)
    await run.close()
    assert await asyncio.to_thread(has_ended, int(begun.read_text()), 60.0)


async def test_command_that_is_starting_ends_with_the_run(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, may_start = threading.Event(), threading.Event()
    started = Future[Child]()

    def start(*args: Any, **settings: Any) -> Child:
        starting.set()
        may_start.wait(60.0)
        started.set_result(child := Child(*args, **settings))
        return child

    monkeypatch.setattr(stall_watch, "Child", start)
    run = Run(run_dir, command="sleep 1000")
    assert await asyncio.to_thread(starting.wait, 60.0)
    await run.close()
    may_start.set()
    child = await asyncio.to_thread(started.result, 60.0)
    assert await asyncio.to_thread(child.wait, 60.0) == -9
    stdin = child._process.stdin
    assert stdin is not None and stdin.closed


def test_end_of_a_run_does_not_wait_for_stacks(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    def collect(*_: object) -> str:
        begun.set()
        is_over.append(over.wait(60.0))
        return ""

    async def run_and_end() -> None:
        run = Run(run_dir)
        await asyncio.to_thread(begun.wait, 60.0)
        await run.close()

    is_over = list[bool]()
    monkeypatch.setattr(stall_watch, "_collect_everywhere", collect)
    asyncio.run(run_and_end())
    assert is_over == []
    over.set()


async def test_webhook_gets_the_event_and_its_address_is_never_told(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with collecting() as (url, posts):
        monkeypatch.setenv("HOOK", f"{url}/secret")
        run = Run(run_dir, webhook_env="HOOK")
        await run.until_said("Stacks")
        async with asyncio.timeout(60):
            while not posts:
                await asyncio.sleep(0.01)
        assert posts[0].path.endswith("/secret")
        assert json.loads(posts[0].body)["text"].startswith(f"{run_dir.name}: stall: No step for")
    await run.go_on()  # nobody listens there any more
    await run.until_said("run.stall.webhook_env=HOOK was not reached (ConnectError)")
    await run.close()
    assert "secret" not in "\n".join([*run.said, caplog.text])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("run.stall.factor=1", r"run\.stall\.factor=1\.0: .*above 1"),
        ("run.stall.policy=panic", r"run\.stall\.policy='panic': expected"),
        ("run.stall.webhook_env=https://a/b", r"run\.stall\.webhook_env=.*not its value"),
        ("run.stall.command=' '", r"run\.stall\.command=' ': .*not empty"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config([setting])
