"""`make try` against a real HTTP server that speaks OpenAI's chat format."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.load import load_config
from controller.commands.try_task import FOLDER_PREFIX, _until_signal, served_spec
from controller.main import EXIT_BAD_INPUT, EXIT_FAILED, main
from controller.signals import Stopped
from controller.start.preflight import plan_here

FRUIT = '''
from rollout_pool import Env, Observation, Step

def price(fruit: str) -> int:
    """Tells what one fruit costs."""
    return {"apple": 3}[fruit]

class SecondTry(Env):
    def __init__(self, config, prompt, solution):
        self.question, self.solution, self.num_tries = prompt.text, solution, 0

    async def reset(self):
        return Observation.user(self.question, config_prompt)

    async def step(self, completion):
        self.num_tries += 1
        if completion.content.strip() == self.solution:
            return Step(reward=1.0 / self.num_tries)
        if self.num_tries == 2:
            return Step(reward=0.0)
        return Step(observation=Observation.user("No. Try again."))

config_prompt = "Be brief."

def brevity(prompt, episode, solution):
    return "short"
'''

KILLED = """
import sys, tempfile, time
from pathlib import Path
from processes.leftovers import list_path, temporary_folder, write_list

with temporary_folder(sys.argv[2]) as folder:
    sockets = tempfile.mkdtemp(dir=sys.argv[1])
    write_list(list_path(folder, "engine"), [sockets])
    print(folder, flush=True)
    time.sleep(600)
"""


class Server:
    """Answers with the messages in `replies`, one after the other."""

    def __init__(self) -> None:
        self.replies: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"

    async def _answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers["authorization"])
        if not self.replies:
            return JSONResponse({"error": {"message": "there is no such model"}}, 404)
        message = {"role": "assistant", "content": None, **self.replies.pop(0)}
        choice = {"index": 0, "message": message, "finish_reason": message.pop("end", "stop")}
        return JSONResponse(
            {
                "id": "c1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
            }
        )

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def calls(*arguments: str) -> dict[str, Any]:
    return {
        "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": "price", "arguments": text}}
            for n, text in enumerate(arguments)
        ]
    }


@pytest.fixture
def fruit(tmp_path: Path) -> list[str]:
    path = tmp_path / "fruit.py"
    path.write_text(FRUIT)
    questions = "[{question: 'What do 2 apples cost?', answer: 6}, {question: b, answer: 1}]"
    return [
        "task.kind=questions",
        f"task.params={{questions: {questions}}}",
        "task.eval_size=1",
        f"task.env={path}:SecondTry",
        f"task.tools=[{path}:price]",
        "task.chat_template=true",
        "task.max_turns=6",
    ]


def try_it(server: Server, *more: str) -> int:
    return main(["try", "--url", server.url, "--model", "m", *more])


def test_episode_with_a_tool_is_printed_with_its_reward(
    server: Server, fruit: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [calls('{"fruit": "apple"}'), {"content": "5"}, {"content": "6"}]
    assert try_it(server, "--episodes=1", *fruit) == 0
    assert capsys.readouterr().out.splitlines() == [
        "episode 1 of 1, prompt 0",
        "  system: Be brief.",
        "  user: What do 2 apples cost?",
        '  assistant: price({"fruit": "apple"})',
        "  tool: 3",
        "  assistant: 5",
        "  user: No. Try again.",
        "  assistant: 6",
        "  -> reward 0.5 (tool_calls 1, tool_errors 0, env 0.5)",
        "     ended by done, turns: 3",
        "",
        "mean reward of 1 episodes: 0.5",
    ]
    first, second, third = server.asked
    [tool] = first["tools"]
    assert tool["function"]["name"] == "price" and first["tools"] == third["tools"]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "", **calls('{"fruit": "apple"}')},
        {"role": "tool", "content": "3", "tool_call_id": "c0", "name": "price"},
    ]
    assert [message["content"] for message in third["messages"][-2:]] == ["5", "No. Try again."]
    assert "max_tokens" not in first and first["temperature"] == 0.5


def test_call_that_is_no_json_is_shown_to_the_model_beside_a_good_one(
    server: Server, fruit: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [calls('{"fruit": "apple"}', "{apple"), {"content": "6", "end": "length"}]
    more = ["task.max_turn_tokens=64", "task.template_args={enable_thinking: false}"]
    assert try_it(server, "--episodes=1", *fruit, "task.chat_template=true", *more) == 0
    shown = capsys.readouterr().out
    assert "price({apple" in shown and "reward 1 (tool_calls 1, tool_errors 1" in shown
    assert "ended by done, turns: 2, its last answer cut" in shown
    answer, result, error = server.asked[1]["messages"][2:]
    assert [call["id"] for call in answer["tool_calls"]] == ["c0"]
    assert (result["tool_call_id"], error["role"]) == ("c0", "user")
    assert error["content"].startswith("error: invalid tool call: price: Expecting property name")
    assert server.asked[0]["max_tokens"] == 64
    assert server.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_error_of_an_environment_is_shown_with_its_traceback(
    server: Server,
    fruit: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = FRUIT.replace("self.num_tries += 1", 'raise KeyError("plum")')
    (tmp_path / "broken.py").write_text(broken)
    server.replies = [{"content": "6"}]
    assert try_it(server, "--episodes=1", *fruit, f"task.env={tmp_path}/broken.py:SecondTry") == 0
    assert "ended by env_error: step: KeyError: 'plum', turns: 1" in capsys.readouterr().out
    assert f'File "{tmp_path}/broken.py", line ' in caplog.text


def test_reward_that_is_text_is_named_in_the_output(
    server: Server, fruit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = f"{tmp_path}/fruit.py:brevity"
    rewards = f"task.rewards={{brief: {{kind: function, function: '{function}'}}}}"
    server.replies = [{"content": "6"}]
    assert try_it(server, "--episodes=1", *fruit, rewards) == 0
    shown = capsys.readouterr().out
    assert "-> reward 0 (" in shown
    assert f"no brief: task.rewards.brief.function='{function}': returned 'short', which" in shown


def test_prompts_are_those_of_a_launch_and_the_key_is_of_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server.replies = [{"content": "Tokyo"}] * 3
    assert try_it(server, "task=capitals", "--key-env=MY_KEY", "--episodes=3") == 0
    shown = capsys.readouterr().out
    assert shown.count("-> reward 1 (task 1)") == 1 and "mean reward of 3 episodes: 0.3" in shown
    asked = {one["messages"][0]["content"] for one in server.asked}
    assert asked == {f"The capital of {country} is:" for country in ("France", "Japan", "Peru")}
    assert server.keys == ["Bearer secret"] * 3 and "secret" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task=capitals", "--episodes=0"], "--episodes=0: must be at least 1"),
        (["task=capitals", "--key-env=NO_SUCH_KEY_HERE"], "--key-env='NO_SUCH_KEY_HERE': there is"),
        (["task=capitals", "task.agent=asyncio:sleep"], "task.agent='asyncio:sleep': an agent"),
        (["task=verifiers", "task.eval_size=1"], "task.kind=verifiers: an agent calls the model"),
        (
            ["task=capitals", "task.rewards={r: {kind: function, function: 'F:rank', of: group}}"],
            "task.rewards.r.of=group: scores all episodes of a prompt together, and here each is",
        ),
        (
            [
                "task.kind=mixture",
                "task.tasks={a: {name: chain_sum, rewards: "
                "{r: {kind: function, function: 'F:rank', of: group}}}}",
            ],
            "task.tasks.a.rewards.r.of=group: scores all episodes of a prompt together",
        ),
        (["--experiment=distill-quickstart"], "task.rewards.teacher.kind=teacher: gives no score"),
    ],
)
def test_what_cannot_be_tried_is_bad_input(
    server: Server,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    row = {"opening": [{"role": "user", "content": "1 + 1 ="}], "task": {"answer": "2"}}
    monkeypatch.setattr("rollout_pool.tasks.verifiers.adapter.load_rows", lambda _: [row, row])
    (tmp_path / "mine.py").write_text("def rank(prompt, episodes): ...")
    arguments = [one.replace("F:", f"{tmp_path}/mine.py:") for one in arguments]
    assert try_it(server, *arguments) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err and not server.asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url=http://host/v1"], "--url='http://host/v1': name the model there, --model=NAME"),
        (["--key-env=PATH"], "--key-env='PATH': is for a server, give --url"),
        (["--model=/no/such/folder"], "model.path='/no/such/folder': there is no tokenizer"),
        (["--model=tests"], "tests': neither a folder with a Hugging Face model"),
    ],
)
def test_model_that_is_only_half_named_is_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try", "task=capitals", *arguments]) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


def test_server_takes_the_longest_trajectory_of_a_launch(tmp_path: Path) -> None:
    """YaRN reaches further than SGLang would take by itself."""
    plan = plan_here(load_config(["rollout.max_prompt_tokens=100"]))
    assert served_spec(plan, tmp_path).context_length == 100 + 8


async def test_second_signal_does_not_hurry_the_end_of_what_was_started() -> None:
    began, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.to_thread(ended.append, "all")

    trying = asyncio.create_task(_until_signal(work()))
    await began.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        await trying
    assert ended == ["all"]


def test_server_that_refuses_or_is_not_there_is_named(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert try_it(server, "task=capitals") == EXIT_FAILED
    shown = capsys.readouterr().err
    assert f"{server.url}/: no answer from 'm'" in shown and "there is no such model" in shown
    assert main(["try", "--url", "http://127.0.0.1:9/v1", "--model=m", "task=capitals"]) == 1
    assert (
        "http://127.0.0.1:9/v1/: no answer from 'm': Connection error." in capsys.readouterr().err
    )


def test_folder_of_a_killed_process_is_removed_by_the_next_one(
    server: Server, fruit: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    sockets = tmp_path / "sockets"
    for path in (tmp_path / "tmp", sockets):
        path.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(sockets), FOLDER_PREFIX],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            folder = Path(process.stdout.readline().strip())
            assert try_it(server, "--episodes=1", *fruit) == EXIT_FAILED  # it has no answer
            assert list((tmp_path / "tmp").iterdir()) == [folder] and list(sockets.iterdir())
        finally:
            process.kill()
    assert try_it(server, "--episodes=1", *fruit) == EXIT_FAILED
    assert list((tmp_path / "tmp").iterdir()) == list(sockets.iterdir()) == []
