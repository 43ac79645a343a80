"""Episodes with all kinds of environments, and a model with prepared answers."""

from __future__ import annotations

import asyncio

import pytest

from buffer.types import SamplingParams, VersionSpan
from configs.choices import OnLongPrompt, Thoughts
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.environment import Observation, SingleTurn, Step
from rollout_pool.episodes.episode import EpisodeFailed, EpisodeRequest
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.sample import Interrupted, Priority, SampleFailed
from tests.support.rollout import EOS, RecordingSamples, plain_chat, until, write

VERSION = 4


class Model:
    """Says its lines one after the other; "..." hangs after what was said, until interrupted."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.asked = []
        self.is_deaf = False
        self.delay_s = 0.0
        self.hangs = asyncio.Event()
        self._interrupted = {}

    async def complete(self, sample, clock=None):
        self.asked.append(sample)
        stop = self._interrupted.setdefault(sample, asyncio.Event())
        stop.clear()
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        tokens = [*line.removesuffix("...").encode()]
        tokens = tokens if line.endswith("...") else [*tokens, EOS]
        write(sample, tokens[: sample.num_left], VERSION)
        if line.endswith("..."):
            self.hangs.set()
            await stop.wait()
            raise Interrupted
        await asyncio.sleep(self.delay_s)
        if stop.is_set():
            raise Interrupted
        sample.finish_reason = "stop" if sample.output_ids[-1] == EOS else "length"

    def interrupt(self, sample):
        if not self.is_deaf and sample in self._interrupted:
            self._interrupted[sample].set()


class Talk:
    """Says its own lines; a line may also be a step, an observation, or an error to raise."""

    def __init__(self, first, *lines):
        self.first = first
        self.lines = list(lines)
        self.hangs = asyncio.Event()
        self.heard = []
        self.num_closed = 0

    async def reset(self):
        return await self._next(self.first)

    async def step(self, completion):
        self.heard.append(completion)
        line = await self._next(self.lines.pop(0) if self.lines else Step())
        return line if isinstance(line, Step) else Step(observation=line)

    async def close(self):
        self.num_closed += 1

    async def _next(self, line):
        if isinstance(line, Exception):
            raise line
        if line == "...":
            self.hangs.set()
            await asyncio.Event().wait()
        if isinstance(line, str):
            return said(line)
        return line


def said(content, **more):
    return Observation(messages=(Message(role="user", content=content),), **more)


def runner(model, rollout=None, heeds_interrupt_s=5.0, **task):
    config = TaskConfig(**{"max_turns": 8, **task})
    chat = plain_chat()
    return EpisodeRunner(
        model, chat, config, rollout or RolloutConfig(), heeds_interrupt_s=heeds_interrupt_s
    )


def ask(**more):
    return EpisodeRequest(session="s", sampling=SamplingParams(temperature=0.7), **more)


def text_of(branch):
    """Tokens of the model in brackets, and its ends of sequence as a bar."""
    text, was_own = "", 0
    for token, own in zip(branch.tokens, branch.loss_mask, strict=True):
        text += ("[" if own else "]") if own != was_own else ""
        text += "|" if token == EOS else chr(token)
        was_own = own
    return text + ("]" if was_own else "")


async def test_question_with_one_answer():
    model, group = Model("7"), RecordingSamples(order=3)
    asked = ask(samples=group, priority=Priority.evaluation, min_version=2, engine="e")
    env = SingleTurn("3+4=", "Add. ")
    episode = await runner(model, stop=["; "]).run(env, asked)
    [branch] = episode.branches
    assert text_of(branch) == "Add. 3+4=[7|]" and branch.prompt_length == 9
    assert branch.version_spans == [VersionSpan(version=4, start=9, end=11)]
    assert (episode.end, branch.finish_reason, episode.num_turns) == ("done", "stop", 1)
    assert episode.answer == "7" and episode.env_reward is None
    [sample] = model.asked
    assert group.begun == group.ended == [sample]
    assert (sample.order, sample.priority, sample.min_version, sample.engine, sample.session) == (
        (3, Priority.evaluation, 2, "e", "s")
    )
    assert sample.sampling.temperature == 0.7 and sample.stop == ("; ",)
    assert sample.max_new_tokens == RolloutConfig().max_response_tokens


async def test_turns_follow_each_other_token_by_token_and_rewards_add_up():
    model = Model("a", "b", "c")
    env = Talk(
        "1? ",
        Step(observation=said(" 2? "), reward=0.5, info={"close": 1.0, "turns": 1.0}),
        " 3? ",
        Step(reward=-0.25, info={"turns": 3.0}),
    )
    episode = await runner(model).run(env, ask())
    [branch] = episode.branches
    assert text_of(branch) == "1? [a|] 2? [b|] 3? [c|]"
    assert [message.content for message in episode.messages] == [
        "1? ",
        "a",
        " 2? ",
        "b",
        " 3? ",
        "c",
    ]
    assert (episode.env_reward, episode.num_turns, env.num_closed) == (0.25, 3, 1)
    assert dict(episode.env_parts) == {"close": 1.0, "turns": 3.0}
    assert [sample.sample_id for sample in model.asked] == ["s.0", "s.1", "s.2"]
    assert [completion.text for completion in env.heard] == ["a", "b", "c"]


async def test_tool_call_reaches_the_environment_and_its_answer_is_not_trained_on():
    model = Model('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "so 3")
    answer = Message(role="tool", content=" 3 ", name="add", tool_call_id="x")
    env = Talk("?", Observation(messages=(answer,)))
    episode = await runner(model).run(env, ask())
    [call] = env.heard[0].tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert text_of(episode.branches[0]).endswith("</tool_call>|] 3 [so 3|]")
    assert episode.messages[1].tool_calls == (call,) and episode.messages[1].content == ""


async def test_rewritten_history_continues_in_a_branch():
    model = Model("a", "b", "c")
    summary = said("in short: a. 2? ", replaces_history=True)
    episode = await runner(model).run(Talk("1? ", summary, " 3? "), ask())
    assert [text_of(branch) for branch in episode.branches] == [
        "1? [a|]",
        "in short: a. 2? [b|] 3? [c|]",
    ]
    assert [message.content for message in episode.messages] == [
        "in short: a. 2? ",
        "b",
        " 3? ",
        "c",
    ]
    assert episode.end == "done"


@pytest.mark.parametrize("thoughts", Thoughts)
async def test_thoughts_are_read_at_the_next_question_if_they_are_kept(thoughts):
    model = Model("<think>hm</think>a", "b", "c")
    episode = await runner(model, thoughts=thoughts).run(Talk("1? ", " 2? ", " 3? "), ask())
    shown = [text_of(branch) for branch in episode.branches]
    contents = [message.content for message in episode.messages]
    assert contents == ["1? ", "<think>hm</think>a", " 2? ", "b", " 3? ", "c"]
    if thoughts is Thoughts.kept:
        assert shown == ["1? [<think>hm</think>a|] 2? [b|] 3? [c|]"]
    else:
        assert shown == ["1? [<think>hm</think>a|]", "1? a 2? [b|] 3? [c|]"]


@pytest.mark.parametrize(
    ("said", "grammar", "shown"),
    [
        ("hm</think>a </think>", None, "1? <think>a </think> 2? [b|]"),
        ("hm, a", None, "1? <think> 2? [b|]"),  # cut within its thoughts
        ("a", 'start: "a"', "1? <think>[a|] 2? [b|]"),  # a form without room for thoughts
    ],
)
async def test_thoughts_that_the_prompt_opened_are_stripped(said, grammar, shown):
    run = runner(Model(said, "b"), thoughts=Thoughts.stripped, grammar=grammar)
    episode = await run.run(Talk("1? <think>", " 2? "), ask())
    assert text_of(episode.branches[-1]) == shown
    assert episode.messages[1].content == said, "as it was sampled"


async def test_last_turn_is_still_scored():
    env = Talk("1", Step(observation=None, reward=1.0))
    assert (await runner(Model("a"), max_turns=1).run(env, ask())).end == "done"
    more = said("more")
    env = Talk("1", Step(observation=more, reward=1.0), Step(observation=more, reward=2.0))
    episode = await runner(Model("a", "b"), max_turns=2).run(env, ask())
    assert (episode.end, episode.num_turns, episode.env_reward) == ("max_turns", 2, 3.0)
    assert episode.messages[-1].content == "b"


async def test_response_stays_within_max_response_tokens():
    model = Model("aa", "bbbbbbbbb")
    rollout = RolloutConfig(max_response_tokens=10)
    env = Talk("12345", "+++", "and?")
    episode = await runner(model, rollout).run(env, ask())
    assert [sample.max_new_tokens for sample in model.asked] == [10, 4]
    assert text_of(episode.branches[0]) == "12345[aa|]+++[bbbb]"
    assert (episode.end, episode.branches[0].finish_reason) == ("length", "length")
    assert env.heard[1].finish_reason == "length"
    assert episode.messages[-1].content == "bbbb"  # "and?" was never shown


async def test_history_too_long_to_go_on_leaves_the_conversation_as_it_was():
    rollout = RolloutConfig(max_response_tokens=5)
    long = said("far too long", replaces_history=True)
    episode = await runner(Model("a"), rollout).run(Talk("1", long), ask())
    assert episode.end == "length" and episode.answer == "a" and len(episode.branches) == 1


async def test_single_answer_is_bounded_by_max_turn_tokens():
    model = Model("abcdef", "ok")
    episode = await runner(model, max_turn_tokens=3).run(Talk("1", "2"), ask())
    assert text_of(episode.branches[0]) == "1[abc]2[ok|]"
    assert episode.end == "done"


@pytest.mark.parametrize("content", ["", "x" * 11])
async def test_too_long_or_empty_first_prompt_fails_the_episode(content):
    skips = RolloutConfig(max_prompt_tokens=10, on_long_prompt=OnLongPrompt.skip)
    env = Talk(content)
    with pytest.raises(EpisodeFailed, match=r"s: its first prompt has (11 tokens|no token)"):
        await runner(Model(), skips).run(env, ask())
    assert env.num_closed == 1


async def test_first_prompt_that_is_too_long_is_refused_by_name():
    refuses = RolloutConfig(max_prompt_tokens=10)
    env = Talk("x" * 11)
    with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens=10: .* has 11 tokens"):
        await runner(Model(), refuses).run(env, ask())
    assert env.num_closed == 1


async def test_environment_that_breaks_ends_its_episode_with_what_was_sampled():
    more = said("2")
    env = Talk("1", Step(observation=more, reward=0.5), KeyError("gone"))
    episode = await runner(Model("a", "b")).run(env, ask())
    assert (episode.end, episode.error) == ("env_error", "step: KeyError: 'gone'")
    assert text_of(episode.branches[0]) == "1[a|]2[b|]"
    assert episode.env_reward == 0.5 and env.num_closed == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (Step(reward=float("nan")), "the environment's reward is nan"),
        (Step(info={"speed": float("inf")}), "the environment's speed is inf"),
        (Step(reward=1e200), "the environment's reward is 1e+200; it must be finite, below 1e30"),
        (Step(reward="good"), "could not convert string to float"),
        (Step(info=None), "NoneType"),
        (TimeoutError("of mine"), "step: TimeoutError: of mine"),
        ("\ud800", "observation: "),  # no tokenizer takes it
    ],
)
async def test_bad_step_fails_only_its_episode(line, error):
    episode = await runner(Model("a")).run(Talk("1", line), ask())
    assert episode.end == "env_error" and error in episode.error
    assert text_of(episode.branches[0]) == "1[a|]"


async def test_environment_that_fails_at_reset_fails_the_episode():
    env = Talk(OSError("no disk"))
    with pytest.raises(
        EpisodeFailed, match=r"before a token .* env_error: reset: OSError: no disk"
    ):
        await runner(Model()).run(env, ask())
    with pytest.raises(EpisodeFailed, match=r"before a token was sampled: turn_timeout"):
        await runner(Model(), turn_timeout_s=0.05).run(Talk("..."), ask())
    assert env.num_closed == 1


@pytest.fixture
def out_of_time(advance_clock):
    """Gives an episode whose 60 s are over when that model or environment hangs."""

    async def out_of_time(who, running):
        playing = asyncio.create_task(running)
        async with asyncio.timeout(600):
            await who.hangs.wait()
            advance_clock(61.0)
            return await playing

    return out_of_time


async def test_environment_that_takes_too_long_over_a_step_ends_its_episode(out_of_time):
    env = Talk("1", "2", "...")
    episode = await out_of_time(env, runner(Model("a", "b"), turn_timeout_s=60.0).run(env, ask()))
    assert (episode.end, episode.error) == ("turn_timeout", None)
    assert text_of(episode.branches[0]) == "1[a|]2[b|]"
    env = Talk("1", "...")
    episode = await out_of_time(env, runner(Model("a"), episode_timeout_s=60.0).run(env, ask()))
    assert (episode.end, env.num_closed) == ("episode_timeout", 1)


async def test_episode_without_time_keeps_what_was_sampled_to_the_last_token(out_of_time):
    model = Model("a", "bc...")
    env = Talk("1", "2")
    episode = await out_of_time(model, runner(model, episode_timeout_s=60.0).run(env, ask()))
    assert (episode.end, episode.num_turns) == ("episode_timeout", 2)
    assert text_of(episode.branches[0]) == "1[a|]2[bc]"
    assert episode.branches[0].finish_reason == "length"
    assert episode.answer == "bc" and len(env.heard) == 1
    assert model.asked[1].finish_reason is not None


async def test_episode_whose_time_ends_before_a_turns_first_token_ends_without_it(out_of_time):
    model = Model("a", "...")
    playing = runner(model, episode_timeout_s=60.0).run(Talk("1", "2"), ask())
    episode = await out_of_time(model, playing)
    assert text_of(episode.branches[0]) == "1[a|]" and episode.num_turns == 1
    with pytest.raises(EpisodeFailed, match="before a token was sampled: episode_timeout"):
        await runner(Model("..."), episode_timeout_s=0.1).run(Talk("1"), ask())


async def test_sample_that_ignores_its_interruption_is_cancelled_and_lost(out_of_time):
    model = Model("a", "bc...")
    model.is_deaf = True
    late = runner(model, heeds_interrupt_s=0.1, episode_timeout_s=60.0)
    episode = await out_of_time(model, late.run(Talk("1", "2"), ask()))
    assert text_of(episode.branches[0]) == "1[a|]" and episode.end == "episode_timeout"
    assert all(sample.finish_reason for sample in model.asked)


async def test_interrupted_sample_waits_and_continues_with_its_tokens():
    model = Model("a", "b...", "c", "d")
    group = GroupSamples()
    group.hold(60.0)
    playing = asyncio.create_task(runner(model).run(Talk("1", "2", "3"), ask(samples=group)))
    async with asyncio.timeout(60):
        await model.hangs.wait()
        model.interrupt(model.asked[1])
        await until(lambda: group.running and not group.to_stop)
        assert len(model.asked) == 2
        group.release()
        episode = await playing
    assert model.asked[1] is model.asked[2]
    assert text_of(episode.branches[0]) == "1[a|]2[bc|]3[d|]"
    assert (episode.end, episode.num_turns) == ("done", 3)


async def test_clock_is_paused_while_a_sample_may_not_continue(advance_clock):
    model = Model("a...", "b")
    model.delay_s = 0.05
    group = GroupSamples()
    group.hold(120.0)
    playing = asyncio.create_task(
        runner(model, episode_timeout_s=60.0).run(Talk("1"), ask(samples=group))
    )
    async with asyncio.timeout(600):
        await model.hangs.wait()
        model.interrupt(model.asked[0])
        await until(lambda: group.running and not group.to_stop)
        advance_clock(61.0)
        await asyncio.sleep(0.05)  # in which a clock that went on would ring
        advance_clock(60.0)
        episode = await playing
    assert episode.end == "done" and text_of(episode.branches[0]) == "1[ab|]"


async def test_sample_that_fails_fails_the_episode_and_the_environment_is_closed():
    env = Talk("1", "2")
    with pytest.raises(SampleFailed, match="no engine"):
        await runner(Model("a", SampleFailed("no engine"))).run(env, ask())
    assert env.num_closed == 1
    with pytest.raises(TimeoutError, match="no engine to ask"):
        await runner(Model(TimeoutError("no engine to ask"))).run(Talk("1"), ask())


async def test_cancelled_episode_closes_its_environment():
    model, env = Model("a..."), Talk("1")
    playing = asyncio.create_task(runner(model).run(env, ask()))
    async with asyncio.timeout(60):
        await model.hangs.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert env.num_closed == 1


ENDS = [
    (SystemExit(1), "tried to end the process: SystemExit(1)"),
    (KeyboardInterrupt(), "tried to end the process"),
    (asyncio.CancelledError(), "cancelled itself"),
]


class Ends(Talk):
    """Raises `error` once it has no more lines."""

    def __init__(self, error, *lines):
        super().__init__(*(lines or ("",)))
        self.error, self.is_first = error, bool(lines)

    async def reset(self):
        return await super().reset() if self.is_first else await self.end()

    async def step(self, completion):
        return await super().step(completion) if self.lines else await self.end()

    async def end(self):
        await asyncio.sleep(0)
        raise self.error


@pytest.mark.parametrize(("error", "words"), ENDS)
async def test_environment_that_exits_or_cancels_itself_ends_only_its_episode(error, words):
    episode = await runner(Model("a", "b")).run(Ends(error, "1", "2"), ask())
    assert (episode.end, episode.num_turns) == ("env_error", 2)
    assert f"step: RuntimeError: the environment {words}" in episode.error
    with pytest.raises(EpisodeFailed, match="reset: RuntimeError: the environment"):
        await runner(Model()).run(Ends(error), ask())


@pytest.mark.parametrize(("error", "words"), [*ENDS, (OSError("disk full"), "disk full")])
async def test_environment_that_fails_or_exits_as_it_closes_is_ignored(error, words, caplog):
    class Exits(Talk):
        async def close(self):
            raise error

    episode = await runner(Model("a")).run(Exits("1"), ask())
    assert episode.end == "done" and words in caplog.text


async def test_first_observation_that_cannot_be_written_fails_only_its_episode():
    for first in ("bad \ud83d end", Step(), None):
        env = Talk(said(first) if isinstance(first, str) else first)
        with pytest.raises(EpisodeFailed, match="before a token was sampled"):
            await runner(Model()).run(env, ask())
        assert env.num_closed == 1


async def test_each_role_has_a_conversation_of_its_own():
    model = Model("7", "no", "8", "yes")
    env = Talk(
        Observation.user("3+4=", role="solver"),
        Observation.user("3+4=", role="critic"),  # the same tokens, and yet another conversation
        Step(observation=Observation.user(" Again: ", role="solver"), rewards={"solver": -0.5}),
        Observation.user(" And 8? ", role="critic"),
        Step(rewards={"solver": 1.0, "critic": 0.25}),
    )
    episode = await runner(model).run(env, ask())
    assert {one.role: text_of(one) for one in episode.branches} == {
        "solver": "3+4=[7|] Again: [8|]",
        "critic": "3+4=[no|] And 8? [yes|]",
    }
    assert episode.rewards == {"solver": 0.5, "critic": 0.25} and episode.env_reward is None
    assert [message.content for message in episode.messages][1::2] == ["no", "yes"]


async def test_observation_without_a_role_is_for_who_answered_last():
    model = Model("a", "b")
    env = Talk(Observation.user("1? ", role="solver"), " 2? ", Step(rewards={"solver": 1.0}))
    [branch] = (await runner(model).run(env, ask())).branches
    assert (branch.role, text_of(branch)) == ("solver", "1? [a|] 2? [b|]")


async def test_prompt_of_a_later_role_without_room_ends_the_episode():
    most = RolloutConfig().longest_trajectory
    model = Model("a")
    env = Talk(Observation.user("1? ", role="solver"), Observation.user("x" * most, role="critic"))
    episode = await runner(model).run(env, ask())
    assert episode.end == "length" and [one.role for one in episode.branches] == ["solver"]


async def test_name_of_a_role_has_a_form():
    env = Talk("1? ", Observation.user("2? ", role="the critic"))
    episode = await runner(Model("a")).run(env, ask())
    assert episode.end == "env_error" and "role='the critic': must have the form" in episode.error
