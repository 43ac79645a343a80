"""Faults of every kind at every process of a run, one every few seconds, and what each one cost.

The schedule comes from a seed. Every fault leaves a witness: a record of what the run did about it,
or the kernel's own word that a process stood still or a file system was full.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import psutil
import redis

from buffer.redis.client import BufferConnectionError, DiskFullError
from configs.load import read_config
from controller.buffer_access import buffer_address
from controller.metrics.history import Record, read_metrics
from controller.run_dir import RunDir
from processes import tree
from tests.soak.rollouts.picture import Camera, Event, Picture
from tests.soak.rollouts.victims import Kind, Member, members
from tests.support.blocking import BlockingReplayBuffer
from tests.support.launches import kill_controller

FREEZE_S = 20.0
FULL_S = 10.0
GAP_S = (1.0, 4.0)
"""Time from the recovery of one fault to the next."""
NEW_STEPS = 2
"""So many steps after a fault show that training goes on."""
BACK_S = 240.0
"""Longest time until they are trained."""
LOOK_EVERY_S = 0.2
ANSWER_S = 2.0
SERVERS = ("redis-server", "valkey-server")
REDIS, CONTROLLER, RUN_FOLDER, STAGE = "Redis", "controller", "run's folder", "staged weights"
GUARD = "controller and its guard"


class Fault(StrEnum):
    kill = "SIGKILL"
    freeze = "SIGSTOP"
    full = "full disk"
    drain = "SIGTERM"


@dataclass(kw_only=True, slots=True, frozen=True)
class Blow:
    """One fault of the schedule."""

    fault: Fault
    at: str
    """A kind of process, or a folder."""

    def __str__(self) -> str:
        return f"{self.fault}: {self.at}"


PROCESSES = (*(str(kind) for kind in Kind), REDIS, CONTROLLER)
BLOWS = (
    *(Blow(fault=fault, at=at) for fault in (Fault.kill, Fault.freeze) for at in PROCESSES),
    Blow(fault=Fault.kill, at=GUARD),
    *(Blow(fault=Fault.full, at=at) for at in (RUN_FOLDER, STAGE)),
    *(Blow(fault=Fault.drain, at=str(kind)) for kind in (Kind.engine_actor, Kind.worker)),
)


def schedule(dice: random.Random, blows: Sequence[Blow], number: int) -> list[Blow]:
    """Every kind comes once before any comes again."""

    def decks() -> Iterator[Blow]:
        while True:
            yield from dice.sample(blows, len(blows))

    return list(islice(decks(), number))


@dataclass(kw_only=True, slots=True)
class Struck:
    """A fault that happened."""

    blow: Blow
    at: float
    """Unix time."""
    step: int
    """The last one before it."""
    witness: str = ""
    took_s: float = 0.0
    """From the last step before it to the last of those that show that training goes on."""
    num_steps: int = 0
    """By which training advanced meanwhile."""

    def lost_s(self, usual_s: float) -> float:
        """Beyond the usual time of those steps."""
        return self.took_s - self.num_steps * usual_s

    def __str__(self) -> str:
        return f"{self.blow} at step {self.step}: {self.witness or 'NO WITNESS'}"


# Small file systems ------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[str | None]:
    """Mounts memory of so many bytes there; yields why not, if this user may not mount."""
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    try:
        yield mounted.stderr.strip() or None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[str]:
    """Fills its file system to the last byte; yields the kernel's refusal of one more."""
    ballast = folder / ".ballast"
    refusal = ""
    try:
        with ballast.open("wb", buffering=0) as file:
            for piece in (bytes(2**20), b"\0"):
                while not (refusal := _refused(file.write, piece)):
                    pass
        yield refusal
    finally:
        ballast.unlink()


def _refused(write: Callable[[bytes], int | None], piece: bytes) -> str:
    try:
        write(piece)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return os.strerror(errno.ENOSPC)
    return ""


# Observing ---------------------------------------------------------------------------------------


class Observer(threading.Thread):
    """Looks at the run's Redis all the time; while that is away it waits for it."""

    def __init__(self, run: Path) -> None:
        super().__init__(name="observer", daemon=True)
        self._run = RunDir(path=run)
        self._over = threading.Event()
        self.faults: list[str] = []
        self.picture: Picture | None = None
        self.num_looks = 0
        self.looked_at = 0.0
        """Unix time of the last look that got answers."""

    def run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            url = self._run.read_redis_url()
            if url is None:
                continue
            with suppress(redis.RedisError, OSError, BufferConnectionError, DiskFullError):
                self._look_until_it_is_away(url)

    def _look_until_it_is_away(self, url: str) -> None:
        settings = read_config(self._run.path / "config.yaml").buffer
        settings = replace(settings, outage_timeout_s=ANSWER_S)  # the next look connects again
        buffer = BlockingReplayBuffer(url, self._run.name, settings)
        camera = Camera(f"{url}?socket_timeout={ANSWER_S:g}", self._run.name)
        try:
            while not self._over.wait(LOOK_EVERY_S) and self._run.read_redis_url() == url:
                began = time.time()
                picture = camera.take()
                if picture.stats.get("pushed", 0) != picture.places:
                    pushed = picture.stats.get("pushed", 0)
                    self.faults.append(f"{pushed} groups pushed, {picture.places} are somewhere")
                self.faults += buffer.find_violations()
                self.picture, self.looked_at = picture, began
                self.num_looks += 1
        finally:
            camera.close()
            buffer.close()

    def end(self) -> None:
        self._over.set()
        self.join()


def trained_in_the_surviving_lineage(events: Sequence[Event]) -> dict[int, list[str]]:
    """The prompts of each step; those of steps that a restart undid are left out."""
    prompts: dict[str, str] = {}
    steps: dict[int, list[str]] = {}
    for event in events:
        if event.what == "begun":
            prompts |= dict.fromkeys(event.group_ids, event.detail["p"])
        if event.what == "consumed":
            step = int(event.detail["s"])
            steps = {number: ids for number, ids in steps.items() if number < step}
            steps[step] = [prompts[group_id] for group_id in event.group_ids]
    return steps


def steps_without_repeats(run: Path) -> dict[int, list[str]]:
    """The prompts of each step of a run that has ended, of which none was trained twice."""
    with buffer_address(RunDir(path=run)) as address:
        camera = Camera(address.url, address.run)
        steps = trained_in_the_surviving_lineage(camera.take().events)
        camera.close()
    prompts = [prompt for trained in steps.values() for prompt in trained]
    assert len(set(prompts)) == len(prompts), "a prompt was trained twice"
    return steps


# Striking ----------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Chaos:
    run: Path
    process: subprocess.Popen[Any]
    go_on: Callable[[], subprocess.Popen[Any]]
    """Resumes the run after its controller was killed."""
    output: Callable[[], str]
    observer: Observer
    dice: random.Random
    freeze_s: float = FREEZE_S
    stage: Path | None = None
    struck: list[Struck] = field(default_factory=list)

    def strike(self, blow: Blow) -> None:
        """Returns when training goes on."""
        before = self.steps()
        struck = Struck(blow=blow, at=time.time(), step=before[-1].count("step"))
        self.struck.append(struck)
        match blow.fault:
            case Fault.kill:
                self._kill(struck)
            case Fault.freeze:
                self._freeze(struck)
            case Fault.full:
                self._fill(struck)
            case Fault.drain:
                self._drain(struck)
        ended = time.time()
        self.wait(lambda: len(self._since(ended)) >= NEW_STEPS, f"{NEW_STEPS} steps after {blow}")
        self.wait(lambda: self.observer.looked_at > ended, f"a look at the buffer after {blow}")
        last = self._since(ended)[NEW_STEPS - 1]
        struck.took_s = last.t - before[-1].t
        struck.num_steps = last.count("step") - before[-1].count("step")

    def pause(self) -> None:
        until = time.monotonic() + self.dice.uniform(*GAP_S)
        self.wait(lambda: time.monotonic() > until, "a pause")

    def _kill(self, struck: Struck) -> None:
        at = struck.blow.at
        if at in (CONTROLLER, GUARD):
            self._kill_controller(struck)
        elif at == REDIS:
            os.kill(redis_pid(self.run), signal.SIGKILL)
            struck.witness = self._record(struck, "redis_restarted")
        else:
            self._kill_member(struck, self._member(Kind(at)))

    def _kill_controller(self, struck: Struck) -> None:
        is_guard_too = struck.blow.at == GUARD
        kill_controller(self.run, with_guard=is_guard_too)
        if is_guard_too:
            self.process.wait()
            self.process = self.go_on()
        # It resumes if what was struck before was just being replaced.
        kinds = ("resumed",) if is_guard_too else ("attached", "resumed")
        struck.witness = self._record(struck, *kinds)

    def _kill_member(self, struck: Struck, victim: Member) -> None:
        workers_before = self._workers_restarted()
        victim.kill()
        match victim.kind:
            case Kind.worker:
                self.wait(lambda: self._workers_restarted() > workers_before, "a worker restarted")
                struck.witness = "workers_restarted counted it"
            case Kind.engine | Kind.engine_actor | Kind.receiver:
                event = "receiver" if victim.kind is Kind.receiver else "engine"
                struck.witness = self._record(struck, "weights_event", event=f"{event}_restarted")
            case Kind.trainer:
                struck.witness = self._record(struck, "resumed")
            case _:
                self.wait(lambda: self._replaced(victim), f"another {victim.kind}")
                struck.witness = f"{victim.name} has another process"

    def _drain(self, struck: Struck) -> None:
        """As before a machine is taken away: an actor with all that it started gets the signal. It
        leaves, and nothing dies."""
        victim = self._member(Kind(struck.blow.at))
        drained_before = self._counted("workers_drained")
        deaths_before, restarts_before = len(self._deaths()), self._workers_restarted()
        for process in tree.family(victim.pid):
            process.send_signal(signal.SIGTERM)
        if victim.kind is Kind.worker:
            self.wait(lambda: self._counted("workers_drained") > drained_before, "a drained worker")
            another = f"another process of {victim.name}"
            self.wait(lambda: self._workers_restarted() > restarts_before, another)
            struck.witness = "workers_drained counted it"
        else:
            struck.witness = self._record(struck, "weights_event", event="engine_left")
            self._record(struck, "weights_event", event="engine_joined")
        self.wait(lambda: not psutil.pid_exists(victim.pid), f"the end of {victim.name}")
        assert len(self._deaths()) == deaths_before, f"{struck}\n{self.report()}"

    def _deaths(self) -> list[str]:
        """The engines that were lost or restarted, and the groups that ended with their worker."""
        records = read_metrics(self.run / "metrics.jsonl", "weights_event")
        events = ("engine_lost", "engine_restarted")
        lost = [str(r.values["who"]) for r in records if r.values["event"] in events]
        stats = {} if self.observer.picture is None else self.observer.picture.stats
        return lost + ["group"] * stats.get("abandoned:worker_died", 0)

    def _workers_restarted(self) -> float:
        return self._counted("workers_restarted")

    def _counted(self, name: str) -> float:
        picture = self.observer.picture
        return 0.0 if picture is None else picture.counters.get(name, 0.0)

    def _replaced(self, victim: Member) -> bool:
        alike = [one for one in members(self.run)[victim.kind] if one.name == victim.name]
        return any(one.pid != victim.pid for one in alike)

    def _record(self, struck: Struck, *kinds: str, event: str | None = None) -> str:
        """Waits for one that was written after the fault."""

        def found() -> list[str]:
            records = read_metrics(self.run / "metrics.jsonl")
            new = [r for r in records if r.t > struck.at and r.kind in kinds]
            return [r.kind for r in new if event in (None, r.values.get("event"))]

        self.wait(lambda: bool(found()), f"a record {event or kinds} after {struck.blow}")
        return f"record {event or found()[0]}"

    def _freeze(self, struck: Struck) -> None:
        processes = self._to_freeze(struck.blow.at)
        for process in processes:
            process.suspend()
        until = time.monotonic() + self.freeze_s
        try:
            self._sleep_until(until)
            states = [process.status() for process in processes]
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        assert set(states) == {psutil.STATUS_STOPPED}, f"{struck.blow}: {states}"
        struck.witness = f"stood still for {self.freeze_s:g} s"

    def _to_freeze(self, at: str) -> list[psutil.Process]:
        if at == CONTROLLER:
            return [psutil.Process(RunDir(path=self.run).read_record().pid)]
        if at == REDIS:
            return [psutil.Process(redis_pid(self.run))]
        victim = self._member(Kind(at))
        return (
            tree.family(victim.pid) if victim.kind is Kind.engine else [psutil.Process(victim.pid)]
        )

    def _fill(self, struck: Struck) -> None:
        folder = self.run.parent if struck.blow.at == RUN_FOLDER else self.stage
        assert folder is not None
        until = time.monotonic() + FULL_S
        with filled(folder) as refusal:
            self._sleep_until(until)
            struck.witness = refusal
        said = [
            str(r.values.get("error") or r.values.get("detail"))
            for r in read_metrics(self.run / "metrics.jsonl")
            if r.t > struck.at and r.kind in ("checkpoint", "weights_event")
        ]
        told = [words for words in said if "space" in words or "room" in words]
        if told:
            struck.witness += f"; the run says: {told[0]}"

    def _member(self, kind: Kind) -> Member:
        """One that has lived for a while: it has taken up its work."""

        def settled() -> list[Member]:
            return [m for m in members(self.run)[kind] if _age_s(m.pid) > 1.0]

        self.wait(lambda: bool(settled()), f"a {kind}")
        return self.dice.choice(settled())

    # Waiting -------------------------------------------------------------------------------------

    def steps(self) -> list[Record]:
        """Also those that were undone since, with the times at which they were trained: a
        controller that stands still writes them later."""
        lines = (self.run / "metrics.jsonl").read_text().split("\n")[:-1]
        found = [json.loads(line) for line in lines if '"kind":"step"' in line]
        return [
            Record(t=int(one["id"].partition("-")[0]) / 1000, kind="step", values=one)
            for one in found
        ]

    def _since(self, moment: float) -> list[Record]:
        return [step for step in self.steps() if step.t > moment]

    def usual_s(self) -> float:
        """The median time of a step so far."""
        times = [step.t for step in self.steps()]
        return statistics.median(b - a for a, b in pairwise(times))

    def _sleep_until(self, moment: float) -> None:
        self.wait(lambda: time.monotonic() > moment, "the end of a fault")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BACK_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}\n{self.report()}"
            assert not self.observer.faults, f"{self.observer.faults}\n{self.report()}"
            assert self.observer.is_alive(), self.report()
            assert time.monotonic() < deadline, f"not within {BACK_S:g} s: {what}\n{self.report()}"
            time.sleep(LOOK_EVERY_S)

    def report(self) -> str:
        return "\n".join([*map(str, self.struck), self.output()[-6000:]])

    def table(self) -> str:
        """Seconds lost by kind of fault, beyond those of the steps that were trained meanwhile."""
        by_blow, usual_s = defaultdict[str, list[float]](list), self.usual_s()
        for one in self.struck:
            by_blow[str(one.blow)].append(one.lost_s(usual_s))
        lines = [f"A step took {usual_s:.2f} s (median).", ""]
        lines += ["| fault | number | s lost, median | most |", "|---|---:|---:|---:|"]
        for name, lost in sorted(by_blow.items()):
            median, most = statistics.median(lost), max(lost)
            lines.append(f"| {name} | {len(lost)} | {median:.1f} | {most:.1f} |")
        return "\n".join(lines)


def _age_s(pid: int) -> float:
    try:
        return time.time() - psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def redis_pid(run: Path) -> int:
    """Returns the pid of the server that was started for the run."""
    here, found = str((run / "redis").resolve()), psutil.process_iter(["name", "cwd"])
    (pid,) = (p.pid for p in found if p.info["name"] in SERVERS and p.info["cwd"] == here)
    return int(pid)
