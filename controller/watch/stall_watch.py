"""Answers a stall: an alarm, stacks of the processes concerned, and what `run.stall` says.

find_stall ──► who does not answer? ──► record, panel, command, webhook
                                   └──► stacks/<time>-<part>.txt ──► alarm | restart | end
progress ────► record, panel, command, webhook
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.choices import OnStall
from configs.run_files import Scalar
from configs.schema import StallConfig
from controller.metrics.history import STALL, STALL_ENDED
from controller.run_dir import RunDir
from controller.units import format_duration
from controller.watch.finding import Finding, log_once
from controller.watch.remarks import REWARDS, TRAINER
from controller.watch.run_view import RunView
from controller.watch.stalls import ENGINES, WORKERS, Stall, find_stall
from controller.watch.supervise import RunFailed
from processes.child import Child
from processes.pending import Pending, in_thread, value
from processes.stacks import collect, write_stacks
from rollout_pool.cancelling import BackgroundTasks

RESTARTING = "restarting the trainer"
"""A phase of the run."""
LOOK_S = 1.0
ANSWER_S = 10.0
"""A live process answers at once, also in the middle of its work."""
STACKS_S = 30.0
COMMAND_S, WEBHOOK_S = 60.0, 10.0
ROLLOUTS = ("engine-", "worker-", "receiver-", "scorer-")


class Stalled(RunFailed):
    """A stall for which the policy is to start the part again, or to end the run."""


@dataclass(eq=False)
class StallWatch:
    """Looks for stalls while a run trains; `run` is called once.

    watch = StallWatch(config.run.stall, view, run_dir, processes=..., restart=..., ...)
    failed = await watch.run()    # with the policy to end the run
    """

    config: StallConfig
    view: RunView
    run_dir: RunDir
    _: KW_ONLY
    processes: Callable[[str], Mapping[str, Pending[Any]]]
    """Asks each process that may keep others waiting if this part stalls."""
    restart: Callable[[Stalled, Sequence[str]], None]
    """Starts these processes again."""
    record: Callable[[str, Mapping[str, Scalar]], object]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._telling = BackgroundTasks()

    async def run(self) -> Stalled:
        """Returns what ends the run, if that is the policy."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)  # a stall is the absence of events
                try:
                    failed = await self._look()
                except Exception:  # a watch that fails must not end the run
                    log_once("the watch for stalls")
                    continue
                if failed is not None:
                    await self._telling.wait(WEBHOOK_S)
                    return failed
        finally:
            await self._telling.end()

    async def _look(self) -> Stalled | None:
        """Sees a stall through, if there is one; returns what ends the run."""
        # A process that does not answer is asked until the time is up.
        if (found := self._find(ANSWER_S - 2 * LOOK_S)) is None:
            return None
        stall, silent = await self._with_silent(found)
        # None, too, if its ranks start again anyway; another one is asked about for itself.
        now = self._find()
        if now is None or (now.part, now.since) != (found.part, found.since):
            return None
        if (failed := await self._begin(stall, silent)) is not None:
            return failed
        while self.view.phase == RESTARTING or self._find() is not None:
            await asyncio.sleep(LOOK_S)
        self._end(stall)
        return None

    def _find(self, sooner_s: float = 0.0) -> Stall | None:
        return find_stall(self.view, self.config.factor, sooner_s)

    async def _with_silent(self, stall: Stall) -> tuple[Stall, list[str]]:
        """The stall with the processes that do not answer as its cause, if there are any."""
        if not (silent := await silent_of(self.processes(stall.part), ANSWER_S)):
            return stall, silent
        who = f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
        words, advice = f"{stall.words}; {who}", f"logs/{silent[0]}.log may say why"
        return replace(stall, part=silent[0], words=words, advice=advice), silent

    async def _begin(self, stall: Stall, silent: Sequence[str]) -> Stalled | None:
        self.record(STALL, stall.values())
        found = stall.finding(self.view.now)
        self.say(found.sentence)
        stacks = await self._write_stacks(stall.part)
        self._tell(STALL, stall, found, str(stacks or ""))
        if self.config.policy is OnStall.alarm or self._find() is None:
            return None
        at = f"; stacks are in {stacks}" if stacks else ""
        failed = Stalled(f"the run stalled: {found.words}{at}")
        if self.config.policy is OnStall.end:
            return failed
        if silent or stall.part not in (ENGINES, WORKERS, REWARDS):
            self.restart(failed, silent or [stall.part])
        else:  # their groups may wait for rewards or tools, which no restart of these would bring
            self.say("Nothing starts again: all processes answer, and no engine is far behind.")
        return None

    def _end(self, stall: Stall) -> None:
        lasted = format_duration(self.view.now - stall.since)
        self.record(STALL_ENDED, {"part": stall.part, "since": stall.since})
        self.say(f"The stall has ended after {lasted}.")
        self._tell(STALL_ENDED, stall, stall.finding(self.view.now), "")

    async def _write_stacks(self, part: str) -> Path | None:
        names = (f"{TRAINER}-",) if part.startswith(TRAINER) else ROLLOUTS
        try:
            text = await in_thread(_collect_everywhere, self.run_dir.run_id, names)
            path = await in_thread(write_stacks, self.run_dir.path, part, text)
        except Exception as error:  # whatever it is, the stall matters more
            self.say(f"no stacks could be written: {error!r}")
            return None
        self.say(f"Stacks are in {path}.")
        return path

    def _tell(self, event: str, stall: Stall, found: Finding, stacks: str) -> None:
        """Run the command and call the webhook, beside all else."""
        what: dict[str, Scalar] = {
            "event": event,
            "run": self.run_dir.name,
            "text": f"{self.run_dir.name}: {event.replace('_', ' ')}: {found.sentence}",
            "part": stall.part,
            "since": stall.since,
            "words": found.words,
            "advice": found.advice,
            "policy": self.config.policy.name,
            "stacks": stacks,
        }
        for work in (self._run_command(what), self._call_webhook(what)):
            self._telling.spawn(work)

    async def _run_command(self, what: Mapping[str, Scalar]) -> None:
        if (command := self.config.command) is None:
            return
        log, line = self.run_dir.log_of("stall-command"), msgspec.json.encode(what).decode()
        begun, over = list[Child](), threading.Event()

        def start() -> Child:
            child = Child(["/bin/sh", "-c", command], log, secret=line)
            begun.append(child)  # before the look at `over`: one of both ends sees the other
            if over.is_set():
                child.stop(0.0)
            return child

        try:
            child = await in_thread(start)
            code = await in_thread(child.stop, COMMAND_S)
        except asyncio.CancelledError:  # the run ends
            over.set()
            for child in begun:
                child.stop(0.0)  # closes its input, too
            raise
        except OSError as error:
            self.say(f"run.stall.command did not run: {error}")
            return
        if code:
            self.say(f"run.stall.command ended with exit code {code}; {log} may say why")

    async def _call_webhook(self, what: Mapping[str, Scalar]) -> None:
        if (name := self.config.webhook_env) is None:
            return
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses: this is a secret
        try:
            async with httpx.AsyncClient(timeout=WEBHOOK_S) as client:
                answer = await client.post(webhook_address(name), json=what)
            why = f"answered {answer.status_code}" if answer.is_error else ""
        except ValueError as error:
            why = f"has no address: {error}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # its words may quote the address
            why = f"was not reached ({type(error).__name__})"
        if why:
            self.say(f"the webhook of run.stall.webhook_env={name} {why}")


def webhook_address(variable: str) -> str:
    """The address in this environment variable. Raises ValueError, which does not quote it."""
    address = os.environ.get(variable, "")
    if not re.match(r"https?://[^/\s]", address):
        what = "holds no address as https://host/path" if address else "is not set"
        raise ValueError(
            f"run.stall.webhook_env={variable!r}: that environment variable {what}; export it "
            "before the launch, or set null"
        )
    return address


async def silent_of(asked: Mapping[str, Pending[Any]], limit_s: float) -> list[str]:
    """Names of the processes that do not answer within `limit_s`; an error is an answer."""
    asking = {asyncio.ensure_future(value(ref)): name for name, ref in asked.items()}
    if not asking:
        return []
    try:
        answered, silent = await asyncio.wait(asking, timeout=limit_s)
    finally:
        for one in asking:
            one.cancel()
    for one in answered:
        one.exception()  # of a dead one, which is watched for itself
    return sorted(asking[one] for one in silent)


def _collect_everywhere(run_id: str, names: Sequence[str]) -> str:
    """Stacks of the processes on this machine and on the other nodes of Ray's cluster."""
    if not ray.is_initialized():
        return collect(run_id, names, STACKS_S)
    here, began = ray.get_runtime_context().get_node_id(), time.monotonic()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    others = {
        ray.remote(collect)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(run_id, names, STACKS_S): node
        for node in nodes
    }
    texts = [collect(run_id, names, STACKS_S)]
    left_s = max(0.0, 2 * STACKS_S - (time.monotonic() - began))
    ready, late = list[Any](), list[Any]()
    if others:
        ready, late = ray.wait(list(others), num_returns=len(others), timeout=left_s)
    for ref in ready:
        try:
            texts.append(ray.get(ref))
        except Exception as error:
            texts.append(f"==== node {others[ref]}: {error}\n")
    texts += [f"==== node {others[ref]} did not answer\n" for ref in late]
    return "\n".join(texts)
