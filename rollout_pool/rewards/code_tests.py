"""Scores the model's programs by running the tests of their prompts in the sandbox."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.rollout_schema import SHARE_OF_TESTS, RewardConfig
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
    def share(self) -> float:
        return self.num_passed / self.num_tests


class CodeTests:
    """Used in a scoring process, which has no event loop."""

    def __init__(self, task: Task, config: RewardConfig, setting: str, timeout_s: float) -> None:
        """`timeout_s`: limit for one answer; its tests stop earlier.

        Raises ValueError for a task whose prompts have no tests or a Python that cannot be used,
        SandboxError if programs cannot be run safely on this machine."""
        self._task = code_task(task, setting)
        self._config = config
        self._sandbox = local_sandbox(config, setting)
        self._total_s = SHARE_OF_TESTS * timeout_s
        self._runner = asyncio.Runner()
        layers = self._runner.run(self._sandbox.protections(limits_of(config)))
        if (cost := cost_of_missing(layers)) is not None:
            log.warning("%s.kind=code_tests: %s", setting, cost)

    def score(self, prompt: Prompt, answer: str) -> float:
        """See score_answer."""
        return self._runner.run(
            score_answer(self._task, self._config, prompt, answer, self._sandbox, self._total_s)
        )


async def score_answer(
    task: CodeTask,
    config: RewardConfig,
    prompt: Prompt,
    answer: str,
    sandbox: Sandbox,
    total_s: float,
) -> float:
    """Share of the prompt's tests that the answer's program passes, or whether all pass; those that
    have not passed after `total_s` fail."""
    verdict = await judge(
        program_of(answer, languages_of(config)),
        task.tests(prompt),
        limits_of(config),
        sandbox,
        total_s=total_s,
        stops_at_failure=config.all_or_nothing,
    )
    if verdict.explanation:
        passed = f"{verdict.num_passed} of {verdict.num_tests} tests passed"
        log.info("prompt %d: %s; %s", prompt.index, passed, verdict.explanation)
    return float(verdict.share == 1.0) if config.all_or_nothing else verdict.share


def code_task(task: Task, setting: str) -> CodeTask:
    """Raises ValueError naming `setting`, the part of the reward, for a task without tests."""
    if isinstance(task, CodeTask):
        return task
    raise ValueError(
        f"{setting}.kind=code_tests: the prompts of {task.name} have no tests; use task.kind=code"
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
    """Of one test."""
    return SandboxLimits(
        cpu_time_s=config.cpu_time_s,
        wall_time_s=config.wall_time_s,
        memory_bytes=config.memory_bytes,
    )


def program_of(answer: str, languages: Collection[str] = PYTHON) -> str:
    """The last code block of these languages, else the last code block, else the whole text."""
    blocks = _BLOCK.findall(answer)
    named = [code for language, code in blocks if language.lower() in languages]
    every = named or [code for _, code in blocks] or [answer]
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
    left_s = total_s  # of the program's own time: a sandbox that is slow to answer costs no score
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
