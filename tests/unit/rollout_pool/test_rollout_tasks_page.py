"""What docs/tasks.md shows is run as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from buffer.types import SamplingParams, VersionSpan
from configs.load import load_config
from controller.preflight import check_task
from rollout_pool.envs.chat import ChatFormat
from rollout_pool.envs.function_tool import function_tool
from rollout_pool.envs.runner import EpisodeAsk, EpisodeRunner
from rollout_pool.tasks.dotted import load_callable
from rollout_pool.tasks.environments import environment_factory
from rollout_pool.tasks.task import TaskStream, build_task
from trainer_pool.scratch import byte_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def block_with(name: str) -> str:
    [block] = [block for block in BLOCKS if name in block]
    return block


def settings_with(name: str) -> list[str]:
    """The settings of the one command on the page that names `name`."""
    commands = re.findall(r'^    make launch ARGS="(.*?)"$', PAGE, re.MULTILINE)
    [command] = [command for command in commands if name in command]
    return shlex.split(command)


class Says:
    """A model that gives these answers one after the other."""

    def __init__(self, tokenizer, *answers):
        self._tokenizer = tokenizer
        self._answers = list(answers)

    async def complete(self, sample):
        tokens = [*self._tokenizer.encode(self._answers.pop(0)), self._tokenizer.eos_token_id]
        sample.output_ids = tokens
        sample.logprobs = [-1.0] * len(tokens)
        sample.version_spans = [VersionSpan(version=3, start=0, end=len(tokens))]
        sample.finish_reason = "stop"

    def interrupt(self, sample):
        raise AssertionError("nobody interrupts")


@pytest.fixture
def second_chance(tmp_path):
    path = tmp_path / "second_chance.py"
    path.write_text(block_with("class SecondChance"))
    overrides = [
        text.replace("second_chance.py", str(path)) for text in settings_with("SecondChance")
    ]
    return load_config(overrides)


def test_the_example_is_about_thirty_lines_long():
    lines = [line for line in block_with("class SecondChance").splitlines() if line.strip()]
    assert len(lines) <= 30


async def test_the_environment_of_the_page_plays_whole_episodes(second_chance):
    task = build_task(second_chance.task)
    prompt = next(TaskStream(task, 0, 1))
    right = task.solution(prompt)
    tokenizer = byte_tokenizer()
    config = second_chance.task
    chat = ChatFormat(tokenizer, chat_template=config.chat_template, tool_parser=config.tool_parser)
    make_environment = environment_factory(config, task)
    for answers, reward, tries in (
        ([right], 1.0, 1),
        (["x", f" {right}"], 0.5, 2),
        (["x", "y"], 0.0, 2),
    ):
        runner = EpisodeRunner(Says(tokenizer, *answers), chat, config, second_chance.rollout)
        ask = EpisodeAsk(session=f"s{tries}{reward}", sampling=SamplingParams())
        episode = await runner.run(make_environment(prompt), ask)
        assert episode.end == "done" and episode.error is None
        assert (episode.env_reward, episode.env_parts) == (reward, {"tries": tries})
        [branch] = episode.branches
        questions = [prompt.text, f" No. {prompt.text}"]
        said = "".join(q + a for q, a in zip(questions, answers, strict=False))
        assert tokenizer.decode(branch.tokens, skip_special_tokens=True) == said
        assert sum(branch.loss_mask) == len("".join(answers)) + len(answers)
        part = config.rewards["brevity"]
        score = load_callable(part.function, "task.rewards.brevity.function")
        assert score(prompt, episode) == pytest.approx(1 / (1 + len(answers[-1])))


def test_what_the_example_is_chosen_with_is_accepted(second_chance):
    check_task(second_chance.task)
    assert second_chance.task.rewards["brevity"].weight == 0.1


async def test_the_agent_of_the_page_is_accepted_and_returns_a_reward(tmp_path):
    path = tmp_path / "my_agent.py"
    path.write_text(block_with("async def agent"))
    overrides = [text.replace("my_agent.py", str(path)) for text in settings_with("my_agent.py")]
    check_task(load_config(overrides).task)


def test_the_tool_of_the_page_is_one(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(block_with("async def search"))
    spec = function_tool(load_callable(f"{path}:search", "task.tools"), "task.tools").spec
    assert spec.parameters["required"] == ["words"]


def test_the_lines_of_the_page_are_read(tmp_path):
    lines = re.findall(r'^    (\{"(?:question|problem|prompt)".*)$', PAGE, re.MULTILINE)
    found = [line for line in lines if '"messages"' not in line]  # that one is for a service
    kinds = {"question": "gsm8k", "problem": "math", "prompt": "code"}
    assert len(found) == 4
    for line in found:
        [key] = [key for key in kinds if line.startswith(f'{{"{key}"')]
        path = tmp_path / f"{key}.jsonl"
        path.write_text(line)
        overrides = [f"task={kinds[key]}", f"task.path={path}", f"task.eval_path={path}"]
        task = build_task(load_config(overrides).task)
        assert len(task.eval_prompts()) == 1
