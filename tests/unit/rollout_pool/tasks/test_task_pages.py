"""Runs the examples of the pages about data, environments and rewards as they are."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from configs.load import load_config
from controller.start.preflight import check_task
from controller.start.warm_start import imitate
from host.user_code import load_callable
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.tools import function_tool
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.tasks.env_episodes import load_tools
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream, demonstrations
from tests.support.repository import ROOT
from tests.support.rollout import play
from trainer_pool.model.scratch import byte_tokenizer

PAGES = ("data", "environments", "rewards")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def block_with(name: str) -> str:
    [block] = [block for block in BLOCKS if name in block]
    return block


def settings_with(name: str) -> list[str]:
    """The settings of the one command on the page that names `name`."""
    commands = re.findall(r'^    make launch ARGS="(.*?)"$', PAGE, re.MULTILINE)
    [command] = [command for command in commands if name in command]
    return shlex.split(command)


async def played(config, prompt, *answers, tokenizer=None):
    """One episode in which the model says `answers`."""
    tokenizer = tokenizer or byte_tokenizer()
    task = config.task
    chat = ChatFormat(tokenizer, chat_template=task.chat_template, tool_parser=task.tool_parser)
    tokens = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
    return await play(config, chat, prompt, *tokens)


async def play_first(overrides, *answers, tokenizer=None):
    """One episode of the first prompt that a launch with these settings would ask."""
    config = load_config(overrides)
    task = build_task(config.task)
    prompt = next(TaskStream(task, 0, 1))
    return task, prompt, await played(config, prompt, *answers, tokenizer=tokenizer)


@pytest.fixture
def second_chance(tmp_path):
    path = tmp_path / "second_chance.py"
    path.write_text(block_with("class SecondChance"))
    overrides = [
        text.replace("second_chance.py", str(path)) for text in settings_with("SecondChance")
    ]
    return load_config(overrides)


async def test_roles_of_the_page_have_rewards_and_trajectories_of_their_own(tmp_path):
    path = tmp_path / "two_roles.py"
    path.write_text(block_with("class SolveAndCheck"))
    settings = settings_with("SolveAndCheck")
    config = load_config([text.replace("two_roles.py", str(path)) for text in settings])
    check_task(config.task)
    task = build_task(config.task)
    prompt = next(TaskStream(task, 0, 1))
    episode = await played(config, prompt, "?", task.solution(prompt))
    assert [one.role for one in episode.branches] == ["solver", "critic"]
    assert (episode.end, episode.rewards) == ("done", {"solver": 0.0, "critic": 1.0})


@pytest.mark.parametrize("example", ["SecondChance", "SecondTry"])
def test_example_of_several_turns_has_at_most_25_lines(example):
    lines = [line for line in block_with(f"class {example}").splitlines() if line.strip()]
    assert len(lines) <= 25


async def test_environment_of_the_page_plays_whole_episodes(second_chance):
    task = build_task(second_chance.task)
    prompt = next(TaskStream(task, 0, 1))
    right = task.solution(prompt)
    for answers, reward, tries in (
        ([right], 1.0, 1),
        (["x", f" {right}"], 0.5, 2),
        (["x", "y"], 0.0, 2),
    ):
        episode = await played(second_chance, prompt, *answers)
        assert episode.end == "done" and episode.error is None
        assert (episode.env_reward, episode.env_parts) == (reward, {"tries": tries})
        [branch] = episode.branches
        questions = [prompt.text, f" No. {prompt.text}"]
        said = "".join(q + a for q, a in zip(questions, answers, strict=False))
        assert byte_tokenizer().decode(branch.tokens, skip_special_tokens=True) == said
        assert sum(branch.loss_mask) == len("".join(answers)) + len(answers)
        part = second_chance.task.rewards["brevity"]
        score = load_callable(part.function, "task.rewards.brevity.function")
        assert score(prompt, episode) == pytest.approx(1 / (1 + len(answers[-1])))


def test_example_settings_are_accepted(second_chance):
    check_task(second_chance.task)
    assert second_chance.task.rewards["brevity"].weight == 0.1


async def test_agent_of_the_page_is_accepted_and_returns_a_reward(tmp_path):
    path = tmp_path / "my_agent.py"
    path.write_text(block_with("async def agent"))
    overrides = [text.replace("my_agent.py", str(path)) for text in settings_with("my_agent.py")]
    check_task(load_config(overrides).task)


def test_tool_of_the_page_is_one(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(block_with("async def search"))
    spec = function_tool(load_callable(f"{path}:search", "task.tools"), "task.tools").spec
    assert spec.parameters["required"] == ["words"]


def test_lines_of_the_page_are_read(tmp_path):
    lines = re.findall(r'^    (\{"(?:question|problem|prompt)".*)$', PAGE, re.MULTILINE)
    found = [line for line in lines if '"messages"' not in line]  # that one is for a service
    kinds = {"question": "gsm8k", "problem": "math", "prompt": "code"}
    plain = [
        line for line in found if "Santiago" in line or "What do " in line
    ]  # other tests read them
    assert (len(found), len(plain)) == (7, 3)
    for line in [line for line in found if line not in plain]:
        [key] = [key for key in kinds if line.startswith(f'{{"{key}"')]
        path = tmp_path / f"{key}.jsonl"
        path.write_text(line)
        overrides = [f"task={kinds[key]}", f"task.path={path}", f"task.eval_path={path}"]
        task = build_task(load_config(overrides).task)
        assert len(task.eval_prompts()) == 1


# A data set with two columns ----------------------------------------------------------------------


@pytest.fixture
def trivia(tmp_path):
    """The settings of the page, with a folder in place of the data set on the hub."""
    rows = [{"prompt": f"Who wrote book {n}?", "label": f"Author{n}"} for n in range(4)]
    (tmp_path / "trivia").mkdir()
    for split in ("train", "test"):
        text = "\n".join(map(json.dumps, rows[:3] if split == "train" else rows[3:]))
        (tmp_path / "trivia" / f"{split}.jsonl").write_text(text)
    (tmp_path / "trivia.py").write_text(block_with("def score(prompt, episode, solution)"))
    return [
        one.replace("org/trivia", str(tmp_path / "trivia")).replace(
            "trivia.py", str(tmp_path / "trivia.py")
        )
        for one in settings_with("trivia.py")
    ]


async def test_data_set_of_the_page_is_a_task_in_ten_lines_with_its_reward(trivia, tmp_path):
    lines = block_with("def score(prompt, episode, solution)").splitlines()
    assert len(lines) + len(trivia) <= 10
    config = load_config(trivia)
    check_task(config.task)
    task, prompt, episode = await play_first(trivia, "I say Author1")
    assert prompt.text in {f"Who wrote book {n}?" for n in range(3)}
    assert [one.text for one in task.eval_prompts()] == ["Who wrote book 3?"]
    [asked] = [one for one in map(task.example, range(3)) if one.text == "Who wrote book 1?"]
    pool = RewardPool(config.task, num_processes=1, timeout_s=30, log_path=tmp_path / "log")
    await pool.start()
    scored = await EpisodeScorer(config.task, task=task, pool=pool).score(asked, episode)
    await pool.close()
    assert scored.parts == {"right": pytest.approx(1 / 3)} and not scored.failures


# A list of questions ------------------------------------------------------------------------------


async def test_list_of_questions_on_the_page_is_the_file_and_is_played(tmp_path):
    listed, mixed, *_ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    shipped = ROOT / "configs" / "task"
    assert listed == (shipped / "capitals.yaml").read_text() and len(listed.splitlines()) <= 10
    assert mixed == (shipped / "mixed.yaml").read_text()
    task, prompt, episode = await play_first(["task=capitals"], "Let me think.\n  paRis. ")
    right = task.solution(prompt)
    assert prompt.text == f"The capital of {COUNTRIES[right]} is:"
    assert task.score(prompt, f"Hm.\n{right.upper()}.") == 1.0
    assert task.score(prompt, f"{right}\nor not") == task.score(prompt, "") == 0.0
    assert episode.answer.endswith("paRis. ") and episode.end == "done"
    assert [one.text for one in task.eval_prompts()] == ["The capital of Kenya is:"]
    [line] = re.findall(r'^    (\{"question".*Santiago.*)$', PAGE, re.MULTILINE)
    path = tmp_path / "capitals.jsonl"
    path.write_text(f"{line}\n" * 60)
    overrides = [
        one.replace("capitals.jsonl", str(path)) for one in settings_with("capitals.jsonl")
    ]
    held_out = build_task(load_config(overrides).task).eval_prompts()
    assert {one.text for one in held_out} == {"The capital of Chile is:"} and len(held_out) == 50


COUNTRIES = {"Paris": "France", "Tokyo": "Japan", "Lima": "Peru"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.params={questions: null}"], "or give a JSONL file"),
        (["task.params={questions: 3}"], "must be a list of objects"),
        (
            ["task.params={questions: [{question: x}]}"],
            "task.params.answer='answer': task.params.questions[0] has no such column, only q",
        ),
        (["task.params={questions: [{question: x, answer: }]}"], 'questions[0]: "answer" must be'),
        (["task.eval_size=4"], "task.params.questions has only 4"),
        (["task.params={more: 1}"], "task.params.more: questions has no such setting"),
    ],
)
def test_invalid_list_of_questions_is_refused(overrides, words):
    with pytest.raises(ValueError) as refused:
        build_task(load_config(["task=capitals", *overrides]).task)
    assert words in str(refused.value)


# A task with a tool -------------------------------------------------------------------------------


@pytest.fixture
def apples(tmp_path):
    path = tmp_path / "apples.py"
    path.write_text(block_with("class Apples"))
    return [one.replace("apples.py", str(path)) for one in settings_with("apples.py")]


@pytest.fixture
def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    return tokenizer


TEMPLATE = """
{%- for tool in tools or [] -%}{{ (tool | tojson) + '\n' }}{%- endfor -%}
{%- for message in messages -%}
{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor -%}
{{ '\n' }}
{%- endfor -%}
{{ 'assistant: ' if add_generation_prompt }}
"""


async def test_task_of_the_page_with_its_tool_is_played(apples, chat_tokenizer):
    check_task(load_config(apples).task)
    call = '<tool_call>{"name": "look_up", "arguments": {"name": "Anna"}}</tool_call>'
    task, prompt, episode = await play_first(apples, call, "3", tokenizer=chat_tokenizer)
    assert prompt.text == "how many apples has Anna?" and task.name == "apples"
    assert (episode.end, episode.num_turns, episode.answer) == ("done", 2, "3"), episode.error
    assert episode.env_parts["tool_calls"] == 1 and episode.env_parts["tool_errors"] == 0
    assert [m.content for m in episode.messages if m.role == "tool"] == ["3"]
    assert task.score(prompt, episode.answer) == 1.0 and task.score(prompt, "4") == 0.0
    assert [one.text[-5:-1] for one in task.eval_prompts()] == [" Eva", "Finn"]
    stream = TaskStream(task, 0, 1)
    assert {task.who(next(stream)) for _ in range(12)} == {"Anna", "Ben", "Cleo", "Dan"}


@pytest.fixture
def fruit(tmp_path):
    (tmp_path / "fruit.py").write_text(block_with("class SecondTry"))
    lines = re.findall(r'^    (\{"question": "What do .*)$', PAGE, re.MULTILINE)
    (tmp_path / "fruit.jsonl").write_text("\n".join(lines))
    settings = settings_with("fruit.py")
    return [one.replace("fruit.", f"{tmp_path}/fruit.") for one in settings]


@pytest.mark.parametrize(("tries", "reward"), [(["8"], 1.0), (["7", "8"], 0.5), (["7", "9"], 0.0)])
async def test_environment_with_a_tool_of_the_page_is_played(fruit, chat_tokenizer, tries, reward):
    check_task(load_config(fruit).task)
    call = '<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>'
    held_out = build_task(load_config(fruit).task).eval_prompts()
    assert [one.text for one in held_out] == ["What do 3 pears cost?"]
    _, prompt, episode = await play_first(fruit, call, *tries, tokenizer=chat_tokenizer)
    assert (episode.end, episode.env_reward) == ("done", reward), episode.error
    assert dict(episode.env_parts) == {"tool_calls": 1, "tool_errors": 0}
    assert [m.content for m in episode.messages if m.role == "tool"] == ["5"]
    said = [m.content for m in episode.messages if m.role == "user"]
    assert said == [prompt.text, "No. Try again."][: len(tries)]


def test_demonstration_of_the_page_teaches_the_call_and_the_answer(apples, chat_tokenizer):
    config = load_config(apples).task
    task = build_task(config)
    chat = ChatFormat(chat_tokenizer, chat_template=True, tool_parser=config.tool_parser)
    [(_, messages)] = demonstrations(task, 1)
    learnt = imitate(chat, messages, [tool.spec for tool in load_tools(config.tools)])
    pairs = zip(learnt.tokens, learnt.loss_mask, strict=True)
    said = chat_tokenizer.decode([int(token) for token, mask in pairs if mask])
    assert '"look_up"' in said and "Anna" in said and "how many" not in said
    [call] = chat.parse(chat_tokenizer.encode(said), "stop").tool_calls
    assert (call.name, dict(call.arguments)) == ("look_up", {"name": "Anna"})
