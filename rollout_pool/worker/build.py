"""Builds one rollout worker from its spec."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from buffer.connect import Buffer, connect_buffer
from buffer.run_state import RunState
from rollout_pool.cancelling import end_tasks
from rollout_pool.endpoint.agents import AgentRunner, find_agent
from rollout_pool.endpoint.app import Endpoint
from rollout_pool.endpoint.sessions import Serving
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.episodes.tokenizer import Tokenizer, load_tokenizer, vocab_size
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.rewards.scorer import EpisodeScorer, needs_processes
from rollout_pool.rewards.types import ScoringPool
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.sampling.watch import EngineWatch, LoadPoller
from rollout_pool.tasks.environments import EnvEpisodes, environment_factory
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Task, TaskStream
from rollout_pool.types import RolloutSpec
from rollout_pool.worker.evaluate import Evaluator
from rollout_pool.worker.loop import PromptReader, RolloutWorker
from rollout_pool.worker.record import RolloutLog

REPORT_WAITS_S = 2.0


class WorkerParts:
    """Owns a worker's parts. Call `prepare`, `connect`, then use `worker`; `close` at the end."""

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
        self._clients: list[SGLangClient] = []
        self._worker: RolloutWorker | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._scoring = scoring or self._own_scoring()
        self._scorer: EpisodeScorer | None = None
        self._endpoint: Endpoint | None = None
        self._agents: AgentRunner | None = None
        self._buffer: Buffer | None = None
        self._state: RunState | None = None
        self._task: Task | None = None
        self._tokenizer: Tokenizer | None = None
        self._vocab_size = 0
        self._position = 0

    def _own_scoring(self) -> RewardPool:
        task, config = self._spec.task, self._spec.config
        return RewardPool(
            task,
            num_processes=config.reward_processes if needs_processes(task) else 0,
            timeout_s=config.reward_timeout_s,
            log_path=Path(self._spec.run_dir) / "logs" / f"rewards-{self._index}.log",
        )

    @property
    def worker(self) -> RolloutWorker:
        assert self._worker is not None, "connect() comes first"
        return self._worker

    async def prepare(self) -> None:
        """Load task and tokenizer, start the scorers, connect to Redis.

        Raises ValueError for a bad task or model, BufferConnectionError for a bad Redis.
        """
        spec = self._spec
        self._task, tokenizer, *_ = await asyncio.gather(
            asyncio.to_thread(build_task, spec.task),
            asyncio.to_thread(
                load_tokenizer, spec.model_path, trust_remote_code=spec.trust_remote_code
            ),
            self._scoring.start(),
            self._reach_redis(),
        )
        self._vocab_size = await asyncio.to_thread(
            vocab_size, spec.model_path, tokenizer, trust_remote_code=spec.trust_remote_code
        )
        self._tokenizer = tokenizer

    async def _reach_redis(self) -> None:
        spec = self._spec
        self._buffer = await connect_buffer(spec.redis_url, spec.run, spec.buffer)
        self._state = await RunState.connect(spec.redis_url, spec.run, spec.buffer)
        self._position = (await self._state.task_positions()).get(self._index, 0)

    async def note_restart(self) -> None:
        """Record that this worker was restarted."""
        assert self._state is not None, "prepare() first"
        await self._state.count("workers_restarted")

    async def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Build the worker on these engines, and follow their versions.

        Raises ValueError if all held-out prompts are too long or an environment, agent or reward
        cannot be loaded, and OSError naming rollout.openai.port if that is taken.
        """
        spec, config = self._spec, self._spec.config
        assert self._task and self._tokenizer and self._buffer and self._state, "prepare() first"
        router = self._make_router(engines)
        sampler = Sampler(router, config.max_request_retries)
        chat = ChatFormat(
            self._tokenizer,
            chat_template=spec.task.chat_template,
            tool_parser=spec.task.tool_parser,
        )
        await self._open_endpoint(sampler, chat)
        source = self._make_source(sampler, chat)
        self._scorer = EpisodeScorer(spec.task, task=self._task, pool=self._scoring)
        reader = PromptReader(chat, spec.task, config)
        self._tasks = [
            asyncio.create_task(
                EngineWatch(
                    router, self._state, self._buffer, LoadPoller(router, self._clients)
                ).run()
            ),
            asyncio.create_task(self._report_waits(self._scorer, self._state)),
        ]
        # With an agent the endpoint offers no groups to external programs.
        external = None if self._agents or not self._endpoint else self._endpoint.groups
        self._worker = RolloutWorker(
            index=self._index,
            spec=spec,
            task=self._task,
            stream=TaskStream(self._task, self._index, config.num_workers, self._position),
            reader=reader,
            scorer=self._scorer,
            source=source,
            external=external,
            evaluator=Evaluator(
                source=source,
                scorer=self._scorer,
                prompts=[p for p in self._task.eval_prompts() if reader.accepts(p)],
                config=config,
            ),
            buffer=self._buffer,
            state=self._state,
            watching=self._tasks,
            interrupter=sampler,
            group_log=RolloutLog(
                Path(spec.run_dir), f"worker-{self._index}", config.log_rate, spec.seed
            ),
        )

    def _make_router(self, engines: Sequence[EngineInfo]) -> Router:
        spec, engine_config = self._spec, self._spec.config.engine
        self._clients = [
            SGLangClient(
                engine.name,
                engine.url,
                key=spec.engine_key,
                request_timeout_s=engine_config.request_timeout_s,
                keys_prefix_by_version=engine_config.radix_cache,
                vocab_size=self._vocab_size,
            )
            for engine in engines
        ]
        return Router(
            self._clients,
            spec.buffer.wait_timeout_s,
            max_running_requests=engine_config.max_running_requests,
            num_workers=spec.config.num_workers,
        )

    async def _open_endpoint(self, sampler: Sampler, chat: ChatFormat) -> None:
        """Starts the OpenAI-compatible endpoint, if the settings or an agent need it."""
        spec, port = self._spec, self._spec.config.openai.port
        assert self._task and self._tokenizer, "prepare() first"
        agent = find_agent(spec.task, self._task)
        if port is None and agent is None:
            return
        serving = Serving(
            completer=sampler,
            chat=chat,
            tokenizer=self._tokenizer,
            task=spec.task,
            rollout=spec.config,
            vocab_size=self._vocab_size,
        )
        self._endpoint = Endpoint(serving, host=self._host, port=port + self._index if port else 0)
        await self._endpoint.start()
        folder = Path(spec.run_dir) / "openai"
        self._endpoint.write_address(folder / f"worker-{self._index}.json")
        if agent is not None:
            self._agents = AgentRunner(agent, self._endpoint.sessions, self._endpoint.url)

    def _make_source(self, sampler: Sampler, chat: ChatFormat) -> EpisodeSource:
        if self._agents is not None:
            return self._agents
        assert self._task, "prepare() first"
        runner = EpisodeRunner(sampler, chat, self._spec.task, self._spec.config)
        return EnvEpisodes(runner, environment_factory(self._spec.task, self._task))

    async def _report_waits(self, scorer: EpisodeScorer, state: RunState) -> None:
        """Reports the waits for a scoring process, which `make status` shows."""
        reported = 0.0
        while True:
            await asyncio.sleep(REPORT_WAITS_S)
            waited = scorer.waited_s
            if waited > reported:
                await state.add_wait("rollout", "rewards", waited - reported)
                reported = waited

    async def close(self) -> None:
        """End `worker.run`, the scorers and all connections."""
        if self._worker is not None:
            self._worker.stop()
        await end_tasks(self._tasks)
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._agents is not None:
            await self._agents.close()
        if self._scorer is not None:
            await self._scorer.close()
        await self._scoring.close()
        for client in self._clients:
            await client.close()
        if self._buffer is not None:
            await self._buffer.close()
        if self._state is not None:
            await self._state.close()
