"""Builds one rollout worker from its spec."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from opentelemetry import trace

from buffer.connect import Buffer, connect_buffer
from buffer.run_state import RunState
from configs.choices import TaskKind
from rollout_pool.cancelling import end_tasks
from rollout_pool.endpoint.agents import AgentRunner
from rollout_pool.endpoint.app import Endpoint
from rollout_pool.endpoint.sessions import Serving
from rollout_pool.engines.kinds import make_client
from rollout_pool.episodes.conversation import Chat
from rollout_pool.episodes.renderer import chat_format
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.episodes.tokenizer import Tokenizer, end_tokens, load_tokenizer, vocab_size
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.rewards.reward import needs_processes
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.rewards.types import ScoringPool
from rollout_pool.sampling.engine_watch import ASK_EVERY_S, EngineWatch
from rollout_pool.sampling.grammars import Grammars
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.sampling.tracing import open_tracing
from rollout_pool.sandbox.containers import wait_removed
from rollout_pool.sandbox.remote_container import make_container
from rollout_pool.tasks.agent import AgentTask, find_agent
from rollout_pool.tasks.env_episodes import EnvEpisodes, environment_factory
from rollout_pool.tasks.registry import build_task, check_data
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Task, TaskStream
from rollout_pool.types import RolloutSpec
from rollout_pool.worker.counters import Counters
from rollout_pool.worker.evaluate import evaluator_of
from rollout_pool.worker.loop import RolloutWorker
from rollout_pool.worker.prompt_filter import PromptFilter
from rollout_pool.worker.record import RolloutLog
from rollout_pool.worker.report import WorkerReporter
from tensors.pictures import PictureProcessor

YOUNG_OBJECTS = 20_000
"""New ones that Python collects garbage among."""


class WorkerParts:
    """Builds a worker and owns its parts.

    parts = WorkerParts(spec, index=0)
    await parts.prepare()
    report = await parts.worker.run()
    await parts.close()
    """

    worker: RolloutWorker
    """Set by `prepare`, like the private attributes below."""
    _buffer: Buffer
    _state: RunState
    _task: Task
    _tokenizer: Tokenizer
    _num_tokens: int
    _end_tokens: frozenset[int]
    _pictures: PictureProcessor | None
    load_every_s = ASK_EVERY_S

    def __init__(
        self,
        spec: RolloutSpec,
        index: int,
        *,
        scoring: ScoringPool | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """`scoring`: None starts scoring processes of the worker itself. `host`: address of its
        endpoint, if it has one."""
        self._spec = spec
        self._index = index
        self._host = host
        self._scoring = scoring or self._own_scoring()
        self._agents: AgentRunner | None = None
        self._closing = AsyncExitStack()
        """Closes what was opened, the last first."""

    def _own_scoring(self) -> RewardPool:
        task, config = self._spec.task, self._spec.config
        return RewardPool(
            task,
            num_processes=config.reward_processes if needs_processes(task) else 0,
            timeout_s=config.reward_timeout_s,
            log_path=Path(self._spec.run_dir) / "logs" / f"rewards-{self._index}.log",
            data=self._spec.data,
        )

    async def prepare(self) -> None:
        """Load task and tokenizer, start the scorers, connect to Redis, build the worker. It
        connects to the run's engines as they come.

        Raises ValueError for a bad task or model, if all held-out prompts are too long, or if an
        environment, agent or reward cannot be loaded, or if rollout.openai.port is taken, and
        BufferConnectionError for a bad Redis.
        """
        self._closing.push_async_callback(self._scoring.close)
        self._task, *_ = await asyncio.gather(
            asyncio.to_thread(self._build_task),
            asyncio.to_thread(self._read_tokenizer),
            self._scoring.start(),
            self._reach_redis(),
        )
        if (endpoint := self._spec.config.trace_endpoint) is not None:
            tracing = open_tracing(endpoint, self._spec.run, f"worker-{self._index}")
            self._closing.push_async_callback(asyncio.to_thread, tracing.shutdown)
            trace.set_tracer_provider(tracing)
        await self._build()
        # Else each full collection goes through all that was imported, and holds the loop for half
        # a second.
        gc.collect()
        gc.freeze()
        self._closing.callback(gc.unfreeze)  # libraries complain of what is left at the exit
        # A group's samples are thousands of objects that live until its end, and few are cycles.
        self._closing.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(YOUNG_OBJECTS)

    def _build_task(self) -> Task:
        task = build_task(self._spec.task)
        check_data(self._spec.task, task, self._spec.data)
        return task

    def _read_tokenizer(self) -> None:
        path, trust = self._spec.model_path, self._spec.trust_remote_code
        self._tokenizer = load_tokenizer(path, trust_remote_code=trust)
        self._num_tokens = vocab_size(path, self._tokenizer, trust_remote_code=trust)
        self._end_tokens = end_tokens(path, self._tokenizer, trust_remote_code=trust)
        self._pictures = PictureProcessor.of(path, trust_remote_code=trust)

    async def _reach_redis(self) -> None:
        spec = self._spec
        self._buffer = await connect_buffer(spec.redis_url, spec.run, spec.buffer, waits=True)
        self._closing.push_async_callback(self._buffer.close)
        self._state = await RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)
        self._closing.push_async_callback(self._state.close)

    async def _build(self) -> None:
        spec, config = self._spec, self._spec.config
        router = Router(
            [],
            spec.buffer.wait_timeout_s,
            max_running_requests=config.engine.max_running_requests,
            num_workers=config.num_workers,
        )
        log_path = Path(spec.run_dir) / "logs" / f"grammars-{self._index}.log"
        grammars = Grammars(self._tokenizer, self._num_tokens, self._end_tokens, log_path)
        self._closing.push_async_callback(grammars.close)
        sampler = Sampler(router, config.max_request_retries, self._tokenizer.decode, grammars)
        chat = await asyncio.to_thread(chat_format, self._tokenizer, spec.task, self._pictures)
        counters = Counters(self._state)
        endpoint = await self._open_endpoint(sampler, grammars, chat, counters)
        if any(one.kind is TaskKind.repository for one in spec.task.by_name.values()):
            self._closing.push_async_callback(wait_removed)
            await make_container(spec.task.container).sweep()
        source = self._make_source(sampler, chat)
        scorer = EpisodeScorer(spec.task, task=self._task, pool=self._scoring)
        self._closing.push_async_callback(scorer.close)
        prompt_filter = PromptFilter(chat, spec.task, config)
        watch = EngineWatch(
            router,
            self._state,
            self._buffer,
            partial(
                make_client,
                spec=spec,
                vocab_size=self._num_tokens,
                end_tokens=self._end_tokens,
                pictures=None if self._pictures is None else self._pictures.tokens,
            ),
            self.load_every_s,
        )
        self._closing.push_async_callback(watch.close)
        reporter = WorkerReporter(
            index=self._index,
            num_workers=config.num_workers,
            state=self._state,
            waited_for_rewards_s=lambda: scorer.waited_s,
            scoring=lambda: scorer.num_open,
            clients=watch.connections,
            router=router,
            sampler=sampler,
        )
        services = [asyncio.create_task(watch.run()), asyncio.create_task(reporter.run())]
        self._closing.push_async_callback(end_tasks, services)
        position = (await self._state.task_positions()).get(self._index, 0)
        self.worker = RolloutWorker(
            index=self._index,
            spec=spec,
            task=self._task,
            stream=TaskStream(self._task, self._index, config.num_workers, position),
            prompt_filter=prompt_filter,
            scorer=scorer,
            episode_source=source,
            # With an agent the endpoint refuses requests for groups.
            external_groups=None if self._agents or not endpoint else endpoint.groups,
            evaluator=evaluator_of(
                spec.task,
                config.eval,
                [p for p in self._task.eval_prompts() if prompt_filter.accepts(p)],
                episode_source=source,
                scorer=scorer,
            ),
            buffer=self._buffer,
            state=self._state,
            services=[*services, *([endpoint.serving] if endpoint and endpoint.serving else [])],
            completer=sampler,
            wait_room=router.wait_room,
            counters=counters,
            group_log=RolloutLog(
                Path(spec.run_dir), f"worker-{self._index}", config.log_rate, spec.seed
            ),
        )
        self._closing.callback(self.worker.stop)

    async def _open_endpoint(
        self, sampler: Sampler, grammars: Grammars, chat: Chat, counters: Counters
    ) -> Endpoint | None:
        """Starts the OpenAI-compatible endpoint, if the settings or an agent need it."""
        spec, port = self._spec, self._spec.config.openai.port
        agent = find_agent(spec.task, self._task)
        if port is None and agent is None:
            return None
        serving = Serving(
            completer=sampler,
            chat=chat,
            tokenizer=self._tokenizer,
            task=spec.task,
            rollout=spec.config,
            grammars=grammars,
            vocab_size=self._num_tokens,
            count=counters.add,
            group_state=self._buffer.group_state,
        )
        endpoint = Endpoint(serving, host=self._host, port=port + self._index if port else 0)
        self._closing.push_async_callback(endpoint.close)
        if agent is not None:
            task = spec.task
            setting = f"agent={task.agent!r}" if task.agent else f"kind={task.kind.name}"
            endpoint.groups.none_because = (
                f"task.{setting}: its agent runs all groups of this run, and a program of your own "
                "gets none; to run them with your program, launch the task without an agent"
            )
        await endpoint.start()
        endpoint.write_address(Path(spec.run_dir) / "openai" / f"worker-{self._index}.json")
        if isinstance(self._task, AgentTask):
            self._closing.push_async_callback(self._task.close)
            await self._task.start()
        if agent is not None:
            self._agents = AgentRunner(agent, endpoint.sessions, endpoint.url)
            self._closing.push_async_callback(self._agents.close)
        return endpoint

    def _make_source(self, sampler: Sampler, chat: Chat) -> EpisodeSource:
        if self._agents is not None:
            return self._agents
        runner = EpisodeRunner(sampler, chat, self._spec.task, self._spec.config)
        return EnvEpisodes(runner, environment_factory(self._spec.task, self._task))

    async def close(self) -> None:
        """End `worker.run`, the scorers and all connections."""
        await self._closing.aclose()
