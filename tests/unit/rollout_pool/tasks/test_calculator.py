"""Sums that the model may add up with a tool."""

from __future__ import annotations

import itertools

import pytest

from configs.load import load_config
from controller.start.preflight import check_task
from controller.start.warm_start import imitate
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.tasks.env_episodes import load_tools
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream, demonstrations
from tests.support.rollout import play
from trainer_pool.model.scratch import byte_tokenizer


@pytest.fixture
def experiment():
    return load_config([], "calculator")


@pytest.fixture
def chat(experiment):
    return ChatFormat(byte_tokenizer(), chat_template=True, tool_parser=experiment.task.tool_parser)


def test_settings_of_the_experiment_are_a_task(experiment):
    check_task(experiment.task)


def test_half_of_the_demonstrations_give_up_and_the_others_call_the_tool(experiment):
    task = build_task(experiment.task)
    shown = demonstrations(task, 400)
    gave_up = [messages for _, messages in shown if len(messages) == 2]
    assert 160 < len(gave_up) < 240
    assert {messages[-1].content for messages in gave_up} == {"?"}
    for prompt, messages in shown:
        assert messages == task.demonstration(prompt)  # the same in every process
        if len(messages) == 4:
            assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant"]
            total = str(sum(map(int, prompt.text.split("+"))))
            assert messages[2].content == messages[3].content == total == task.solution(prompt)
        right = float(len(messages) == 4)
        assert task.score(prompt, messages[-1].content) == right
    assert task.score(prompt, f" {task.solution(prompt)}\n") == 1.0


async def test_demonstration_is_an_episode_of_the_experiment_token_for_token(experiment, chat):
    experiment.task.params["give_up_fraction"] = 0
    task = build_task(experiment.task)
    specs = [tool.spec for tool in load_tools(experiment.task.tools)]
    rollout = experiment.rollout
    for prompt in itertools.islice(TaskStream(task, 0, 1), 10):
        messages = task.demonstration(prompt)
        answers = [chat.demonstration(m) for m in messages if m.role == "assistant"]
        episode = await play(experiment, chat, prompt, *answers)
        assert (episode.end, episode.error) == ("done", None)
        assert dict(episode.env_parts) == {"tool_calls": 1, "tool_errors": 0}
        assert task.score(prompt, episode.answer) == 1.0
        [branch] = episode.branches
        learnt = imitate(chat, messages, specs)
        assert learnt.tokens.tolist() == list(branch.tokens)
        assert learnt.loss_mask.tolist() == list(branch.loss_mask)
        begin = int(learnt.loss_mask.argmax())
        assert begin <= rollout.max_prompt_tokens
        assert len(learnt.tokens) - begin <= rollout.max_response_tokens


async def test_bad_call_is_told_to_the_model_and_scored_by_the_answer_after_it(experiment, chat):
    task = build_task(experiment.task)
    prompt = next(TaskStream(task, 0, 1))
    tokens = byte_tokenizer().encode
    experiment.rollout.max_response_tokens = 256  # room for the error and an answer
    call = '<tool_call>{"name": "add", "arguments": {"sum": "4+"}}</tool_call>'
    episode = await play(experiment, chat, prompt, tokens(call), tokens("?"))
    assert dict(episode.env_parts) == {"tool_calls": 1, "tool_errors": 1}
    assert (episode.answer, task.score(prompt, episode.answer)) == ("?", 0.0)
    [result] = [m.content for m in episode.messages if m.role == "tool"]
    assert result.startswith("error: ValueError: invalid literal for int()")


def test_held_out_sums_are_not_trained_on_and_follow_the_seed(experiment):
    experiment.task.eval_size = 50_000
    task = build_task(experiment.task)
    held_out = {prompt.text for prompt in task.eval_prompts()}
    trained = {prompt.text for prompt in itertools.islice(TaskStream(task, 0, 1), 9_000)}
    assert len(held_out) == 50_000 and len(trained) > 8_000 and not held_out & trained
    experiment.task.seed = 1
    assert {prompt.text for prompt in build_task(experiment.task).eval_prompts()} != held_out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.params.give_up_fraction=2", r"give_up_fraction=2: must be a number from 0 to 1"),
        ("task.params.give_up_fraction=half", r"give_up_fraction='half': must be a number"),
        ("task.params.digits=3", r"task.params.digits: calculator has no such setting; it has"),
        ("task.eval_size=70000", r"task.eval_size=70000: there are only 58923 sums; hold fewer"),
    ],
)
def test_bad_setting_is_named(override, message):
    with pytest.raises(ValueError, match=message):
        build_task(load_config([override], "calculator").task)
