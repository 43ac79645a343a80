"""Puts one rollout worker together from its spec."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from buffer.replay_buffer import ReplayBuffer
from buffer.run_state import RunState
from rollout_pool.cancelling import end_tasks
from rollout_pool.engine_watch import EngineWatch
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.engines.sglang_client import SGLangClient
from rollout_pool.evaluate import Evaluator
from rollout_pool.generate import GroupGenerator
from rollout_pool.generation import Sampling
from rollout_pool.prompts import PromptReader, Tokenizer, load_tokenizer
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.router import Router
from rollout_pool.sampling import Sampler
from rollout_pool.tasks.task import Task, TaskStream, build_task
from rollout_pool.types import RolloutSpec
from rollout_pool.worker import RolloutWorker


class WorkerParts:
    """Owns what a worker uses: `prepare`, then `connect`, then `worker`; `close` at the end."""

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        self._spec = spec
        self._index = index
        self._clients: list[SGLangClient] = []
        self._worker: RolloutWorker | None = None
        self._watching: asyncio.Task[None] | None = None
        log_path = Path(spec.run_dir) / "logs" / f"rewards-{index}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._rewards = RewardPool(
            spec.task,
            num_processes=spec.config.reward_processes,
            timeout_s=spec.config.reward_timeout_s,
            log_path=log_path,
        )
        self._buffer: ReplayBuffer | None = None
        self._state: RunState | None = None
        self._task: Task | None = None
        self._tokenizer: Tokenizer | None = None
        self._position = 0

    @property
    def worker(self) -> RolloutWorker:
        assert self._worker is not None, "connect() comes first"
        return self._worker

    async def prepare(self) -> None:
        """Load task and tokenizer, start the scorers, reach Redis.

        Raises ValueError for a bad task or model, BufferConnectionError for a bad Redis.
        """
        spec = self._spec
        self._task, self._tokenizer, *_ = await asyncio.gather(
            asyncio.to_thread(build_task, spec.task),
            asyncio.to_thread(
                load_tokenizer, spec.model_path, trust_remote_code=spec.trust_remote_code
            ),
            self._rewards.start(),
            self._reach_redis(),
        )

    async def _reach_redis(self) -> None:
        spec = self._spec
        self._buffer = await ReplayBuffer.connect(spec.redis_url, spec.run, spec.buffer)
        self._state = await RunState.connect(spec.redis_url, spec.run, spec.buffer)
        self._position = (await self._state.task_positions()).get(self._index, 0)

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Build the worker on these engines, and follow what they serve.

        Raises ValueError for held-out prompts too long.
        """
        spec, config = self._spec, self._spec.config
        assert self._task and self._tokenizer and self._buffer and self._state, "prepare() first"
        self._clients = [
            SGLangClient(
                engine.name,
                engine.url,
                key=spec.engine_key,
                request_timeout_s=config.engine.request_timeout_s,
                keys_prefix_by_version=config.engine.radix_cache,
            )
            for engine in engines
        ]
        router = Router(self._clients, spec.buffer.wait_timeout_s)
        self._watching = asyncio.create_task(EngineWatch(router, self._state, self._buffer).run())
        reader = PromptReader(self._tokenizer, spec.task, config)
        self._worker = RolloutWorker(
            index=self._index,
            spec=spec,
            task=self._task,
            stream=TaskStream(self._task, self._index, config.num_workers, self._position),
            reader=reader,
            generator=GroupGenerator(
                self._sampler(router, config.sampling.temperature),
                self._rewards,
                self._tokenizer,
                config.group_size,
            ),
            evaluator=Evaluator(
                sampler=self._sampler(router, temperature=0.0),
                rewards=self._rewards,
                tokenizer=self._tokenizer,
                reader=reader,
                task=self._task,
            ),
            buffer=self._buffer,
            state=self._state,
            watching=self._watching,
        )

    def _sampler(self, router: Router, temperature: float) -> Sampler:
        config = self._spec.config
        sampling = Sampling(temperature=temperature, max_new_tokens=config.max_response_tokens)
        return Sampler(router, sampling, config.max_request_retries)

    async def close(self) -> None:
        """End `worker.run`, the scorers and all connections."""
        if self._worker is not None:
            self._worker.stop()
        if self._watching is not None:
            await end_tasks({self._watching})
        await self._rewards.close()
        for client in self._clients:
            await client.close()
        if self._buffer is not None:
            await self._buffer.close()
        if self._state is not None:
            await self._state.close()
