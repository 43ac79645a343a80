"""`leash sandbox` as a user starts it, and rewards whose programs it runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from configs.choices import RewardKind, TaskKind
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.code_tests import limits_of
from rollout_pool.rewards.remote_sandbox import check_remote_sandbox
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.rewards.types import Score
from rollout_pool.tasks.programs import CodeTask
from tests.support.launches import end_all, finish, serve_sandbox, wait_for_line

pytestmark = pytest.mark.slow

KEY, WRONG_KEY = "LEASH_TEST_SANDBOX_KEY", "LEASH_TEST_WRONG_KEY"
SHELL = "task.rewards.sh={kind: code_tests, command: [sh, '{file}'], languages: [bash, sh]}"
C = (
    "task.rewards.c={kind: code_tests, languages: [c], command: ['{file}'], "
    "compile: [gcc, -x, c, '{file}', -o, '{output}']}"
)
HAS_GCC = shutil.which("gcc") is not None
RIGHT = "print(2 * int(input()))"


@pytest.fixture(autouse=True, scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, "secret")
        patch.setenv(WRONG_KEY, "another")
        patch.setenv("PYTHONUNBUFFERED", "1")
        yield
    end_all(tmp_path_factory.mktemp("none"))


def start(port: str = "0") -> tuple[subprocess.Popen[str], str]:
    """The server and its address."""
    languages = [SHELL, *([C] if HAS_GCC else [])]
    process = serve_sandbox("--port", port, "--key-env", KEY, "task=code", *languages)
    line = wait_for_line(process, "sandbox at ").splitlines()[-1]
    return process, line.split()[2]


@pytest.fixture(scope="module")
def url(keys: None) -> Iterator[str]:
    process, url = start()
    yield url
    process.send_signal(signal.SIGTERM)
    assert "leash: stopped" in finish(process, timeout_s=60) and process.returncode == 130


@pytest.fixture
def task(tmp_path: Path) -> CodeTask:
    """Its prompts are "double" and "f"."""
    tests = [{"input": str(n), "output": str(2 * n)} for n in (1, 4)]
    lines = [
        {"prompt": "double", "tests": tests},
        {"prompt": "f", "tests": {"assert": "assert f(1) == 2\nassert f(4) == 8"}},
        {"prompt": "held out", "tests": tests},
    ]
    path = tmp_path / "exercises.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return CodeTask(TaskConfig(kind=TaskKind.code, path=str(path), eval_size=1))


def reward(url: str, **settings: object) -> RewardConfig:
    settings = {"url": url, "api_key_env": KEY, "wall_time_s": 8.0, **settings}
    return RewardConfig(kind=RewardKind.code_tests, **settings)  # type: ignore[arg-type]


Scored = Callable[..., "asyncio.Future[Score]"]


@asynccontextmanager
async def scoring(task: CodeTask, **rewards: RewardConfig) -> AsyncIterator[Scored]:
    """Scores programs; `prompt` is the text of theirs."""
    config = TaskConfig(kind=TaskKind.code, path="x", rewards=rewards)
    scorer = EpisodeScorer(config, task=task, pool=None)  # type: ignore[arg-type]

    async def score(code: str, prompt: str = "double", language: str = "python") -> Score:
        answer = Message(role="assistant", content=f"```{language}\n{code}\n```")
        [asked] = [one for one in map(task.example, range(2)) if one.text == prompt]
        return await scorer.score(
            asked, Episode(branches=[], messages=(answer,), end="done", num_turns=1)
        )

    try:
        yield score  # type: ignore[misc]
    finally:
        await scorer.close()


@pytest.mark.parametrize(
    ("code", "share", "whole"),
    [
        (RIGHT, 1.0, 1.0),
        ("print(2)", 0.5, 0.0),
        ("print(2 *", 0.0, 0.0),
        ("while True: pass", 0.0, 0.0),
        (f"import os\nos.fork()\n{RIGHT}", 0.0, 0.0),
        (f"import socket\nsocket.create_connection(('127.0.0.1', 1))\n{RIGHT}", 0.0, 0.0),
    ],
)
async def test_programs_of_python_are_scored(
    url: str, task: CodeTask, code: str, share: float, whole: float
) -> None:
    limits = {"wall_time_s": 1.0} if "while" in code else {}
    parts = {"share": reward(url, **limits), "all": reward(url, all_or_nothing=True, **limits)}
    if not limits:  # else an interpreter may not start in time
        for part in parts.values():
            await check_remote_sandbox("tests", part, limits_of(part))
    async with scoring(task, **parts) as score:
        scored = await score(code)
    assert (dict(scored.parts), dict(scored.failures)) == ({"share": share, "all": whole}, {})
    assert not scored.is_unscored


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("def f(x): return 2 * x", 1.0),
        ("def f(x): return 2", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("class E:\n    def __eq__(self, other): return True\ndef f(x): return E()", 0.0),
        ("import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 3", 0.0),
        ("import atexit, sys\nprint(open(sys.argv[0]).read())\ndef f(x): return 3", 0.0),
    ],
)
async def test_statements_are_out_of_the_programs_reach(
    url: str, task: CodeTask, code: str, value: float
) -> None:
    async with scoring(task, tests=reward(url)) as score:
        scored = await score(code, "f")
    assert (scored.reward, dict(scored.failures)) == (value, {})


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("read n; echo $((2 * n))", 1.0),
        ("while :; do :; done", 0.0),
        ("f() { f | f & }; f; echo 2", 0.0),
    ],
)
async def test_another_language_runs_by_its_command(
    url: str, task: CodeTask, code: str, value: float
) -> None:
    limits = {"wall_time_s": 1.0} if "while" in code else {}
    async with scoring(task, tests=reward(url, languages=["bash", "sh"], **limits)) as score:
        scored = await score(code, language="sh")
    assert (scored.reward, dict(scored.failures)) == (value, {})


@pytest.mark.skipif(not HAS_GCC, reason="no gcc on this machine")
async def test_compiled_language_starts_processes_only_to_compile(url: str, task: CodeTask) -> None:
    twice = '#include <stdio.h>\nint main() { int n; scanf("%d", &n); printf("%d", 2 * n); }'
    forks = twice.replace("int n;", "int n; if (fork() < 0) return 3;")
    async with scoring(task, tests=reward(url, languages=["c"])) as score:
        for code, value in (
            (twice, 1.0),
            (f"#include <unistd.h>\n{forks}", 0.0),
            (twice.replace("int n;", "int n"), 0.0),
        ):
            scored = await score(code, language="c")
            assert (scored.reward, dict(scored.failures)) == (value, {}), code


async def test_key_that_is_wrong_is_an_error_and_no_score(url: str, task: CodeTask) -> None:
    part = reward(url, api_key_env=WRONG_KEY)
    async with scoring(task, tests=part) as score:
        scored = await score(RIGHT)
    assert scored.is_unscored
    why = f"task.rewards.tests.url: {url}/run_code: HTTP 401: the key is missing or wrong"
    assert scored.failures["tests"].startswith(why)
    with pytest.raises(ValueError, match="HTTP 401: the key is missing or wrong"):
        await check_remote_sandbox("tests", part, limits_of(part))


async def test_settings_that_the_service_does_not_allow_are_refused(url: str) -> None:
    slow, go = reward(url, wall_time_s=60.0), reward(url, languages=["go"])
    with pytest.raises(ValueError, match=r"HTTP 422: run_timeout=60: at most 10 s are allowed"):
        await check_remote_sandbox("tests", slow, limits_of(slow))
    with pytest.raises(ValueError, match=r"language='go': there is none here but python, .*bash"):
        await check_remote_sandbox("tests", go, limits_of(go))


async def _running_program(server: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the program that the server runs, once it does."""
    for _ in range(1200):
        if len(found := psutil.Process(server.pid).children(recursive=True)) > 1:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError("no program has been started")


async def test_server_that_is_killed_is_retried_and_then_an_error(task: CodeTask) -> None:
    server, url = start()
    slow = f"import time\ntime.sleep(3)\n{RIGHT}"
    parts = {
        "patient": reward(url, max_retries=60),
        "brief": reward(url, max_retries=1),
    }
    async with scoring(task, patient=parts["patient"]) as score:
        patient = asyncio.ensure_future(score(slow))
        programs = await _running_program(server)
        os.kill(server.pid, signal.SIGKILL)
        finish(server, timeout_s=60)
        async with scoring(task, brief=parts["brief"]) as score_briefly:
            scored = await score_briefly(RIGHT)
        assert scored.is_unscored
        why = scored.failures["brief"]
        assert why.startswith(f"task.rewards.brief.url: {url}/run_code: ConnectError"), why
        assert "(2 attempts); start the sandbox there (make sandbox), or correct" in why
        psutil.wait_procs(programs, timeout=60)
        assert not any(process.is_running() for process in programs)
        server, again = await asyncio.to_thread(start, url.rpartition(":")[2])
        assert again == url
        scored = await asyncio.wait_for(patient, 120)
    assert (scored.reward, dict(scored.failures), scored.is_unscored) == (1.0, {}, False)
    server.send_signal(signal.SIGTERM)
    finish(server, timeout_s=60)


def test_address_that_others_reach_needs_a_key() -> None:
    process = serve_sandbox("--host", "0.0.0.0", "--port", "0", "task=code")
    output = finish(process, timeout_s=120)
    assert process.returncode == 2
    assert "--host='0.0.0.0': other machines could run programs here; name the" in output
