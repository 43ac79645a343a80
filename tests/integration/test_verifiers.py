"""Environments of the real verifiers library: their process, and a run that trains on them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from configs.environment import LOG_DIR_VARIABLE
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream
from rollout_pool.tasks.verifiers.adapter import VerifiersTask
from rollout_pool.tasks.verifiers.process import EnvironmentDied
from tests.support.launches import RUN, Machine, end_all, finish, result_of, start
from tests.support.repository import ROOT
from tests.support.verifiers_tasks import FOLDER, config_of, run, serving, task_of

pytestmark = [pytest.mark.slow, pytest.mark.long]
NAMES = ("adding", "guessing", "noting")
CALL = {"name": "notes_read", "arguments": "{}"}
SHARED = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guessing() -> AsyncIterator[VerifiersTask]:
    """Its process, which takes seconds to start, goes from test to test."""
    async with task_of(name="guessing") as task:
        yield task


async def test_single_turn_environment_scores_answers_with_its_own_rewards() -> None:
    async with task_of() as task, serving("11") as model:
        assert [p.text for p in task.eval_prompts()] == ["Add.\n10+1=", "Add.\n11+1="]
        stream = TaskStream(task, 0, 1)
        prompts = [next(stream) for _ in range(10)]
        assert {prompt.text for prompt in prompts} == {f"Add.\n{i}+1=" for i in range(10)}
        right = task.eval_prompts()[0]
        assert await task.run_agent(model, right) == (
            1.5,
            {"exact": 1.0, "digits": 1.0, "length": 2.0},
        )
        roles = [(m.role, m.content) for m in task.demonstration(right)]
        assert roles == [("system", "Add."), ("user", "10+1="), ("assistant", "11")]
        [asked] = model.asked
        assert [m["role"] for m in asked["messages"]] == ["system", "user"]
        assert asked["model"] == "policy"
        # Many at once, in one process, which is not started again.
        before = task._process.pid
        model.says = ["1?"]
        outcomes = await asyncio.gather(*(run(task, model, i) for i in range(24)))
        assert {parts["digits"] for _, parts in outcomes} == {0.5}
        model.says = ["refuse"]
        with pytest.raises(RuntimeError, match=r"ProviderError: .*no such thing"):
            await run(task, model)
        assert task._process.pid == before


@SHARED
async def test_multi_turn_environment_answers_what_the_model_says(guessing: VerifiersTask) -> None:
    task = guessing
    async with serving("x", "y", "oak") as model:
        prompt = next(p for p in (task.example(i) for i in range(6)) if task.solution(p) == "oak")
        assert await task.run_agent(model, prompt) == (1.0, {"near": 1.0, "turns": 3.0})
        said = [[m["content"] for m in asked["messages"]] for asked in model.asked]
        assert said[-1] == [prompt.text, "x", "Another one?", "y", "Another one?"]


async def test_tool_environment_runs_the_tools_that_the_model_calls() -> None:
    wrong = {"name": "notes_write", "arguments": "{}"}
    async with task_of(name="noting") as task, serving(wrong, CALL, "blue") as model:
        assert await run(task, model) == (1.5, {"has_read": 1.0, "letters": 1.0})
        assert [tool["function"]["name"] for tool in model.asked[0]["tools"]] == ["notes_read"]
        results = [m["content"] for m in model.asked[-1]["messages"] if m["role"] == "tool"]
        assert results == ["error: there is no tool 'notes_write'", "blue"] or results[1] == [
            {"type": "text", "text": "blue"}
        ]
        tool_server = psutil.Process(task._process.pid).children()[0]
    psutil.wait_procs([tool_server], timeout=60)
    assert not tool_server.is_running()


@SHARED
async def test_process_that_dies_fails_its_episodes_with_its_last_lines_and_is_replaced(
    guessing: VerifiersTask,
) -> None:
    task = guessing
    async with serving("wait") as model:
        waiting = asyncio.create_task(run(task, model))
        async with asyncio.timeout(120):
            await model.waiting.wait()
        model.says = ["please crash"]
        dead = task._process.pid
        words = r"ended with exit code 7; the last lines of .*guessing.log:\nthe crash that was "
        for episode in (run(task, model), waiting):
            with pytest.raises(EnvironmentDied, match=words):
                await episode
        model.says = ["oak"]
        assert (await run(task, model))[1]["turns"] == 3.0
        assert task._process.pid != dead


async def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """One that waits for work, and one whose event loop is blocked."""
    program = (
        "import asyncio\n"
        "from tests.support.verifiers_tasks import run, serving, task_of\n"
        "async def main():\n"
        "    async with (\n"
        "        task_of(name='guessing') as idle, serving('oak') as model,\n"
        "        task_of(name='guessing') as hung, serving('please hang') as other,\n"
        "    ):\n"
        "        await asyncio.gather(idle.start(), hung.start())\n"
        "        print(idle._process.pid, hung._process.pid, flush=True)\n"
        "        await run(idle, model)\n"
        "        await hung.run_agent(other, hung.example(0))\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            LOG_DIR_VARIABLE: str(tmp_path),
        },
    )
    assert parent.stdout is not None
    async with asyncio.timeout(300):
        children = [psutil.Process(int(pid)) for pid in (await parent.stdout.readline()).split()]
        log = tmp_path / "environment-guessing.log"
        while "the hang that was asked for" not in log.read_text():
            await asyncio.sleep(0.05)
        parent.kill()
        await parent.wait()
    assert len(children) == 2
    await asyncio.to_thread(psutil.wait_procs, children, timeout=60)
    assert not any(child.is_running() for child in children)


async def test_cancelled_episode_is_cancelled_in_the_process_and_a_hanging_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path))
    async with task_of(name="guessing") as task, serving("wait") as model:

        async def cancelled() -> None:
            model.waiting.clear()
            episode = asyncio.create_task(run(task, model))
            async with asyncio.timeout(120):
                await model.waiting.wait()
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode

        await cancelled()
        before = task._process.pid
        model.says = ["oak"]
        assert (await run(task, model))[1]["turns"] == 3.0
        assert task._process.pid == before
        monkeypatch.setattr("rollout_pool.tasks.verifiers.process.CANCEL_TIMEOUT_S", 2.0)
        model.says = ["please hang"]
        hanging = asyncio.create_task(run(task, model))
        log = tmp_path / "environment-guessing.log"
        async with asyncio.timeout(120):
            while "the hang that was asked for" not in log.read_text():
                await asyncio.sleep(0.05)
        assert before is not None
        hung = psutil.Process(before)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await asyncio.to_thread(psutil.wait_procs, [hung], timeout=60)
        model.says = ["oak"]
        assert (await run(task, model))[1]["turns"] == 3.0
        assert task._process.pid != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "addding"}, r"task.name='addding': .*taskset 'addding' not found.*task\.path"),
        (
            {"params": {"taskset": {"cuont": 3}}},
            r"task.name='adding': .*taskset.cuont: Extra .*task\.params",
        ),
        ({"params": {"taskset": {"endless": True}}}, r"set task.params.select.limit"),
        (
            {"params": {"select": {"limit": 4}}, "eval_size": 4},
            r"task.eval_size=4: adding has only 4 tasks",
        ),
        (
            {"params": {"agent": {"harness": {"id": "bash"}}}},
            r"the harness 'bash' of 'agent' runs programs.*task.params.agent.runtime",
        ),
        (
            {"python": sys.executable},
            r"task.python=.*: has no verifiers library.*install-verifiers",
        ),
        ({"instruction": " Think."}, r"task.instruction=' Think.': .* brings its own"),
    ],
)
def test_impossible_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task(config_of(**changes))


@pytest.fixture
def launches_end(tmp_path: Path) -> Iterator[None]:
    yield
    end_all(tmp_path)


@pytest.mark.timeout(1500)
def test_launch_trains_on_a_single_turn_a_multi_turn_and_a_tool_environment(
    tmp_path: Path, launches_end: None
) -> None:
    machine = Machine.look()
    tasks = [
        f"task.tasks.{name}={{kind: verifiers, name: {name}, path: {FOLDER}, eval_size: 1}}"
        for name in NAMES
    ]
    process = start(
        tmp_path,
        RUN,
        "task.kind=mixture",
        *tasks,
        "task.eval_size=128",  # the default: each task has its own
        "trainer.num_steps=3",
        "trainer.groups_per_step=3",
        "trainer.warm_start.num_steps=150",
        "trainer.warm_start.echo_fraction=0.3",
        "buffer.max_staleness=0",  # so that each step has one group of each, however slow it is
        "rollout.max_prompt_tokens=64",
        "rollout.max_response_tokens=192",
        "rollout.log_rate=1",
        "task.max_turn_tokens=72",
    )
    output = finish(process, timeout_s=900)  # three environments import their library first
    assert process.returncode == 0, output[-6000:]
    result = result_of(output)
    assert result["steps"] == 3 and result["is_conserved"]
    trained = {name: one["groups_trained"] for name, one in result["by_task"].items()}
    assert trained == dict.fromkeys(NAMES, 3)
    turns: dict[str, set[int]] = {name: set() for name in NAMES}
    for record in (tmp_path / RUN / "rollouts" / "worker-0.jsonl").read_text().splitlines():
        group = json.loads(record)
        for one in group["trajectories"]:
            # What is learnt are the model's own tokens: not the user's nor the tool's.
            num_answers = len(one["version_spans"])
            assert len(one["loss_mask_runs"]) == 2 * num_answers
            turns[group["prompt"]["task"]].add(num_answers)
            if group["prompt"]["task"] == "noting":
                assert one["reward_parts"]["has_read"] == float(num_answers > 1)
    assert turns["adding"] == {1} and turns["guessing"] == {3} and max(turns["noting"]) > 1
    machine.assert_nothing_left(tmp_path)
