"""Demonstrations as tokens, and what is looked at before a run is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.types import SamplingParams, VersionSpan
from configs.choices import RewardKind, TaskKind, ToolParser
from configs.load import CONFIG_DIR, load_config
from configs.rollout_schema import RewardConfig, TaskConfig
from configs.schema import ScratchModelConfig
from controller.start.preflight import check_task
from controller.start.warm_start import imitate, supervised_examples
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.conversation import Message, ToolSpec
from rollout_pool.episodes.episode import EpisodeRequest
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.episodes.tokenizer import load_tokenizer
from rollout_pool.sampling.sample import Clock, Sample
from rollout_pool.tasks.env_episodes import environment_factory
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream
from trainer_pool.model.scratch import build_scratch_model, byte_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build_scratch_model(ScratchModelConfig(), folder, seed=0)
    return str(folder)


def chat_tokenizer() -> Any:
    """With a template, whose special token is one token, as in real models."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.split_special_tokens = False
    return tokenizer


def said(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in turns]


def test_quickstarts_examples_are_a_word_and_its_answer_byte_for_byte(model: str) -> None:
    config = load_config(["trainer.warm_start.num_steps=2", "trainer.warm_start.echo_fraction=0"])
    examples = supervised_examples(config, model)
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    stream = TaskStream(build_task(config.task), 0, 1)
    assert len(examples) == 2 * config.trainer.warm_start.batch_size
    for example in examples:
        word = next(stream).text.removesuffix(" =")
        question = [*tokenizer.encode(f"{word} =")]
        answer = [*tokenizer.encode(word[::-1]), tokenizer.eos_token_id]
        assert example.tokens.dtype == np.int32 and example.loss_mask.dtype == np.uint8
        assert example.tokens.tolist() == question + answer
        assert example.loss_mask.tolist() == [0] * len(question) + [1] * len(answer)


def test_echo_fraction_of_the_examples_repeat_the_question(model: str) -> None:
    settings = ["trainer.warm_start.num_steps=2", "trainer.warm_start.echo_fraction=0.25"]
    config = load_config(settings)
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    stream = TaskStream(build_task(config.task), 0, 1)
    echoes = 0
    for example in supervised_examples(config, model):
        text = next(stream).text
        answer = tokenizer.decode(example.tokens.tolist()).removeprefix(text)
        assert answer in (f"{text}<|eos|>", f"{text.removesuffix(' =')[::-1]}<|eos|>")
        echoes += answer.startswith(text)
    assert 16 < echoes < 48  # 128 draws


class Right:
    """A model that answers as a demonstration does."""

    def __init__(self, chat: ChatFormat, messages: tuple[Message, ...]) -> None:
        self._answers = [chat.demonstration(m) for m in messages if m.role == "assistant"]

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        sample.output_ids = self._answers.pop(0)
        sample.logprobs = [-1.0] * len(sample.output_ids)
        sample.version_spans = [VersionSpan(version=0, start=0, end=len(sample.output_ids))]
        sample.finish_reason = "stop"

    def interrupt(self, sample: Sample) -> None:
        raise AssertionError("nobody interrupts")


@pytest.mark.parametrize("chat_template", [False, True])
async def test_example_has_the_tokens_of_a_successful_episode(chat_template: bool) -> None:
    config = load_config([f"task.chat_template={str(chat_template).lower()}"], "alphabet-sort")
    config.rollout.max_prompt_tokens = config.rollout.max_response_tokens = 1000
    tokenizer = chat_tokenizer()
    chat = ChatFormat(tokenizer, chat_template=chat_template, tool_parser=ToolParser.hermes)
    task = build_task(config.task)
    prompt = task.example(0)
    messages = task.demonstration(prompt)
    runner = EpisodeRunner(Right(chat, messages), chat, config.task, config.rollout)
    episode = await runner.run(
        environment_factory(config.task, task)(prompt),
        EpisodeRequest(session="s", sampling=SamplingParams()),
    )
    example = imitate(chat, messages)
    [branch] = episode.branches
    assert episode.end == "done" and episode.env_reward == pytest.approx(1.0)
    assert branch.tokens == example.tokens.tolist()
    assert branch.loss_mask == example.loss_mask.tolist()


def test_chat_template_examples_learn_the_assistant_and_describe_tools() -> None:
    tokenizer = chat_tokenizer()
    chat = ChatFormat(tokenizer, chat_template=True, tool_parser=ToolParser.hermes)
    conversation = said(
        ("system", "S"), ("user", "ab"), ("assistant", "ba"), ("user", "c"), ("assistant", "cba")
    )
    tools = [ToolSpec(name="python", description="", parameters={})]
    example = imitate(chat, conversation, tools)
    text = tokenizer.decode(example.tokens)
    assert text.count('"name": "python"') == 1
    assert text.partition("}}")[2] == (
        "}<system>S<|eos|><user>ab<|eos|><assistant>ba<|eos|><user>c<|eos|><assistant>cba<|eos|>"
    )
    learnt = tokenizer.decode(example.tokens[example.loss_mask == 1])
    assert learnt == "ba<|eos|>cba<|eos|>"
    given = imitate(chat, conversation, tools, num_given=4)  # the data's turns, not the model's
    assert tokenizer.decode(given.tokens[given.loss_mask == 1]) == "cba<|eos|>"
    opened = chat.first_prompt(conversation[:4], tools)
    assert given.tokens.tolist()[: len(opened)] == opened


@pytest.mark.parametrize(
    "turns", [[], [("assistant", "a")], [("user", "a")], [("user", "a"), ("tool", "b")]]
)
def test_demonstration_that_does_not_end_with_the_assistant_is_refused(
    turns: list[tuple[str, str]],
) -> None:
    chat = ChatFormat(byte_tokenizer(), chat_template=False, tool_parser=ToolParser.hermes)
    with pytest.raises(ValueError, match="a demonstration must begin with a system or user"):
        imitate(chat, said(*turns))


STEPS = {"steps": RewardConfig(kind=RewardKind.env)}


def task_config(tmp_path: Path, **changes: object) -> TaskConfig:
    path = tmp_path / "mine.py"
    path.write_text(
        "def bad_env(config, prompt): raise KeyError('nothing here')\n"
        "def env(config, prompt):\n"
        "    from rollout_pool import SingleTurn\n"
        "    return SingleTurn(prompt.text)\n"
        "def agent(session, prompt): return 0.0\n"
        "async def good_agent(session, prompt): return 0.0\n"
        "def reward(prompt, episode): return 1.0\n"
        "def empty(config): return 3\n"
        "word = 'look_up'\n"
        "class Tool: 'Looks up.'\n"
    )
    exercise = '{"prompt": "Print 1.", "tests": [{"input": "", "output": "1"}]}\n'
    (tmp_path / "mine.py.jsonl").write_text(5 * exercise)
    named = {
        key: value.replace("FILE", str(path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    named["tools"] = [one.replace("FILE", str(path)) for one in named.get("tools", [])]
    if function := named.pop("function", None):
        named["rewards"] = {"mine": RewardConfig(kind=RewardKind.function, function=str(function))}
    return TaskConfig(**{"eval_size": 4, **named})  # type: ignore[arg-type]


PROGRAMS = {"kind": TaskKind.code, "path": str(CONFIG_DIR / "data" / "programs.jsonl")}
TESTS = {"kind": RewardKind.code_tests}
REMOTE_SHELL = RewardConfig(url="http://127.0.0.1:9", languages=["sh"], **TESTS)
NO_COMPILER = RewardConfig(
    compile=["no-cc", "{file}", "{output}"], command=["{file}"], languages=["c"], **TESTS
)
NO_SHELL = RewardConfig(command=["no-sh", "{file}"], languages=["sh"], **TESTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "FILE:no"}, r"task.env='.*:no': .* has nothing named 'no'"),
        ({"env": "FILE:bad_env"}, r"task.env=.*: made no environment of prompt 0: KeyError: 'noth"),
        ({"env": "FILE:reward"}, r"task.env=.*: TypeError: it is a float without reset, step, cl"),
        ({"tools": ["FILE:word"], "max_turns": 2}, r"task.tools='.*:word': must be a function or"),
        ({"tools": ["FILE:Tool"], "max_turns": 2}, r"task.tools='.*:Tool': must be a function, n"),
        ({"agent": "FILE:no"}, r"task.agent='.*:no': .* has nothing named 'no'"),
        ({"agent": "FILE:agent"}, r"task.agent='.*:agent': must be an async function"),
        ({"function": "FILE:no"}, r"task.rewards.mine.function='.*:no': .* has nothing named"),
        ({"tools": ["nowhere:f"], "max_turns": 2}, r"task.tools='nowhere:f': there is no module n"),
        ({"kind": TaskKind.custom, "factory": "FILE:no"}, r"task.factory='.*:no': .* has nothing"),
        (
            {"kind": TaskKind.custom, "factory": "FILE:empty"},
            r"task.factory='.*:empty': made a int without name, example, eval_prompts, is_held_out",
        ),
        (
            {"rewards": STEPS},
            r"task.rewards.steps.kind=env: the environment of task.kind=reasoning_gym gives no",
        ),
        (
            {"rewards": STEPS, "tools": ["python"], "max_turns": 2},
            r"task.rewards.steps.kind=env: .* set task.rewards.steps.kind=task, or name an env",
        ),
        (
            {"rewards": {"tests": RewardConfig(kind=RewardKind.code_tests)}},
            r"task.rewards.tests.kind=code_tests: the prompts of chain_sum have no tests",
        ),
        (
            {**PROGRAMS, "rewards": {"tests": RewardConfig(python="/no/python", **TESTS)}},
            r"task.rewards.tests.python='/no/python': there is no such file; give the interpreter",
        ),
        (
            {**PROGRAMS, "rewards": {"tests": NO_SHELL}},
            r"task.rewards.tests.command=.*: the tests of exercise '.*' are statements of Python",
        ),
        (
            {"kind": TaskKind.code, "path": "FILE.jsonl", "rewards": {"tests": NO_SHELL}},
            r"task.rewards.tests.command=\['no-sh', '{file}'\]: there is no executable 'no-sh'",
        ),
        (
            {**PROGRAMS, "rewards": {"tests": REMOTE_SHELL}},
            r"task.rewards.tests.languages=\['sh'\]: the tests of exercise '.*' are statements of",
        ),
        (
            {"kind": TaskKind.code, "path": "FILE.jsonl", "rewards": {"tests": NO_COMPILER}},
            r"task.rewards.tests.compile=\['no-cc', .*\]: there is no executable 'no-cc'",
        ),
    ],
)
def test_task_settings_are_checked_before_a_run(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_task(task_config(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "FILE:env", "function": "FILE:reward"},
        {"agent": "FILE:good_agent"},
        {"env": "FILE:env", "rewards": STEPS},
        {"agent": "FILE:good_agent", "rewards": STEPS},
        {"tools": ["python"], "max_turns": 2},
    ],
)
def test_valid_task_passes_the_check(tmp_path: Path, changes: dict[str, object]) -> None:
    check_task(task_config(tmp_path, **changes))
