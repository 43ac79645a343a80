"""Scores the model's programs by running the tests of their prompts in the sandbox."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.rollout_schema import SHARE_OF_TESTS, RewardConfig
from rollout_pool.sandbox.environment import (
    BARE,
    ProgramEnvironment,
    find_command,
    find_python,
)
from rollout_pool.sandbox.run import (
    SandboxLimits,
    cost_of_missing,
    protections,
    run_program,
)
from rollout_pool.tasks.programs import CodeTask, ProgramTest
from rollout_pool.tasks.task import Prompt, Task

log = logging.getLogger(__name__)

_USUAL = SandboxLimits()
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
        if not isinstance(task, CodeTask):
            raise ValueError(
                f"{setting}.kind=code_tests: the prompts of {task.name} have no tests; "
                "use task.kind=code"
            )
        self._task = task
        self._all_or_nothing = config.all_or_nothing
        self._languages = tuple(config.languages) or PYTHON
        self._limits = limits_of(config)
        self._environment = environment_of(config, setting)
        self._total_s = SHARE_OF_TESTS * timeout_s
        self._runner = asyncio.Runner()
        layers = self._runner.run(protections(self._environment, self._limits))
        if (cost := cost_of_missing(layers)) is not None:
            log.warning("%s.kind=code_tests: %s", setting, cost)

    def score(self, prompt: Prompt, answer: str) -> float:
        """Share of the prompt's tests that the answer's program passes, or whether all pass."""
        tests = self._task.tests(prompt)
        verdict = self._runner.run(
            judge(
                program_of(answer, self._languages),
                tests,
                self._limits,
                self._environment,
                total_s=self._total_s,
                stops_at_failure=self._all_or_nothing,
            )
        )
        if verdict.explanation:
            passed = f"{verdict.num_passed} of {verdict.num_tests} tests passed"
            log.info("prompt %d: %s; %s", prompt.index, passed, verdict.explanation)
        return float(verdict.share == 1.0) if self._all_or_nothing else verdict.share


def environment_of(config: RewardConfig, setting: str) -> ProgramEnvironment:
    """What runs the programs. Raises ValueError naming `setting`, the part of the reward, for a
    Python or a command that cannot be used."""
    if config.command:
        return find_command(config.command, f"{setting}.command")
    return find_python(config.python, f"{setting}.python") if config.python else BARE


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
    environment: ProgramEnvironment = BARE,
    total_s: float = math.inf,
    stops_at_failure: bool = False,
) -> Verdict:
    """Runs the tests one by one, since a scoring process is meant to use one core. `limits` are
    those of each. Tests that have not passed after `total_s` fail, with `stops_at_failure` also
    those after a failed one."""
    ends = time.monotonic() + total_s
    too_long = f"all tests together took longer than {total_s:g} s"
    num_passed = num_timeouts = 0
    explanation = ""
    for place, test in enumerate(tests, start=1):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            explanation = explanation or f"test {place}: {too_long}"
            break
        wall_time_s = min(limits.wall_time_s, left_s)
        within = dataclasses.replace(limits, wall_time_s=wall_time_s)
        failure, reason = await _run(program, test, within, environment)
        if reason == "wall_time" and wall_time_s < limits.wall_time_s:
            failure = too_long
        num_passed += not failure
        num_timeouts += reason in ("cpu_time", "wall_time")
        if failure and not explanation:
            explanation = f"test {place}: {failure}"
        if num_timeouts >= MAX_TIMEOUTS or (failure and stops_at_failure):
            break
    return Verdict(num_tests=len(tests), num_passed=num_passed, explanation=explanation)


async def _run(
    program: str, test: ProgramTest, limits: SandboxLimits, environment: ProgramEnvironment
) -> tuple[str, str | None]:
    """Why the test failed ("" if it passed), and the sandbox's reason if that ended it."""
    result = await run_program(
        program,
        stdin=test.input,
        limits=limits,
        statements=test.statements,
        environment=environment,
    )
    failure = result.explanation
    if not failure and test.statements is not None:
        failure = "" if result.held else "it ended before its tests"
    elif not failure and _lines(result.stdout) != _lines(test.output):
        failure = "wrong output"
    return failure, result.reason


def _lines(text: str) -> list[str]:
    """The lines without trailing white space; outer blank lines are dropped."""
    return [line.rstrip() for line in text.strip().splitlines()]
