"""Settings of environments of the verifiers library; the real ones are in tests/integration."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import psutil
import pytest

from configs.choices import TaskKind
from configs.load import ConfigError, load_config
from configs.rollout_schema import TaskConfig
from processes.child import has_ended
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.verifiers.process import EnvironmentDied, EnvironmentProcess, Program

INTERPRETER = """#!{python}
import json, os, socket, sys, time

connection = socket.socket(fileno=int(sys.argv[-1]))
requests = connection.makefile("rb")
setup = json.loads(requests.readline())
name = setup["environment"]["taskset"]["id"]


def say(message):
    connection.sendall(json.dumps(message).encode() + b"\\n")


if setup["rows"]:
    for n in range(3):
        opening = [{{"role": "user", "content": f"{{name}} {{n}}"}}]
        say({{"row": {{"task": {{}}, "opening": opening}}}})
    if name == "torn":
        connection.sendall(b'{{"row": {{"ta')
        print("out of memory", flush=True)
        os._exit(9)
    if name.startswith("tells "):
        connection.sendall(name.removeprefix("tells ").encode() + b"\\n")
    say({{"is_ready": True}})
elif name == "silent":
    time.sleep(600)
elif name == "broken":
    say({{"error": "no data"}})
else:
    say({{"is_ready": True}})
    requests.readline()
    requests.readline()
    print("a segmentation fault", flush=True)
    if name.startswith("writes "):
        connection.sendall(name.removeprefix("writes ").encode() + b"\\n")
        time.sleep(600)
    if name == "hangs":
        time.sleep(600)
    os._exit(7)
"""


def config_of(**changes):
    return TaskConfig(**{"kind": TaskKind.verifiers, "name": "sums", "eval_size": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instruction": " Think."}, r"task.instruction=' Think.': .* brings its own"),
        ({"tools": ["python"]}, r"task.tools=\['python'\]: .* brings its own"),
        ({"params": {"taskset": 3}}, r"task.params.taskset=3: must be the settings"),
        ({"params": {"taskset": {"id": "x"}}}, r"task.params.taskset=.* without its id"),
        ({"python": "no/python"}, r"task.python='no/python': there is no such .*install-verifiers"),
        ({"python": sys.executable}, r"task.python=.*: has no verifiers library of version 0.4 .*"),
        ({"python": sys.executable, "path": "no/folder"}, r"task.path='no/folder': there is no su"),
        ({"python": "/bin/false"}, r"task.name='sums': its process ended"),
    ],
)
def test_impossible_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build_task(config_of(**changes))


def test_error_in_a_mixture_names_the_setting_of_its_task():
    tasks = "task.tasks.sums={kind: verifiers, name: sums, python: no/python}"
    config = load_config(["task.kind=mixture", tasks])
    with pytest.raises(ValueError, match=r"^task.tasks.sums.python='.*/no/python': there is no"):
        build_task(config.task)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["task.kind=mixture", "task.tasks.a={kind: verifiers, name: a}", "task.tasks.b={}"],
            r"task.tasks.*.kind=.*cannot be mixed",
        ),
        (["task.python=env/bin/python"], r"task.python=.*task.kind=verifiers only"),
    ],
)
def test_settings_that_do_not_go_together_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


@pytest.fixture
def interpreter(tmp_path):
    """Instead of one with the library: what its program does, the name of the environment says."""
    path = tmp_path / "python"
    path.write_text(INTERPRETER.format(python=sys.executable))
    path.chmod(0o700)
    return str(path)


@pytest.fixture
async def process_of(interpreter):
    made = []

    def make(name):
        settings = json.dumps({"taskset": {"id": name}})
        program = Program(python=interpreter, folder=None, name=name, settings=settings)
        made.append(EnvironmentProcess(program))
        return made[-1]

    yield make
    async with asyncio.timeout(60):
        for process in made:
            await process.close()


def test_process_that_ends_in_the_middle_of_a_row_is_named_with_its_last_words(interpreter):
    with pytest.raises(ValueError, match=r"task.name='torn': its process ended .*:\nout of memory"):
        build_task(config_of(name="torn", python=interpreter))


async def test_start_without_an_answer_is_named_and_ended(process_of, monkeypatch):
    monkeypatch.setattr("rollout_pool.tasks.verifiers.process.START_TIMEOUT_S", 0.5)
    with pytest.raises(ValueError, match=r"task.name='silent': nothing came from it for 0.5 s"):
        await process_of("silent").start()


async def test_all_episodes_of_a_process_that_died_fail_with_one_error(process_of):
    process = process_of("dies")
    episodes = [process.run({}, "", "") for _ in range(2)]
    async with asyncio.timeout(60):
        first, second = await asyncio.gather(*episodes, return_exceptions=True)
    assert first is second and isinstance(first, EnvironmentDied)
    assert "exit code 7" in str(first) and str(first).endswith("a segmentation fault")


@pytest.mark.parametrize("words", ["5", "{}", '{"id": []}', "no JSON"])
async def test_process_that_writes_no_message_is_ended_and_takes_no_episode(process_of, words):
    process = process_of(f"writes {words}")
    episodes = [process.run({}, "", "") for _ in range(2)]
    async with asyncio.timeout(60):
        first, second = await asyncio.gather(*episodes, return_exceptions=True)
    assert first is second and isinstance(first, EnvironmentDied)


@pytest.mark.parametrize("words", ["5", '{"row": 5}', "no JSON"])
def test_process_that_tells_no_rows_is_named(interpreter, words):
    with pytest.raises(ValueError, match=r"its process wrote .* where its messages go"):
        build_task(config_of(name=f"tells {words}", python=interpreter))


async def test_process_that_hangs_is_killed_with_a_warning(process_of, monkeypatch, caplog):
    monkeypatch.setattr("rollout_pool.tasks.verifiers.process.CANCEL_TIMEOUT_S", 0.5)
    process = process_of("hangs")
    await process.start()
    cancelled, other = [asyncio.create_task(process.run({}, "", "")) for _ in range(2)]
    await asyncio.sleep(0)  # both are asked
    cancelled.cancel()
    with caplog.at_level(logging.WARNING), pytest.raises(EnvironmentDied):
        async with asyncio.timeout(60):
            await other
    assert "did not confirm within 0.5 s" in caplog.text


async def test_mixture_whose_start_failed_closes_the_starts_that_go_on(interpreter):
    tasks = [
        f"task.tasks.{name}={{kind: verifiers, name: {name}, python: {interpreter}, eval_size: 1}}"
        for name in ("silent", "broken")
    ]
    task = build_task(load_config(["task.kind=mixture", *tasks]).task)
    async with asyncio.timeout(60):
        with pytest.raises(ValueError, match=r"task.name='broken'.*: no data"):
            await task.start()
        pid = task.members["silent"]._process.pid
        await task.close()
    assert pid is not None and has_ended(pid, 0)


async def test_closing_ends_a_start_at_any_moment(process_of, interpreter):
    for turns in range(1, 6):  # of the event loop
        process = process_of("silent")
        starting = asyncio.create_task(process.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await process.close()
            with pytest.raises(EnvironmentDied, match="in its start"):
                await starting
        assert not [one for one in psutil.Process().children() if runs(one, interpreter)]


def runs(process, program):
    try:
        return program in process.cmdline()
    except psutil.NoSuchProcess:  # another one of the tests' that has just ended
        return False
