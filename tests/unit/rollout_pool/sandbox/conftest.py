"""Runs the programs of these tests, and checks that they leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import psutil
import pytest
import uvloop

from rollout_pool.sandbox.run import SandboxLimits, SandboxResult, run_program

QUICK = SandboxLimits(cpu_time_s=1, wall_time_s=120.0)
WITHOUT = [(), ("landlock",), ("namespaces",)]
"""Each of the two layers that keep files away must do alone."""


def pytest_asyncio_loop_factories(config, item):
    """Actors and services run uvloop, which starts processes in its own way; scoring processes do
    not."""
    factories = {"asyncio": asyncio.new_event_loop}
    if item.path.name == "test_reach.py":
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture(autouse=True)
def machine_is_still_well():
    """Nothing that a program started may be left."""
    others = {*psutil.Process().children()}  # servers that the session shares
    yield
    assert {*psutil.Process().children()} <= others


@pytest.fixture(params=WITHOUT, ids=lambda without: f"without {' '.join(without) or 'nothing'}")
def run(request):
    async def run(code: str, **options) -> SandboxResult:
        return await run_program(code, **{"limits": QUICK, "without": request.param, **options})

    return run


ATTEMPTS = """
errors = []
for code in {codes!r}:
    try:
        exec(code, {{}})
    except BaseException as error:
        errors.append(error)
        print(type(error).__name__)
    else:
        print("DONE", code)
raise errors[0]
"""


@pytest.fixture
def attempt(run):
    """Runs one program that tries each of several things; each must fail by an error."""

    async def attempt(codes: Sequence[str], **options) -> SandboxResult:
        result = await run(ATTEMPTS.format(codes=codes), **options)
        assert len(result.stdout.splitlines()) == len(codes) and "DONE" not in result.stdout
        assert result.exit_code == 1 and "Error" in result.stderr
        return result

    return attempt


@pytest.fixture
def quick() -> SandboxLimits:
    """The limits of `run`."""
    return QUICK
