"""Problems in repositories, from a row to the reward of an episode in a container."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from configs.load import load_config
from controller.start.preflight import check_plan, check_task
from controller.start.warm_start import imitate
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.conversation import ToolError
from rollout_pool.sandbox.containers import ContainerError
from rollout_pool.sandbox.remote_container import make_container
from rollout_pool.tasks.env_episodes import tools_shown
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.repository import RepositoryTools, read_repository
from tests.support.rollout import play
from trainer_pool.model.scratch import byte_tokenizer

ROW = {
    "problem": "add(2, 3) gives -1.",
    "files": {"sums.py": "def add(a, b):\n    return a - b\n"},
    "test_command": ["python3", "-c", "from sums import add; assert add(2, 3) == 5"],
}


@pytest.fixture
def experiment():
    return load_config([], "repository")


@pytest.fixture
def chat(experiment):
    return ChatFormat(byte_tokenizer(), chat_template=True, tool_parser=experiment.task.tool_parser)


def call(name: str, **arguments: object) -> list[int]:
    tokens = byte_tokenizer()
    text = json.dumps({"name": name, "arguments": arguments})
    return [*tokens.encode(f"<tool_call>{text}</tool_call>"), tokens.eos_token_id]


def said(text: str) -> list[int]:
    return [*byte_tokenizer().encode(text), byte_tokenizer().eos_token_id]


def of_row(tmp_path: Path, row: dict[str, object], *settings: str):
    """An experiment whose first prompt is `row`."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [row, ROW])))
    return load_config([f"task.path={path}", *settings], "repository")


def test_dry_run_of_the_experiment_finds_nothing_wrong(experiment, bubblewrap_folder):
    assert check_plan(experiment) == []
    assert list(bubblewrap_folder.iterdir()) == []


async def test_demonstration_is_an_episode_that_passes_token_for_token(
    experiment, chat, bubblewrap_folder
):
    task = build_task(experiment.task)
    specs = tools_shown(experiment.task, task)
    assert [spec.name for spec in specs] == ["shell", "read_file", "edit_file"]
    for prompt in (task.example(0), task.example(1), *task.eval_prompts()):
        messages = task.demonstration(prompt)
        answers = [chat.demonstration(m) for m in messages if m.role == "assistant"]
        episode = await play(experiment, chat, prompt, *answers)
        assert (episode.end, episode.error, episode.env_reward) == ("done", None, 1.0)
        assert dict(episode.env_parts) == {"tool_calls": 1, "tool_errors": 0}
        [branch] = episode.branches
        learnt = imitate(chat, messages, specs)
        assert learnt.tokens.tolist() == list(branch.tokens)
        begin = int(learnt.loss_mask.argmax())
        assert begin <= experiment.rollout.max_prompt_tokens
        assert len(learnt.tokens) - begin <= experiment.rollout.max_response_tokens
    assert list(bubblewrap_folder.iterdir()) == []


async def test_reward_is_the_fraction_of_commands_that_succeed(tmp_path, chat, bubblewrap_folder):
    row = ROW | {"test_command": [["true"], ["false"], ["sh", "-c", "exit 3"], ["no-such-word"]]}
    config = of_row(tmp_path, row)
    task = build_task(config.task)
    episode = await play(config, chat, task.example(0), said("done"))
    assert (episode.end, episode.env_reward) == ("done", 0.25)


async def test_tests_run_after_the_last_turn_too_and_over_what_the_model_made_of_them(
    tmp_path, chat, bubblewrap_folder
):
    row = ROW | {
        "test_command": ["sh", "test.sh"],
        "test_files": {"test.sh": "grep -q 'a + b' *.py"},
    }
    config = of_row(tmp_path, row, "task.max_turns=2", "rollout.max_response_tokens=640")
    task = build_task(config.task)
    cheat = call("shell", command="echo exit 0 >test.sh; ls")
    wrong = await play(config, chat, task.example(0), cheat, cheat)
    assert (wrong.end, wrong.env_reward) == ("max_turns", 0.0)
    edit = call("edit_file", path="sums.py", old="a - b", new="a + b")
    right = await play(config, chat, task.example(0), cheat, edit)
    assert (right.end, right.env_reward) == ("max_turns", 1.0)
    [listed] = [m.content for m in right.messages if m.role == "tool"]
    assert listed == "sums.py\ntest.sh\n"


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("shell", {"command": "cat sums.py; exit 4"}, "return a - b\n\n(exit code 4)"),
        ("shell", {"command": 5}, "error: command must be a text, not 5"),
        ("shell", {"line": "ls"}, "error: shell: missing a required argument: 'command'"),
        ("read_file", {"path": "sums.py"}, "def add(a, b):\n    return a - b\n"),
        ("read_file", {"path": "/etc/passwd"}, "path='/etc/passwd': is outside of the repository"),
        ("read_file", {"path": "a/../../b"}, "is outside of the repository; use a path in it"),
        ("read_file", {"path": "none.py"}, "none.py: No such file"),
        ("edit_file", {"path": "sums.py", "old": "c", "new": ""}, "sums.py: has 0 times the text"),
        ("edit_file", {"path": "sums.py", "old": "a", "new": ""}, "sums.py: has 3 times the text"),
        ("edit_file", {"path": "sums.py", "old": "a - b", "new": "a + 0"}, "edited"),
        ("write", {"path": "x"}, "there is no tool named 'write'; the tools are shell, read_file"),
    ],
)
async def test_model_reads_the_result_of_a_call_or_its_error(
    tmp_path, chat, name, arguments, result, bubblewrap_folder
):
    config = of_row(tmp_path, ROW, "rollout.max_response_tokens=640")
    task = build_task(config.task)
    called = call(name, **arguments)
    episode = await play(config, chat, task.example(0), called, said("done"))
    [message] = [m.content for m in episode.messages if m.role == "tool"]
    assert result in message and episode.env_reward == 0.0
    is_error = message.startswith("error")
    assert dict(episode.env_parts) == {"tool_calls": 1, "tool_errors": float(is_error)}


async def test_calls_of_an_answer_run_in_their_order_and_none_undoes_another(
    experiment, bubblewrap_folder
):
    container = make_container(experiment.task.container)
    await container.start()
    try:
        tools = RepositoryTools(container)
        made = tools.shell("sleep 0.1; printf 'a1 a2' >x")
        edits = (tools.edit_file("x", f"a{number}", f"b{number}") for number in (1, 2))
        results = await asyncio.gather(made, *edits, tools.read_file("x"))
    finally:
        await container.close()
    assert results == ["", "edited", "edited", "b1 b2"]


async def test_file_that_is_too_long_to_edit_is_not_one_without_the_text(
    experiment, bubblewrap_folder
):
    container = make_container(experiment.task.container)
    await container.start()
    try:
        await container.run("head -c 70000 /dev/zero >x; echo a >>x")
        with pytest.raises(ToolError, match="x: has more than 65536 bytes; change it by a command"):
            await RepositoryTools(container).edit_file("x", "a", "b")
    finally:
        await container.close()


async def test_image_without_tar_is_named_as_the_cause(tmp_path, chat, bubblewrap_folder):
    config = of_row(tmp_path, ROW | {"files": {"a": "", "a/b": ""}})  # tar cannot make both
    task = build_task(config.task)
    env = task.environment(task.example(0))
    try:
        with pytest.raises(
            ContainerError, match=r"(?s)into the container: .*; the image .* needs tar"
        ):
            await env.reset()
    finally:
        await env.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": ""}, r'line 7: "problem" must be a non-empty string'),
        ({"files": None}, r'line 7: "files" is missing; each line must be {"problem"'),
        ({"files": ["a"]}, r'line 7: "files" must be an object of texts by path, not \[\'a\'\]'),
        ({"files": {"a": 1}}, r'line 7: "files": "a" must be a string'),
        ({"files": {"/a": ""}}, r'line 7: "files"=\'/a\': is outside of the repository; use a pa'),
        ({"test_files": {"b/../../a": ""}}, r'"test_files"=\'b/../../a\': is outside of the rep'),
        (
            {"test_command": "python3 -m unittest"},
            r'"test_command"=\'python3 .*must be a list of w',
        ),
        ({"test_command": []}, r'"test_command"=\[\]: must be a list of words'),
        ({"test_command": None}, r'"test_command"=None: must be a list of words'),
        ({"test_command": [["true"], "false"]}, r"must be a list of words, or of such commands"),
        ({"solution": [{"path": "sums.py"}]}, r'line 7: "solution"\[0\]: "old" must be a string'),
        ({"solution": ["a"]}, r'"solution"\[0\] must be an object with path, old, new, not \'a\''),
        (
            {"solution": [{"path": "../x", "old": "a", "new": "b"}]},
            r'"solution"\[0\]=\'../x\': is outside of the repository',
        ),
        (
            {"solution": [{"path": "sums.py", "old": "a * b", "new": "b"}]},
            r"\"solution\"\[0\]: sums.py has 0 times the text 'a \* b', and must have one",
        ),
        ({"image": 5}, r'line 7: "image" must be a non-empty string'),
        ({"image": "--privileged"}, r"line 7: image='--privileged': must be the name of an image"),
        ({"image": "a b"}, r"line 7: image='a b': must be the name of an image, as python:3.12"),
    ],
)
def test_bad_row_is_named_with_its_field_and_the_fix(experiment, change, message):
    with pytest.raises(ValueError, match=message):
        read_repository(ROW | change, "task.path=x, line 7", config=experiment.task)


def test_row_without_an_image_is_refused_where_a_container_needs_one(experiment, monkeypatch):
    experiment = load_config(["task.container.kind=docker"], "repository")
    with pytest.raises(ValueError, match=r'line 1: "image" is missing, and .*kind=docker needs'):
        check_task(experiment.task)


def test_dry_run_without_docker_says_what_is_missing(tmp_path, monkeypatch):
    config = load_config(
        ["task.container.kind=docker", "task.container.image=python:3.12"], "repository"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"kind=docker: there is no program 'docker' on PATH"):
        check_plan(config)


def test_dry_run_where_bubblewrap_runs_nothing_says_what_is_missing(
    experiment, tmp_path, monkeypatch
):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ContainerError, match="it runs no command: no namespaces; an image needs"):
        check_plan(experiment)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.path=null", r"task.path=None: task.kind=repository needs a file of rows; name it"),
        ("task.chat_template=false", r"task.chat_template=false: .* calls tools; set true"),
        ("task.max_turns=1", r"task.max_turns=1: task.kind=repository has several; set more"),
        ("task.tools=[python]", r"task.tools=\['python'\]: .* has its own; leave them out"),
        ("task.turn_timeout_s=239", r"turn_timeout_s=239: a turn may run 4 commands, .* least 240"),
        ("task.path=/no/such/file.jsonl", r"task.path=/no/such/file.jsonl: there is no such file"),
    ],
)
def test_bad_setting_is_named(override, message):
    with pytest.raises(ValueError, match=message):
        build_task(load_config([override], "repository").task)
