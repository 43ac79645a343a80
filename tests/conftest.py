"""Fixtures that start real servers; shared by the tests of all packages."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import hypothesis
import pytest

from buffer.connect import Buffer, connect_buffer
from buffer.redis.server import EmbeddedServer
from configs.environment import FORK_SERVERS_VARIABLE
from configs.schema import BufferConfig
from controller.start import fork_servers
from processes.fork_server import Kind
from tests.support import forked

BufferFactory = Callable[..., Awaitable[Buffer]]

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "any_speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_speed")


SHARED = {
    "test_openai_client.py": "servers",
    "test_sglang_engine.py": "servers",
    "test_sglang_resume.py": "servers",
    "test_rollout_faults.py": "minutes",
    "test_two_hosts.py": "minutes",
}
"""Files whose tests run in one worker: two share SGLang servers, two would take both cores."""
APART = ("test_launch.py", "test_benchmarks.py", "test_try.py")
"""Files whose tests share nothing, and are dealt out one by one."""
LONGEST = (
    "test_rollout_faults.py",
    "test_two_hosts.py",
    "test_zero3_training.py",
    "test_verifiers.py",
    *APART,
    "test_model.py",
    "test_survivors.py",
    "test_synchronous_loop.py",
)
"""Files that come first, in this order: no worker is alone with one in the end."""


WORKER = "tests.support.worker"
"""The program of a worker (-n). Imports of its own would take fifteen seconds of a core."""
FORKED = re.compile(r"^[0-9]+ (?:\S*/)?(\S+)(?: ([a-z]+)$)?", re.MULTILINE)
"""A line of a fork server's log: process id, program, and the verb of `leash`."""


def pytest_configure(config: pytest.Config) -> None:
    """Programs of all tests, and the workers, are forked from servers that import once."""
    # A shell that runs pytest in the background ignores SIGINT, and what tests start would inherit
    # that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        engine, others = fork_servers.KINDS
        engines = Kind(
            programs=[*engine.programs, "tests.support.sglang_rope"], imports=engine.imports
        )
        launches = Kind(
            programs=[*others.programs, "tests.support.zero3.program", WORKER],
            imports=[
                *others.imports,
                "controller.report.summary",
                "controller.metrics.sinks",
            ],
        )
        servers = contextlib.ExitStack()
        servers.enter_context(fork_servers.fork_servers([engines, launches], is_eager=False))
        config.add_cleanup(servers.close)
        if FORK_SERVERS_VARIABLE in os.environ and config.getoption("tx", None):
            python = shlex.join([sys.executable, forked.__file__, WORKER])
            config.option.tx = [f"popen//python={python}" for _ in config.option.tx]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists the processes that tests started with all imports done: they cost the most."""
    if FORK_SERVERS_VARIABLE in os.environ:
        log = (Path(os.environ[FORK_SERVERS_VARIABLE]) / "log").read_text()
        forked = Counter(FORKED.findall(log))
        started = [f"{number} {' '.join(words)}".strip() for words, number in forked.most_common()]
        if started:
            terminalreporter.write_line(f"forked: {', '.join(started)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The garbage collector need not walk what is imported and collected, now or in any test: it
    stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries call what is left a leak


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then those with slow tests."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.name, len(places)), item.path not in slow))


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out launches, whole files, or files that share something, to the workers (-n)."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by number of tests, that is

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if Path(file).name in APART else SHARED.get(Path(file).name, file)

    return Scheduling(config, log)


@pytest.fixture
def advance_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances `time.monotonic`, and with it asyncio's own loop, in this thread only, by so many
    seconds: a limit of a minute takes no time. Request it before fixtures whose teardown waits: the
    clock is set back last."""
    real, ours, ahead = time.monotonic, threading.get_ident(), list[float]()
    monkeypatch.setattr(
        time, "monotonic", lambda: real() + (sum(ahead) if threading.get_ident() == ours else 0.0)
    )
    return ahead.append


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real server that all tests of a session or worker share; use a run of your own."""
    folder: Path = tmp_path_factory.mktemp("redis")
    server = EmbeddedServer.start(folder, BufferConfig(), "127.0.0.1", folder / "redis.log")
    yield server.url
    server.stop(timeout_s=10)


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model that takes pictures."""
    from tests.support.pictures import build_seeing_model  # loads torch, which few tests need

    folder = tmp_path_factory.mktemp("seeing")
    build_seeing_model(folder)
    return folder


@pytest.fixture(scope="session")
def processor(seeing_model: Path) -> Any:
    """The `PictureProcessor` of that model."""
    from tensors.pictures import PictureProcessor

    return PictureProcessor.of(str(seeing_model), trust_remote_code=False)


@pytest.fixture
def run_name() -> str:
    """A run that no other test uses."""
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
async def buffer_factory(redis_url: str, run_name: str) -> AsyncIterator[BufferFactory]:
    """Opens buffers of this test's run: `await buffer_factory(groups_per_step=4, max_staleness=1)`.

    Keywords are groups_per_step and the fields of BufferConfig. A second call in the same test is
    another client of the same run.
    """
    opened: list[Buffer] = []

    async def make(
        groups_per_step: int = 4, gradient_accumulation_steps: int = 1, **settings: object
    ) -> Buffer:
        config = BufferConfig(**settings)  # type: ignore[arg-type]
        buffer = await connect_buffer(redis_url, run_name, config)
        opened.append(buffer)
        steps = gradient_accumulation_steps
        await buffer.open(config, groups_per_step, gradient_accumulation_steps=steps)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()
