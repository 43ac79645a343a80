"""Faults that stay until they are healed, and what `make status` says of a run meanwhile."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis

from configs.environment import RUN_VARIABLE
from controller.commands.status import print_status
from controller.commands.tune import tune
from controller.run_dir import RunDir
from processes import tree
from rollout_pool.rewards.types import EpisodeView
from rollout_pool.tasks.task import Prompt
from tests.soak.rollouts import spelling
from tests.soak.rollouts.chaos import filled
from tests.soak.rollouts.victims import Kind, members

SLOW_S = 0.3
"""A step has 128 episodes."""
NEVER_S = 3600.0
SLOW, NEVER, EQUAL = "slow", "never", "equal"
QUIET_LOOKS = 10
"""Without an alarm, one after the other: the run is healthy again."""
HELD_S, FREE_S = 3.0, 0.3
"""A slow process is held for so long, then free for so long, in turn."""


def backward(prompt: Prompt, episode: EpisodeView) -> float:
    """The quickstart's reward, unless the file beside the run's folder says otherwise."""
    said = ""
    with suppress(FileNotFoundError):
        said = marker(Path(os.environ[RUN_VARIABLE])).read_text()
    if said == EQUAL:
        return 1.0
    time.sleep({SLOW: SLOW_S, NEVER: NEVER_S}.get(said, 0.0))
    return spelling.backward(prompt, episode)


def marker(run: Path) -> Path:
    return run.parent.parent / "planted"


@dataclass(kw_only=True, slots=True, frozen=True)
class Fault:
    name: str
    parts: tuple[str, ...]
    """A verdict on any of them is right."""
    word: str
    """The sentence of a right verdict has it."""
    plant: Callable[[Path, ExitStack], None] = lambda run, healing: None
    """Into a run; `healing` gets what takes it out again."""

    def is_named(self, part: str, sentence: str) -> bool:
        return part in self.parts and self.word in sentence


@dataclass(slots=True)
class FirstLine:
    """The first line about a fault, and when it came."""

    fault: str
    seconds: float | None = None
    """From the plant until it named the part."""
    sentence: str = ""
    before: list[tuple[float, str]] = field(default_factory=list)
    """Other first lines since the plant."""
    healed_s: float | None = None
    load: float = 0.0


def verdict(run: Path) -> tuple[str, str, str]:
    """Level, part and first line of `make status JSON=1`; the error if it has no answer."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            print_status(RunDir(path=run), as_json=True)
    except (OSError, RuntimeError, ValueError) as error:
        return "error", "", f"{error}"
    found = json.loads(printed.getvalue())["verdict"]
    return (found["level"], found["part"], found["sentence"]) if found else ("", "", "nothing")


def _stopped(kind: Kind, name: str) -> Callable[[Path, ExitStack], None]:
    """SIGSTOP; of an engine's server, with all that it started."""

    def plant(run: Path, healing: ExitStack) -> None:
        for pid in _pids(run, kind, name):
            healing.callback(_signal, pid, signal.SIGCONT)
            _signal(pid, signal.SIGSTOP)

    return plant


def _killed(kind: Kind, name: str) -> Callable[[Path, ExitStack], None]:
    """Once: the run starts it again."""

    def plant(run: Path, healing: ExitStack) -> None:
        for pid in _pids(run, kind, name):
            _signal(pid, signal.SIGKILL)

    return plant


def _slowed(kind: Kind, name: str) -> Callable[[Path, ExitStack], None]:
    def plant(run: Path, healing: ExitStack) -> None:
        pids, over = _pids(run, kind, name), threading.Event()

        def hold() -> None:
            while not over.is_set():
                for number, seconds in ((signal.SIGSTOP, HELD_S), (signal.SIGCONT, FREE_S)):
                    for pid in pids:
                        _signal(pid, number)
                    over.wait(seconds)

        holder = threading.Thread(target=hold, daemon=True)
        for pid in pids:
            healing.callback(_signal, pid, signal.SIGCONT)
        healing.callback(holder.join)
        healing.callback(over.set)
        holder.start()

    return plant


def _pids(run: Path, kind: Kind, name: str) -> list[int]:
    (pid,) = (one.pid for one in members(run)[kind] if one.name == name)
    return [process.pid for process in tree.family(pid)] if kind is Kind.engine else [pid]


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _marked(words: str) -> Callable[[Path, ExitStack], None]:
    def plant(run: Path, healing: ExitStack) -> None:
        marker(run).write_text(words)
        healing.callback(marker(run).unlink)

    return plant


def _full_redis(run: Path, healing: ExitStack) -> None:
    url = RunDir(path=run).read_redis_url()
    assert url is not None
    client = healing.enter_context(redis.Redis.from_url(url))
    healing.callback(client.config_set, "maxmemory", client.config_get("maxmemory")["maxmemory"])
    client.config_set("maxmemory", client.info("memory")["used_memory"])


def _tuned(change: str, back: str) -> Callable[[Path, ExitStack], None]:
    def plant(run: Path, healing: ExitStack) -> None:
        tune(RunDir(path=run), [change])
        healing.callback(tune, RunDir(path=run), [back])

    return plant


def _full_disk(run: Path, healing: ExitStack) -> None:
    healing.enter_context(filled(run.parent))


IN_A_HEALTHY_RUN = (
    Fault(
        name="a reward that never returns",
        parts=("rewards",),
        word="rewards",
        plant=_marked(NEVER),
    ),
    Fault(
        name="reward pool too small",
        parts=("rewards",),
        word="rollout.reward_processes",
        plant=_marked(SLOW),
    ),
    Fault(name="Redis full", parts=("redis",), word="maxmemory", plant=_full_redis),
    Fault(
        name="trainer stands still (SIGSTOP)",
        parts=("trainer", "trainer-0"),
        word="wait for the trainer",
        plant=_stopped(Kind.trainer, "trainer-0"),
    ),
    Fault(
        name="slow receiver",
        parts=("engine-0", "receiver-0", "weights"),
        word="engine-0",
        plant=_slowed(Kind.receiver, "receiver-0"),
    ),
    Fault(
        name="admission limit too low",
        parts=("workers",),
        word="max_groups_in_flight=1 ",
        plant=_tuned("rollout.max_groups_in_flight=1", "rollout.max_groups_in_flight=256"),
    ),
    Fault(name="disk full", parts=("disk",), word="disk", plant=_full_disk),
    Fault(
        name="dead router (SIGKILL of the worker that has it)",
        parts=("worker-0",),
        word="worker-0",
        plant=_killed(Kind.worker, "worker-0"),
    ),
    Fault(
        name="engine at an old version (its actor stands still)",
        parts=("engine-1", "weights"),
        word="behind",
        plant=_stopped(Kind.engine_actor, "engine-1"),
    ),
    Fault(
        name="wedged commit (an engine's server stands still)",
        parts=("engine-1", "engines", "rollout"),
        word="engine-1",
        plant=_stopped(Kind.engine, "engine-1"),
    ),
    # The last one: that the reward collapsed is true for a while after it, and rightly an alarm.
    Fault(
        name="prompt set exhausted (all answers are right)",
        parts=("rewards",),
        word="equal rewards teach nothing",
        plant=_marked(EQUAL),
    ),
)
OUT_OF_MEMORY = Fault(name="engine out of KV", parts=("engine-0", "engine-1"), word="KV cache")


@dataclass(kw_only=True, slots=True)
class Planter:
    """Plants faults into a run, one after the other, and asks for its verdict every `look_s`."""

    run: Path
    is_alive: Callable[[], bool]
    healthy_s: float
    """Time without a fault before each of them."""
    give_up_s: float = 90.0
    heal_s: float = 180.0
    look_s: float = 1.0
    found: list[FirstLine] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    """First lines in healthy time that were alarms."""

    def plant(self, fault: Fault) -> None:
        self._be_healthy()
        self._await_silence(fault)
        first = FirstLine(fault=fault.name, load=os.getloadavg()[0])
        self.found.append(first)
        with ExitStack() as healing:
            began = time.monotonic()
            fault.plant(self.run, healing)
            self.await_words(fault, first, began)
        began = time.monotonic()
        num_quiet = 0
        while num_quiet < QUIET_LOOKS and time.monotonic() < began + self.heal_s:
            num_quiet = 0 if verdict(self.run)[0] in ("alarm", "error") else num_quiet + 1
            self._pause(f"{fault.name} was healed")
        first.healed_s = time.monotonic() - began

    def await_words(self, fault: Fault, first: FirstLine, began: float) -> None:
        while (after := time.monotonic() - began) < self.give_up_s:
            level, part, sentence = verdict(self.run)
            line = f"{level}: {sentence}"
            if fault.is_named(part, sentence):
                first.seconds, first.sentence = time.monotonic() - began, line
                break
            if not first.before or _but_numbers(first.before[-1][1]) != _but_numbers(line):
                first.before.append((round(after, 1), line))
            self._pause(f"{fault.name} was named")
        print(f"{first}\n", flush=True)

    def _await_silence(self, fault: Fault) -> None:
        """Returns once the first line does not name the fault: that before it may have left it."""
        until = time.monotonic() + self.heal_s
        while fault.is_named(*verdict(self.run)[1:]):
            assert time.monotonic() < until, f"{fault.name} is named before it is planted"
            self._pause("the next fault")

    def _be_healthy(self) -> None:
        until = time.monotonic() + self.healthy_s
        while time.monotonic() < until:
            level, _, sentence = verdict(self.run)
            if level in ("alarm", "error"):
                self.alarms.append(sentence)
                print(f"in healthy time: {sentence}", flush=True)
            self._pause("the next fault")

    def _pause(self, before: str) -> None:
        assert self.is_alive(), f"the run ended before {before}"
        time.sleep(self.look_s)


def _but_numbers(line: str) -> str:
    return re.sub(r"[0-9.]+( m?s)?", "", line)


def table(found: list[FirstLine]) -> Iterator[str]:
    yield "| fault | seconds | load | first line |"
    yield "|---|---:|---:|---|"
    for one in found:
        seconds = "never" if one.seconds is None else f"{one.seconds:.0f}"
        yield f"| {one.fault} | {seconds} | {one.load:.1f} | {one.sentence or one.before[-1:]} |"
