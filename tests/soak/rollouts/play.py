"""One real run in which processes die, and an observer who looks at it several times a second."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import redis

from buffer.redis.client import BufferConnectionError
from configs.load import read_config
from controller.buffer_access import buffer_address
from controller.metrics.history import Record, read_metrics
from controller.run_dir import RunDir
from rollout_pool.tasks.registry import build_task
from tests.soak.rollouts.ledger import Ledger
from tests.soak.rollouts.picture import Camera, Picture
from tests.soak.rollouts.victims import OF_THE_ROLLOUT_POOL, Kind, Member, members
from tests.support.blocking import BlockingReplayBuffer
from tests.support.launches import command_on

T = TypeVar("T")
START_S = 300.0
BACK_S = 240.0
"""Longest time until a killed process is back, and a group that began after the kill is trained."""
LOOK_EVERY_S = 0.2
BUSY_GROUPS = 8
"""So many keep both engines busy: each new one goes to the engine with less to do."""
COUNT_EVERY_S = 1.0
"""Interval of the buffer's full self-checks."""
ENGINES = {Kind.engine, Kind.engine_actor}
GAP_S = (0.3, 3.0)
"""Time between two kills, if there is a process to kill."""
JUST_MS = 700.0
STOP_S = 90.0


@dataclass(kw_only=True, slots=True)
class Kill:
    victim: Member
    at: float
    """Unix time."""
    num_running: int
    """Groups that were in flight."""
    back_s: float | None = None
    trained_s: float | None = None
    """Time until a group was trained that began after it."""

    @property
    def is_over(self) -> bool:
        return self.back_s is not None and self.trained_s is not None

    def __str__(self) -> str:
        back, trained = (
            "never" if s is None else f"{s:.1f} s" for s in (self.back_s, self.trained_s)
        )
        return (
            f"{self.victim.kind} of {self.victim.name}, {self.num_running} groups under way: "
            f"back after {back}, new groups trained after {trained}"
        )


@dataclass(kw_only=True, slots=True)
class Play:
    run: Path
    process: subprocess.Popen[bytes]
    output: Path
    camera: Camera
    buffer: BlockingReplayBuffer
    ledger: Ledger
    dice: random.Random
    began: float
    """When the run was started, as `time.monotonic` says it."""
    kills: list[Kill] = field(default_factory=list)
    picture: Picture | None = None
    """The last one."""
    looked_at: float = 0.0
    """When it was taken, as `time.time` says it."""
    counted_at: float = 0.0

    # Looking --------------------------------------------------------------------------------------

    def look(self) -> Picture:
        """Checks all invariants."""
        try:
            return self._look()
        except (redis.ConnectionError, BufferConnectionError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=STOP_S)
            raise AssertionError(f"the run ended:\n{self.report()}\n{self.kill_log()}") from error

    def _look(self) -> Picture:
        self.looked_at = time.time()
        picture = self.picture = self.camera.take()
        faults = self.ledger.enter(picture)
        faults += self._count_episodes(self.camera, picture)
        if time.monotonic() - self.counted_at > COUNT_EVERY_S:
            faults += self.buffer.find_violations()
            self.counted_at = time.monotonic()
        assert not faults, "\n".join([*faults, self.report()])
        return picture

    def _count_episodes(self, camera: Camera, picture: Picture) -> list[str]:
        held = {*picture.ready, *picture.leased, *picture.consumed} - self.ledger.whole
        return self.ledger.count_episodes(camera.payloads(sorted(held)))

    def watch(self, condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Keeps checking until the condition holds; returns its result."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, (
                f"not within {timeout_s:g} s: {what}\n{self.report()}\n{self.kill_log()}"
            )
            time.sleep(LOOK_EVERY_S)
            self.look()
            self._note_recoveries()
        return found

    def report(self) -> str:
        """Describes all kills so far."""
        seconds = time.monotonic() - self.began
        head = (
            f"{seconds:.0f} s, {self.ledger.num_looks} looks, {self.ledger.num_steps} steps, "
            f"{len(self.kills)} kills"
        )
        return "\n".join([head, *map(str, self.kills)])

    def kill_log(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]

    # Killing --------------------------------------------------------------------------------------

    def kill_at_random(self, num_each: int) -> None:
        """Kills each kind so many times, in random order at random moments."""
        waiting = [kind for kind in OF_THE_ROLLOUT_POOL for _ in range(num_each)]
        self.dice.shuffle(waiting)
        while waiting:
            pause_until = time.monotonic() + self.dice.uniform(*GAP_S)
            self.watch(lambda at=pause_until: time.monotonic() > at, BACK_S, "a pause")
            victim = self.watch(lambda: self._choose(waiting), BACK_S, f"somebody of {waiting}")
            waiting.remove(victim.kind)
            self._kill(victim)
        self.watch(lambda: all(kill.is_over for kill in self.kills), BACK_S, "all are back")

    def _choose(self, waiting: list[Kind]) -> Member | None:
        """A victim of the first waiting kind that has one."""
        alive = members(self.run)
        for kind in waiting:
            if fit := [member for member in alive[kind] if self._is_fit(member)]:
                return self.dice.choice(fit)
        return None

    def _kill(self, victim: Member) -> None:
        assert self.picture is not None
        kill = Kill(victim=victim, at=time.time(), num_running=len(self.picture.running))
        victim.kill()
        self.kills.append(kill)

    def _is_fit(self, member: Member) -> bool:
        """Whether a member is under load, and so its death is felt."""
        assert self.picture is not None
        before = [k for k in self.kills if _alike(k.victim.kind, member.kind)]
        if any(k.victim.pid == member.pid for k in before) or not self.picture.running:
            return False
        if member.kind in ENGINES and not self._is_generating():
            return False
        mine = [kill for kill in before if kill.victim.name == member.name]
        return all(kill.back_s is not None for kill in mine)

    def _is_generating(self) -> bool:
        """Whether a group has just begun, since those that only wait for their rewards ask no
        engine; and others are under way, since a group is at one engine and not at the other."""
        assert self.picture is not None
        if len(self.picture.running) < BUSY_GROUPS:
            return False
        newest_ms = max(self.ledger.begun_ms[group_id] for group_id in self.picture.running)
        return 1000 * self.looked_at - newest_ms < JUST_MS

    def _note_recoveries(self) -> None:
        waiting = [kill for kill in self.kills if not kill.is_over]
        if not waiting:
            return
        alive = members(self.run)
        for kill in waiting:
            since = time.time() - kill.at
            if kill.back_s is None and self._is_back(kill, alive):
                kill.back_s = since
            if kill.trained_s is None and self._has_trained_since(kill.at):
                kill.trained_s = since
            assert since < BACK_S, f"{kill}\n{self.kill_log()}"

    def _is_back(self, kill: Kill, alive: dict[Kind, list[Member]]) -> bool:
        assert self.picture is not None
        victim, ledger = kill.victim, self.ledger
        there = [m for m in alive[victim.kind] if m.name == victim.name]
        if not there or any(member.pid == victim.pid for member in there):
            return False
        begun = {i for i, at_ms in ledger.begun_ms.items() if at_ms > 1000 * kill.at}
        match victim.kind:
            case Kind.engine | Kind.engine_actor:
                restarts = self.events("engine_restarted", victim.name)
                return [kill.at] < restarts[-1:] < self.commits(victim.name)[-1:]
            case Kind.receiver:
                return self.events("receiver_restarted", victim.name)[-1:] > [kill.at]
            case Kind.worker:
                own = victim.name.removeprefix("worker-") + "-"
                return any(group_id.startswith(own) for group_id in begun)
            case _:  # it has scored
                return any(group_id in ledger.whole for group_id in begun)

    def _has_trained_since(self, at: float) -> bool:
        ledger = self.ledger
        return any(ledger.begun_ms[group_id] > 1000 * at for group_id in ledger.consumed_ms)

    # Ending ---------------------------------------------------------------------------------------

    def train_steps(self, number: int) -> None:
        """A quiet time without kills."""
        last = self.ledger.num_steps + number
        self.watch(lambda: self.ledger.num_steps >= last, BACK_S, f"{number} more steps")

    def scale(self, num_engines: int) -> float:
        """The seconds until just so many engines serve."""
        began = time.monotonic()
        command_on(self.run.parent, "tune", f"rollout.num_engines={num_engines}")
        names = {f"engine-{index}" for index in range(num_engines)}
        self.watch(lambda: self._serving() == names, BACK_S, f"{num_engines} engines serve")
        return time.monotonic() - began

    def _serving(self) -> frozenset[str]:
        assert self.picture is not None
        return self.picture.engines

    def stop(self) -> None:
        """From another shell; then a last look, at the data that the run left."""
        command_on(self.run.parent, "stop")
        self.process.wait(timeout=STOP_S)
        with buffer_address(RunDir(path=self.run)) as address:
            camera = Camera(address.url, address.run, self.camera.next_event)
            try:
                self.picture = camera.take()
                faults = self.ledger.enter(self.picture, is_over=True)
                faults += self._count_episodes(camera, self.picture)
            finally:
                camera.close()
        assert not faults, "\n".join([*faults, self.report()])

    def first_commit_s(self, joiner: str) -> float:
        """Seconds from the moment at which an engine that joined was ready to its first commit,
        after which it gets requests."""
        (ready,) = self.events("engine_joined", joiner)
        return self.commits(joiner)[0] - ready

    def commits(self, engine: str) -> list[float]:
        """When it took a version."""
        return [c.t for c in self.metrics("commit") if c.values["engine"] == engine]

    def events(self, event: str, who: str) -> list[float]:
        """When it happened to whom."""
        wanted = (event, who)
        found = self.metrics("weights_event")
        return [e.t for e in found if (e.values["event"], e.values["who"]) == wanted]

    def metrics(self, kind: str) -> list[Record]:
        return read_metrics(self.run / "metrics.jsonl", kind)


@contextlib.contextmanager
def play(command: list[str], run: Path, output: Path, seed: int) -> Iterator[Play]:
    """A run from its first trained step on; always ended."""
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    with contextlib.ExitStack() as closing:
        closing.callback(_end, process)
        _wait_for_step(run, process, output)
        config = read_config(run / "config.yaml")
        address = closing.enter_context(buffer_address(RunDir(path=run)))
        camera = Camera(address.url, address.run)
        closing.callback(camera.close)
        buffer = BlockingReplayBuffer(address.url, address.run, config.buffer)
        closing.callback(buffer.close)
        task = build_task(config.task)
        ledger = Ledger(
            config.rollout.num_workers,
            config.rollout.group_size,
            lambda index: task.is_held_out(task.example(index)),
        )
        yield Play(
            run=run,
            process=process,
            output=output,
            camera=camera,
            buffer=buffer,
            ledger=ledger,
            dice=random.Random(seed),
            began=began,
        )


def _alike(one: Kind, other: Kind) -> bool:
    """Whether both are needed for the same thing."""
    return one is other or {one, other} <= ENGINES


def _wait_for_step(run: Path, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + START_S
    while not read_metrics(run / "metrics.jsonl", "step"):
        text = output.read_text(errors="replace")[-4000:]
        assert process.poll() is None, f"it did not start:\n{text}"
        assert time.monotonic() < deadline, f"no step within {START_S:g} s:\n{text}"
        time.sleep(LOOK_EVERY_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
