"""The agent of docs/openai.md, LangChain's, with a model that says what a test wants."""

from __future__ import annotations

import pytest

from controller.start.preflight import check_task
from rollout_pool.endpoint.agents import AgentRunner
from rollout_pool.tasks.agent import load_agent
from rollout_pool.tasks.task import Prompt
from tests.support.endpoint_scene import call, check_branch
from tests.support.openai_page import langchain_example

PROMPT = Prompt(index=0, is_held_out=False, text="3 + 4 =")


@pytest.fixture
def play(scene, tmp_path):
    """Runs one episode of the agent, in which the model says `answers`."""
    config = langchain_example(tmp_path)
    check_task(config.task)

    async def play(*answers):
        scene.author.says = iter(answers)
        agent = load_agent(config.task.agent)
        runner = AgentRunner(agent, scene.endpoint.sessions, scene.endpoint.url)
        episode = await runner.run(PROMPT, scene.ask())
        assert episode.end == "done", episode.error
        [branch] = episode.branches
        check_branch(branch, scene.author.written)
        return episode

    return play


def contents(episode, role):
    return [message.content for message in episode.messages if message.role == role]


async def test_tool_call_and_answer_are_one_trajectory(play):
    episode = await play("I add. " + call("add", a=3, b=4), " 7\n")
    assert (episode.num_turns, episode.env_reward, episode.env_parts) == (2, 1.0, {"calls": 1.0})
    assert contents(episode, "tool") == ["7"] and episode.answer.strip() == "7"


async def test_answer_without_a_call_ends_the_episode(play):
    episode = await play("7")
    assert (episode.num_turns, episode.env_reward) == (1, 0.0)


async def test_wrong_calls_get_an_error_and_the_limit_ends_the_episode(play):
    episode = await play(call("add", a="three"), call("subtract"), call("add", a=3, b=4), "late")
    assert (episode.num_turns, episode.env_parts) == (3, {"calls": 3.0})
    [wrong, unknown] = contents(episode, "tool")  # the last result is not sent any more
    assert "three" in wrong and "subtract" in unknown
