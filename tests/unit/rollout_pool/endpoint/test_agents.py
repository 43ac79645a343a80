"""Agents become episodes with their results as rewards; a bad agent fails only its episode."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest

from configs.rollout_schema import OpenAIConfig, RolloutConfig, TaskConfig
from rollout_pool.endpoint.agents import AgentRunner
from rollout_pool.endpoint.sessions import SessionLost
from rollout_pool.episodes.environment import Step
from rollout_pool.episodes.episode import EpisodeFailed
from rollout_pool.sampling.sample import SampleFailed
from rollout_pool.tasks.agent import load_agent
from rollout_pool.tasks.task import Prompt
from tests.support.endpoint_scene import Scene, check_branch, eventually, said_in
from tests.support.rollout import RecordingSamples

PROMPT = Prompt(index=3, is_held_out=False, text="hello")


async def ask(session, text, **more):
    async with session.client() as client:
        answer = await client.chat.completions.create(
            model=session.model, messages=[{"role": "user", "content": text}], **more
        )
    return answer.choices[0].message.content


@pytest.fixture
async def play(scene):
    """Runs one episode of an agent."""

    async def play(agent, in_scene: Scene = scene, **settings):
        return await AgentRunner(agent, in_scene.endpoint.sessions, in_scene.endpoint.url).run(
            PROMPT, in_scene.ask(**settings)
        )

    return play


async def test_agents_reward_parts_and_tokens_become_an_episode(scene, play):
    async def agent(session, prompt):
        text = await ask(session, prompt.text)
        assert await ask(session, "and " + text) == "hello"
        return 0.5, {"speed": 2}

    group = RecordingSamples(order=4)
    episode = await play(agent, samples=group)
    samples = group.begun
    assert (episode.end, episode.env_reward, episode.env_parts) == ("done", 0.5, {"speed": 2.0})
    assert episode.num_turns == 2 and len(episode.branches) == 2 and episode.error is None
    for branch, (_, tokens) in zip(episode.branches, scene.author.ended, strict=True):
        check_branch(branch, [tokens])
    assert samples == scene.author.samples and {sample.order for sample in samples} == {4}
    assert len({sample.session for sample in samples}) == 1 and len(scene.sessions) == 0


async def test_agents_client_has_no_timeout_and_no_retries(scene, play):
    async def agent(session, prompt):
        client = session.client()
        assert (client.timeout, client.max_retries) == (None, 0)
        assert session.api_key not in repr(session)
        await ask(session, prompt.text)
        return 1

    assert (await play(agent)).env_reward == 1.0


async def test_blocking_agent_in_a_thread_leaves_the_loop_to_others(scene, play):
    def block(session, prompt):
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            answer = client.chat.completions.create(
                model=session.model, messages=[{"role": "user", "content": prompt.text}]
            )
        return float(answer.choices[0].message.content == "hello")

    async def agent(session, prompt):
        return await asyncio.to_thread(block, session, prompt)

    gate = scene.author.gates[3] = asyncio.Event()
    playing = asyncio.create_task(play(agent))
    await eventually(lambda: scene.author.samples and scene.author.samples[0].output_ids)
    gate.set()  # by the loop, while the client waits for its answer
    assert (await playing).env_reward == 1.0


@pytest.mark.parametrize("returned", [None, "good", (1.0, 2.0), float("nan"), (1.0, {"a": "b"})])
async def test_invalid_reward_ends_the_episode_in_error(scene, play, returned):
    async def agent(session, prompt):
        await ask(session, prompt.text)
        return returned

    episode = await play(agent)
    assert episode.end == "env_error" and episode.error and episode.env_reward is None


async def test_agent_that_raises_keeps_its_turns_and_its_error(scene, play):
    async def agent(session, prompt):
        await ask(session, prompt.text)
        raise KeyError("no such door")

    episode = await play(agent)
    assert (episode.end, episode.num_turns) == ("env_error", 1)
    assert episode.error == "KeyError: 'no such door'"


async def test_environment_that_died_yields_no_episode_whatever_was_sampled(scene, play):
    async def agent(session, prompt):
        await ask(session, prompt.text)
        raise EpisodeFailed("its process ended")

    with pytest.raises(EpisodeFailed, match="its process ended"):
        await play(agent)
    assert scene.author.ended and len(scene.sessions) == 0


async def test_agent_that_never_calls_the_model_yields_no_episode(scene, play):
    async def agent(session, prompt):
        return 1.0

    async def broken(session, prompt):
        raise KeyError("too early")

    with pytest.raises(SessionLost, match="got no token"):
        await play(agent)
    with pytest.raises(SessionLost, match="got no token of the model: KeyError: 'too early'"):
        await play(broken)


async def test_engines_that_fail_are_not_the_agents_fault(scene, play):
    async def agent(session, prompt):
        await ask(session, prompt.text)
        return 1.0

    for error in (SampleFailed("all died"), TimeoutError("no engine")):
        scene.author.says = iter([error])
        with pytest.raises(type(error), match=str(error)):
            await play(agent)


async def test_conversation_without_room_ends_by_length(make_scene, play):
    scene = await make_scene(
        task=TaskConfig(chat_template=True),
        rollout=RolloutConfig(max_prompt_tokens=60, max_response_tokens=30),
    )

    async def agent(session, prompt):
        await ask(session, prompt.text)
        await ask(session, "x" * 100)

    episode = await play(agent, scene)
    assert (episode.end, episode.num_turns, episode.error) == ("length", 1, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_cut_at_the_timeout_count_beside_one_without_tokens(
    advance_clock, make_scene, play, stream
):
    scene = await make_scene(task=TaskConfig(chat_template=True, episode_timeout_s=60.0))
    scene.author.gates, scene.author.silent = {3: asyncio.Event()}, {0}

    async def agent(session, prompt):
        async with session.client() as client:
            answer = await client.chat.completions.create(
                model=session.model,
                messages=[{"role": "user", "content": prompt.text}],
                n=3,
                stream=stream,
            )
            if stream:
                await said_in(answer)
        await asyncio.Event().wait()

    group = RecordingSamples()
    playing = asyncio.create_task(play(agent, scene, samples=group))
    await eventually(lambda: [len(one.output_ids) for one in scene.author.samples] == [0, 3, 3])
    advance_clock(61.0)
    episode = await playing
    assert (episode.end, episode.num_turns, episode.answer) == ("episode_timeout", 2, "hel")
    for branch, sample in zip(episode.branches, scene.author.samples[1:], strict=True):
        check_branch(branch, [sample.output_ids])
        assert sum(branch.loss_mask) == 3 and branch.finish_reason == "length"
    assert [len(sample.output_ids) for sample in group.ended] == [0, 3, 3]


async def test_agents_whose_answers_wait_for_a_slot_do_not_time_out(
    advance_clock, make_scene, play
):
    scene = await make_scene(task=TaskConfig(chat_template=True, episode_timeout_s=90.0))
    scene.author.places, scene.author.pause_s = asyncio.Semaphore(1), 30.0

    async def agent(session, prompt):
        await ask(session, prompt.text)
        return 1.0

    playing = [asyncio.create_task(play(agent, scene)) for _ in range(6)]
    for number in range(6):
        await eventually(lambda number=number: scene.author.num_placed > number)
        advance_clock(30.0)
    assert [episode.end for episode in await asyncio.gather(*playing)] == ["done"] * 6
    late = asyncio.create_task(play(agent, scene))  # what hangs at its engine is
    scene.author.gates, scene.author.pause_s = {3: asyncio.Event()}, 0.0
    await eventually(lambda: len(scene.author.samples[-1].output_ids) == 3)
    advance_clock(91.0)
    assert (await late).end == "episode_timeout"


async def test_each_answer_ends_at_the_gate(scene, play):
    group = RecordingSamples()

    async def leaves(session, prompt):
        await ask(session, prompt.text)
        scene.author.gates = {3: asyncio.Event()}
        asking = asyncio.create_task(ask(session, "and?"))
        await eventually(lambda: len(scene.author.samples) == 2)
        asking.cancel()
        return 1.0

    await play(leaves, samples=group)
    assert group.ended == group.begun and len(group.begun) == 2
    assert group.ended[-1].finish_reason == "dropped" and not group.ended[-1].output_ids


async def test_agent_that_hangs_is_ended(make_scene, play):
    scene = await make_scene(
        rollout=RolloutConfig(openai=OpenAIConfig(session_timeout_s=5.0)),
        task=TaskConfig(chat_template=True, episode_timeout_s=60.0),
    )
    ended = asyncio.Event()

    async def agent(session, prompt):
        await ask(session, prompt.text)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    episode = await play(agent, scene)
    assert (episode.end, episode.num_turns) == ("episode_timeout", 1) and ended.is_set()


async def test_cancelled_episode_ends_its_agent_and_its_answers(scene, play):
    scene.author.gates = {3: asyncio.Event()}

    async def agent(session, prompt):
        await ask(session, prompt.text)

    playing = asyncio.create_task(play(agent))
    await eventually(lambda: scene.author.samples)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert scene.author.cancelled == scene.author.samples and len(scene.sessions) == 0


async def test_interrupted_answer_continues_when_it_may(scene, play):
    may, group = asyncio.Event(), RecordingSamples()
    scene.author.gates = {3: may}
    group.hold(60.0)

    async def agent(session, prompt):
        return float(await ask(session, prompt.text) == "hello")

    playing = asyncio.create_task(play(agent, samples=group))
    await eventually(lambda: scene.author.samples and scene.author.samples[0].output_ids)
    scene.author.interrupt(scene.author.samples[0])
    await eventually(lambda: group.running and not group.to_stop)
    assert len(group.begun[0].output_ids) == 3
    scene.author.version = 8
    may.set()
    group.release()
    episode = await playing
    assert episode.env_reward == 1.0
    [branch] = episode.branches
    assert [span.version for span in branch.version_spans] == [7, 8]
    check_branch(branch, [scene.author.ended[0][1]])


def test_agent_must_be_an_async_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "async def good(session, prompt): return 1.0\n"
        "def blocking(session, prompt): return 1.0\n"
        "class Callable:\n"
        "    async def __call__(self, session, prompt): return 1.0\n"
        "made = Callable()\n"
    )
    assert load_agent(f"{file}:good") and load_agent(f"{file}:made")
    with pytest.raises(ValueError, match=r"task\.agent=.*blocking.*async function"):
        load_agent(f"{file}:blocking")
    with pytest.raises(ValueError, match=r"task\.agent=.*'missing'"):
        load_agent(f"{file}:missing")


@pytest.mark.parametrize(
    ("ends_by", "message"),
    [(SystemExit(1), "tried to end the process"), (asyncio.CancelledError(), "cancelled itself")],
)
async def test_agent_that_exits_or_cancels_fails_only_its_episode(scene, play, ends_by, message):
    async def agent(session, prompt):
        await ask(session, prompt.text)
        raise ends_by

    episode = await play(agent)
    assert episode.end == "env_error" and message in episode.error


async def test_roles_of_an_agent_have_trajectories_and_rewards_of_their_own(scene, play):
    async def agent(session, prompt):
        for role in ("solver", "critic", "solver"):  # they ask the same, and share nothing
            handle = session.of_role(role)
            assert handle.api_key in handle.keyed_url and role in handle.keyed_url
            await ask(handle, prompt.text)
        return Step(rewards={"solver": 1.0, "critic": None}, info={"rounds": 2.0})

    episode = await play(agent)
    assert [one.role for one in episode.branches] == ["solver", "critic", "solver"]
    assert episode.rewards == {"solver": 1.0, "critic": None}
    assert episode.env_parts == {"rounds": 2.0}

    async def mistaken(session, prompt):
        with pytest.raises(openai.AuthenticationError, match="'a b' in the key must have the form"):
            await ask(replace(session, api_key=f"{session.api_key}.a b"), prompt.text)
        for handle, role in ((session, "a b"), (session.of_role("a"), "b")):
            with pytest.raises(ValueError, match=r"must have the form .*; call of_role of the"):
                handle.of_role(role)
        await ask(session, prompt.text)
        return Step(advantages={"critic": 1.0})

    with pytest.raises(EpisodeFailed, match="the roles that answered are"):
        await play(mistaken)
