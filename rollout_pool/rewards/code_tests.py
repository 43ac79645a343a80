"""Scores the model's programs by running the tests of their prompts in the sandbox."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.rollout_schema import TEST_TIME_FRACTION, RewardConfig, TaskConfig
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.rewards.remote_sandbox import RemoteSandbox, check_remote_sandbox
from rollout_pool.rewards.reward import PartScorer, Reward
from rollout_pool.rewards.types import PartScore
from rollout_pool.sandbox.environment import BARE, find_command, find_python
from rollout_pool.sandbox.run import (
    LocalSandbox,
    Sandbox,
    SandboxLimits,
    SandboxResult,
    cost_of_missing,
)
from rollout_pool.tasks.programs import CodeTask, ProgramTest
from rollout_pool.tasks.task import Prompt, Task

log = logging.getLogger(__name__)

_USUAL = SandboxLimits()
_HERE = LocalSandbox()
COMPILER_MEMORY_BYTES = 2 * 2**30
"""Or as much as a test may take, if that is more."""
MAX_TIMEOUTS = 2
"""After so many timeouts the remaining tests are skipped."""
_BLOCK = re.compile(r"```[ \t]*([\w+#]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py")


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    num_tests: int
    num_passed: int
    explanation: str
    """Why the first failed test failed; "" if all passed."""

    @property
    def fraction(self) -> float:
        return self.num_passed / self.num_tests


class CodeTests(Reward):
    """Runs a prompt's tests on the program in the model's last message: in a scoring process, or at
    a service.

    The value is the fraction of the tests that pass, or with `all_or_nothing` whether all do.
    """

    def __init__(self, part: str, config: RewardConfig, task: Task) -> None:
        """Raises ValueError for a task without tests, or if the service's key is missing."""
        self.config = config
        self._setting = f"task.rewards.{part}"
        self._task = code_task(task, self._setting)
        self._service = None if config.url is None else RemoteSandbox(part, config)

    @classmethod
    def is_in_process(cls, config: RewardConfig) -> bool:
        return config.url is None

    @classmethod
    def check(cls, part: str, config: TaskConfig, task: Task) -> None:
        reward, setting = config.rewards[part], f"task.rewards.{part}"
        exercises = code_task(task, setting)
        if reward.command:
            exercises.check_inputs_only(f"{setting}.command={reward.command}")
        if languages_of(reward)[0] not in PYTHON:
            exercises.check_inputs_only(f"{setting}.languages={reward.languages}")

    @classmethod
    async def probe(cls, part: str, config: RewardConfig, tokenizer: Tokenizer) -> None:
        await check_remote_sandbox(part, config, limits_of(config))

    def load(self, timeout_s: float) -> PartScorer:
        """Raises ValueError for a Python or a command that cannot be used, SandboxError if programs
        cannot be run safely on this machine."""
        sandbox, runner = local_sandbox(self.config, self._setting), asyncio.Runner()
        layers = runner.run(sandbox.protections(limits_of(self.config)))
        if (cost := cost_of_missing(layers)) is not None:
            log.warning("%s.kind=code_tests: %s", self._setting, cost)
        total_s = TEST_TIME_FRACTION * timeout_s
        return lambda request: runner.run(
            self._judged(request.prompt, request.episode.answer, sandbox, total_s)
        )

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        """Raises RemoteFailure if a test could not be run: the program is not at fault."""
        assert self._service is not None, self._setting
        total_s = self.config.timeout_s
        return PartScore(value=await self._judged(prompt, episode.answer, self._service, total_s))

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()

    async def _judged(
        self, prompt: Prompt, completion: str, sandbox: Sandbox, total_s: float
    ) -> float:
        """Tests that have not passed after `total_s` fail."""
        verdict = await judge(
            program_of(completion, languages_of(self.config)),
            self._task.tests(prompt),
            limits_of(self.config),
            sandbox,
            total_s=total_s,
            stops_at_failure=self.config.all_or_nothing,
        )
        if verdict.explanation:
            passed = f"{verdict.num_passed} of {verdict.num_tests} tests passed"
            log.info("prompt %d: %s; %s", prompt.index, passed, verdict.explanation)
        return float(verdict.fraction == 1.0) if self.config.all_or_nothing else verdict.fraction


KIND = CodeTests


def code_task(task: Task, setting: str) -> CodeTask:
    """Raises ValueError naming `setting`, the part of the reward, for a task without tests."""
    if isinstance(task, CodeTask):
        return task
    raise ValueError(
        f"{setting}.kind=code_tests: the prompts of {task.name} have no tests; those of "
        f"task.kind=code have, or score by {setting}.kind=task"
    )


def local_sandbox(config: RewardConfig, setting: str) -> LocalSandbox:
    """Runs the programs on this machine. Raises ValueError naming `setting`, the part of the
    reward, for a Python or a command that cannot be used."""
    environment, compiler = BARE, None
    if config.command:
        environment = find_command(config.command, f"{setting}.command")
    elif config.python:
        environment = find_python(config.python, f"{setting}.python")
    if config.compile:
        compiler = find_command(config.compile, f"{setting}.compile", compiles=True)
    return LocalSandbox(
        environment,
        compiler,
        SandboxLimits(
            cpu_time_s=_USUAL.max_threads * math.ceil(config.compile_time_s),  # so never reached
            wall_time_s=config.compile_time_s,
            memory_bytes=max(COMPILER_MEMORY_BYTES, config.memory_bytes),
            max_open_files=256,
        ),
    )


def languages_of(config: RewardConfig) -> tuple[str, ...]:
    return tuple(config.languages) or PYTHON


def limits_of(config: RewardConfig) -> SandboxLimits:
    """Limits of one test."""
    return SandboxLimits(
        cpu_time_s=config.cpu_time_s,
        wall_time_s=config.wall_time_s,
        memory_bytes=config.memory_bytes,
    )


def program_of(completion: str, languages: Collection[str] = PYTHON) -> str:
    """The last code block of these languages, else the last code block, else the whole text."""
    blocks = _BLOCK.findall(completion)
    named = [code for language, code in blocks if language.lower() in languages]
    every = named or [code for _, code in blocks] or [completion]
    return str(every[-1])


async def judge(
    program: str,
    tests: Sequence[ProgramTest],
    limits: SandboxLimits = _USUAL,
    sandbox: Sandbox = _HERE,
    total_s: float = math.inf,
    stops_at_failure: bool = False,
) -> Verdict:
    """Runs the tests one by one, since a scoring process is meant to use one core. `limits` are
    those of each. Tests that have not passed after `total_s` fail, with `stops_at_failure` also
    those after a failed one. Raises what `sandbox` raises."""
    left_s = total_s  # of the program's own time: a sandbox that is slow to reply costs no score
    too_long = f"all tests together took longer than {total_s:g} s"
    num_passed = num_timeouts = 0
    explanation = ""
    for place, test in enumerate(tests, start=1):
        if left_s <= 0:
            explanation = explanation or f"test {place}: {too_long}"
            break
        wall_time_s = min(limits.wall_time_s, left_s)
        within = dataclasses.replace(limits, wall_time_s=wall_time_s)
        failure, result = await _run(program, test, within, sandbox)
        reason, left_s = result.reason, left_s - result.seconds
        if reason == "wall_time" and wall_time_s < limits.wall_time_s:
            failure = too_long
        num_passed += not failure
        num_timeouts += reason in ("cpu_time", "wall_time")
        if failure and not explanation:
            explanation = f"test {place}: {failure}"
        is_hopeless = num_timeouts >= MAX_TIMEOUTS or reason == "compile"
        if is_hopeless or (failure and stops_at_failure):
            break
    return Verdict(num_tests=len(tests), num_passed=num_passed, explanation=explanation)


async def _run(
    program: str, test: ProgramTest, limits: SandboxLimits, sandbox: Sandbox
) -> tuple[str, SandboxResult]:
    """Why the test failed ("" if it passed), and how the program ended."""
    result = await sandbox.run(program, stdin=test.input, limits=limits, statements=test.statements)
    failure = result.explanation
    if not failure and test.statements is not None:
        failure = "" if result.held else "it ended before its tests"
    elif not failure and _lines(result.stdout) != _lines(test.output):
        failure = "wrong output"
    return failure, result


def _lines(text: str) -> list[str]:
    """The lines without trailing white space; outer blank lines are dropped."""
    return [line.rstrip() for line in text.strip().splitlines()]
