"""`make try TASK=...`: runs a few episodes of a task without a trainer and prints them.

                                     ┌──► ChatModel ────► any OpenAI-compatible URL
    environment, tools ──► EpisodeRunner
                               │     └──► ServedModel ──► an SGLang server, started for them
                               └──► scorer ──► reward and its parts

Environments, tools, bounds and rewards are those of a run. With a model that is served here prompts
and answers are too, token by token. A model behind a URL is asked for whole messages: nothing is
tokenized, and the run's limits in tokens do not apply.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from buffer.types import SamplingParams, VersionSpan
from configs.choices import RewardScope
from configs.load import load_config
from configs.schema import Config
from controller.ray_environment import LOOPBACK
from controller.signals import Stopped
from controller.start.plan import Plan
from controller.start.preflight import (
    check_model,
    check_task,
    pictures_of,
    plan_here,
    tokenizer_of,
)
from controller.units import format_count
from host.printable import printable
from processes.leftovers import temporary_folder
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.engine import Engine, EngineSpec, engine_spec
from rollout_pool.engines.kinds import make_engine
from rollout_pool.episodes.conversation import Chat, Completion, Message, ToolCall, ToolSpec
from rollout_pool.episodes.episode import Episode, EpisodeRequest
from rollout_pool.episodes.renderer import chat_format
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.episodes.template import (
    NO_ARGS,
    as_openai_message,
    as_template_tool,
)
from rollout_pool.episodes.tokenizer import Tokenizer, end_tokens, vocab_size
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.rewards.reward import needs_processes
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.rewards.types import Score
from rollout_pool.sampling.grammars import Grammars
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Clock, Priority, Sample, SampleFailed
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.tasks.agent import find_agent
from rollout_pool.tasks.env_episodes import EnvEpisodes, environment_factory
from rollout_pool.tasks.task import Task, TaskStream
from trainer_pool.model.scratch import build_scratch_model

DEFAULT_KEY = "OPENAI_API_KEY"
ENGINE = "engine"
FOLDER_PREFIX = "leash-try-"
"""In the folder; the lock on it ends with its process, however that ends."""
NO_LIMIT = 10**9
"""Tokens of a limit that never bites."""
STOP_S = 30.0
"""Time to end the server after a signal, before the wait for it is cancelled too."""


Opened = AbstractAsyncContextManager[EpisodeRunner]


def try_task(
    overrides: Sequence[str],
    experiment: str,
    *,
    url: str | None,
    model: str | None,
    key_env: str | None,
    episodes: int,
) -> None:
    """Prints so many episodes of the first training prompts, answered by `model` at `url`.

    Without `url` the launch's model, before any warm start, answers, or the one in the folder
    `model`; it is served here meanwhile. Raises ValueError for a bad task, model or key,
    RuntimeError if an episode has no answer or the server does not start, and Stopped after a
    signal.
    """
    if episodes < 1:
        raise ValueError(f"--episodes={episodes}: must be at least 1")
    if url is not None and model is None:
        raise ValueError(f"--url={url!r}: name the model there, --model=NAME (make: MODEL=NAME)")
    if url is None and key_env is not None:
        raise ValueError(f"--key-env={key_env!r}: is for a server, give --url (make: URL=...) too")
    if url is None and model is not None:
        overrides = [*overrides, "model=pretrained", f"model.path={model}"]
    key = os.environ.get(key_env or DEFAULT_KEY)
    if key_env is not None and not key:
        raise ValueError(f"--key-env={key_env!r}: there is no such environment variable; set it")
    config = load_config(overrides, experiment)
    task = check_task(config.task)
    _refuse_what_needs_a_run(config, task)
    # The runner logs what an environment raises, with its traceback.
    logging.basicConfig(format="%(message)s")
    logging.getLogger(EpisodeRunner.__module__).setLevel(logging.INFO)
    open_model: Callable[[Path], Opened]
    if url is not None and model is not None:
        open_model = partial(
            _behind_url, config, ChatModel(url, model, key, config.task.template_args)
        )
    else:
        plan = plan_here(config)
        check_model(config)
        tokenizer = tokenizer_of(config)
        chat = chat_format(tokenizer, config.task, pictures_of(config))
        open_model = partial(_served_here, plan, chat, tokenizer)
    asyncio.run(_until_signal(_run(config, task, open_model, episodes)))


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Raises Stopped after a signal, once `work` has ended all that it started."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            loop.add_signal_handler(number, asked.set)
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(asked.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        await end_tasks({working}, again_s=STOP_S)
        raise Stopped
    working.result()


@asynccontextmanager
async def _behind_url(config: Config, chat: ChatModel, _: Path) -> AsyncIterator[EpisodeRunner]:
    limits = replace(config.rollout, max_prompt_tokens=NO_LIMIT, max_response_tokens=NO_LIMIT)
    try:
        # A request cannot be interrupted: at the episode's timeout it is cancelled at once.
        yield EpisodeRunner(chat, chat, config.task, limits, heeds_interrupt_s=0)
    finally:
        await chat.close()


@asynccontextmanager
async def _served_here(
    plan: Plan, chat: Chat, tokenizer: Tokenizer, folder: Path
) -> AsyncIterator[EpisodeRunner]:
    """Serves the policy as a run's engine is served, with its files in `folder`."""
    config, uses_gpu = plan.config, plan.devices.engine_gpus > 0
    where = "the GPU" if uses_gpu else "the CPU"
    print(f"starting an SGLang server of {plan.model.label} on {where}", flush=True)
    if config.model.scratch is not None:
        build_scratch_model(config.model.scratch, folder / "model", config.run.seed)
    served = make_engine(served_spec(plan, folder))
    async with AsyncExitStack() as closing:
        closing.push_async_callback(served.stop)
        await served.start()
        if config.model.scratch is not None:
            size = format_count(plan.model.num_params or 0)
            words = "its answers are random; the rewards show that the task works"
            print(f"an untrained model of {size} parameters: {words}", flush=True)
        model = ServedModel(served, config, tokenizer)
        closing.push_async_callback(model.close)
        yield EpisodeRunner(model, chat, config.task, config.rollout)


def served_spec(plan: Plan, folder: Path) -> EngineSpec:
    """As a run's engine is served, with the same context."""
    config = plan.config
    engine = config.rollout.engine
    # As if a trainer had published it.
    engine = replace(engine, extra_args=[*engine.extra_args, "--weight-version", "0"])
    return engine_spec(
        ENGINE,
        replace(config.rollout, engine=engine),
        folder,
        model_path=config.model.path or str(folder / "model"),
        trust_remote_code=config.model.trust_remote_code,
        host=LOOPBACK,
        num_threads=plan.threads_per_process,
        uses_gpu=plan.devices.engine_gpus > 0,
        seed=config.run.seed,
        key=secrets.token_urlsafe(32),
    )


def _refuse_what_needs_a_run(config: Config, task: Task) -> None:
    if find_agent(config.task, task) is not None:
        agent, kind = config.task.agent, config.task.kind.name
        setting = f"task.agent={agent!r}" if agent else f"task.kind={kind}"
        raise ValueError(
            f"{setting}: an agent calls the model by itself; run it against a URL without make try"
        )
    for member, one in config.task.by_name.items():
        for name, reward in one.rewards.items():
            if reward.of is RewardScope.group:
                is_own = member and name not in config.task.rewards
                section = config.task.section_of(member) if is_own else "task"
                raise ValueError(
                    f"{section}.rewards.{name}.of=group: scores all episodes of a prompt together, "
                    "and here each is alone; leave it out"
                )
    for name in config.task.teachers:
        raise ValueError(
            f"task.rewards.{name}.kind=teacher: gives no score but a column for the trainer, "
            "and here is none; leave it out"
        )


async def _run(
    config: Config, task: Task, open_model: Callable[[Path], Opened], num_episodes: int
) -> None:
    rewards = []
    async with AsyncExitStack() as closing:
        folder = closing.enter_context(temporary_folder(FOLDER_PREFIX))
        pool = RewardPool(
            config.task,
            num_processes=int(needs_processes(config.task)),
            timeout_s=config.rollout.reward_timeout_s,
            log_path=folder / "rewards.log",
        )
        closing.push_async_callback(pool.close)
        await pool.start()
        scorer = EpisodeScorer(config.task, task=task, pool=pool)
        closing.push_async_callback(scorer.close)
        runner = await closing.enter_async_context(open_model(folder))
        source = EnvEpisodes(runner, environment_factory(config.task, task))
        prompts = itertools.islice(TaskStream(task, 0, 1), num_episodes)
        for number, prompt in enumerate(prompts, start=1):
            request = EpisodeRequest(
                session=f"episode {number}",
                sampling=SamplingParams(**asdict(config.rollout.sampling)),
                priority=Priority.evaluation,
            )
            episode = await source.run(prompt, request)
            score = await scorer.score(prompt, episode)
            rewards.append(score.reward)
            print(f"episode {number} of {num_episodes}, prompt {prompt.index}")
            print(printable("\n".join(episode_lines(episode, score))), flush=True)
    print(f"mean reward of {num_episodes} episodes: {sum(rewards) / len(rewards):g}")


def episode_lines(episode: Episode, score: Score) -> list[str]:
    """The conversation, the reward with its parts, and how the episode ended."""
    lines = [f"  {message.role}: {_said(message)}" for message in episode.messages]
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    unknown = " without what failed" if score.is_unscored else ""
    if score.left_open is not None:
        unknown = f", but {score.left_open} did not judge it: it would be left out of its group"
    lines.append(f"  -> reward {score.reward:g}{unknown} ({parts})")
    lines += [f"     no {name}: {why}" for name, why in score.failures.items()]
    error = f": {episode.error}" if episode.error else ""
    cut = ", its last answer cut" if episode.branches[-1].finish_reason == "length" else ""
    lines.append(f"     ended by {episode.end}{error}, turns: {episode.num_turns}{cut}")
    return [*lines, ""]


def _said(message: Message) -> str:
    calls = [f"{call.name}({json.dumps(dict(call.arguments))})" for call in message.tool_calls]
    return "\n    ".join([*message.content.splitlines(), *calls])


class ServedModel:
    """The runner's `Completer` at one server: what it does not answer has no other to go to."""

    def __init__(self, engine: Engine, config: Config, tokenizer: Tokenizer) -> None:
        client = engine.client
        limit = config.rollout.engine.max_running_requests
        router = Router([client], config.buffer.wait_timeout_s, max_running_requests=limit)
        router.follow({client.name: 0}, 0, 0)
        self._engine = engine
        model, trust = (engine.spec.model_path, tokenizer), config.model.trust_remote_code
        ends = end_tokens(*model, trust_remote_code=trust)
        grammars = Grammars(tokenizer, vocab_size(*model, trust_remote_code=trust), ends)
        self._sampler = Sampler(router, 0, tokenizer.decode, grammars)
        self.interrupt = self._sampler.interrupt
        self.close = grammars.close

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        """Raises SampleFailed with the end of the server's log if it gives no answer."""
        try:
            await self._sampler.complete(sample, clock)
        except SampleFailed as error:
            raise SampleFailed(
                f"{error}; the last lines of its log:\n{self._engine.log_tail()}"
            ) from error


class ChatModel:
    """The runner's `Completer` and `Chat` in one, for a model that takes and gives messages.

    A token stands for one message of one conversation, so a prompt is a conversation:

        first     [ 0 system, 1 user ]
        complete  [ 0, 1 | 2 assistant ]
        follow    [ 0, 1, 2, 3 tool ]
    """

    def __init__(
        self, url: str, model: str, key: str | None, template_args: Mapping[str, Any] = NO_ARGS
    ) -> None:
        # A server without keys takes any; the client insists on one.
        self._client = AsyncOpenAI(base_url=url, api_key=key or "none")
        self._model = model
        self._template_args = template_args
        self._messages: list[dict[str, Any]] = []
        """By token, in OpenAI's format."""
        self._tools: dict[int, list[Mapping[str, Any]]] = {}
        """Tools of a conversation, by its first token."""
        self._answers: dict[int, Completion] = {}
        """By token."""

    def first_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        tokens = self._added(messages)
        if tools and tokens:
            self._tools[tokens[0]] = [as_template_tool(tool) for tool in tools]
        return tokens

    def next_prompt(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        return [*prompt, *completion, *self._added(messages)]

    def opens_thoughts(self, prompt: Sequence[int], grammar: str) -> bool:
        return False  # the server divides them off

    def parse(
        self,
        output_ids: Sequence[int],
        finish_reason: str,
        prompt: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Completion:
        return self._answers[output_ids[-1]]

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        """Raises SampleFailed if the server gives no answer."""
        asked: dict[str, Any] = {
            "model": self._model,
            "messages": [self._messages[token] for token in sample.prompt],
            "temperature": sample.sampling.temperature,
        }
        if tools := self._tools.get(sample.prompt[0]):
            asked["tools"] = tools
        if sample.max_new_tokens < NO_LIMIT // 2:  # task.max_turn_tokens
            asked["max_tokens"] = sample.max_new_tokens
        if self._template_args:  # as SGLang and vLLM call them
            asked["extra_body"] = {"chat_template_kwargs": self._template_args}
        if sample.stop:
            asked["stop"] = list(sample.stop)
        try:
            reply = await self._client.chat.completions.create(**asked)
            choice = reply.choices[0]
        except (OpenAIError, IndexError, TypeError) as error:
            why = f"{error} {error.__cause__ or ''}".strip()
            raise SampleFailed(
                f"{self._client.base_url}: no answer from {self._model!r}: {why}"
            ) from error
        answer = read_answer(choice.message, choice.finish_reason)
        message = Message(role="assistant", content=answer.content, tool_calls=answer.tool_calls)
        [token] = self._added([message])
        self._answers[token] = answer
        sample.output_ids, sample.logprobs = [token], [0.0]
        sample.version_spans = [VersionSpan(version=0, start=0, end=1)]
        sample.finish_reason = answer.finish_reason

    def interrupt(self, sample: Sample) -> None:
        return

    async def close(self) -> None:
        await self._client.close()

    def _added(self, messages: Sequence[Message]) -> list[int]:
        begin = len(self._messages)
        self._messages += [as_request_message(message) for message in messages]
        return list(range(begin, len(self._messages)))


def as_request_message(message: Message) -> dict[str, Any]:
    written = as_openai_message(message)
    if message.role == "tool" and message.tool_call_id is None:
        written["role"] = "user"  # to a call that could not be read, and so has no id
    return written


def read_answer(message: Any, finish_reason: str) -> Completion:
    """A server's answer. A call that is no JSON object stays in the text, as the model wrote it."""
    content, calls, bad_call = message.content or "", [], None
    for call in message.tool_calls or []:
        name, arguments = call.function.name, call.function.arguments
        try:
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict):
                raise ValueError("its arguments are no object")
        except ValueError as error:
            bad_call = bad_call or f"{name}: {error}"
            content += f"\n{name}({arguments})"
        else:
            calls.append(ToolCall(call_id=call.id, name=name, arguments=given))
    return Completion(
        text=content,
        content=content.lstrip("\n"),
        tool_calls=tuple(calls),
        bad_call=bad_call,
        finish_reason="length" if finish_reason == "length" else "stop",
    )
