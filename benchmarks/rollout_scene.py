"""What the rollout benchmark runs on: a real engine, a real Redis, and somebody who takes batches.

worker ──► engine          a core for the engine's decoding, the other for all the rest
  │ push
  ▼
Redis ──► consumer ──► new version, committed by the engine (the same weights once more)
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.rollout_work import Job, Lengths, LimitedCompleter, Tally, WorkSize
from buffer.connect import Buffer, connect_buffer
from buffer.redis.server import EmbeddedServer
from buffer.results import Lease
from buffer.run_state import RunState
from configs.choices import OnStale, PauseMode, TaskKind
from configs.rollout_schema import EngineConfig, RolloutConfig, TaskConfig
from configs.schema import BufferConfig, WeightSyncConfig
from rollout_pool.engines.engine import EngineInfo, EngineSpec, SGLangEngine
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.types import RolloutSpec
from rollout_pool.worker.build import WorkerParts
from rollout_pool.worker.loop import RolloutWorker
from trainer_pool.model.scratch import byte_tokenizer

KEY = "k3y-of-the-benchmark"
ENGINE = "engine-0"
TASK = f"{Path(__file__).with_name('rollout_task.py')}:JobTask"
LOOK_S = 0.02


def build_model(size: WorkSize, folder: Path) -> None:
    """Random float32 weights, and a tokenizer of bytes; no token ends an answer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    staged = folder / "staged"
    staged.mkdir()
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, staged / "model.safetensors")


@asynccontextmanager
async def engine_at(folder: Path, size: WorkSize) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(
        EngineSpec(
            name=ENGINE,
            config=EngineConfig(
                max_running_requests=size.max_running, start_timeout_s=300, request_timeout_s=120
            ),
            pause_mode=PauseMode.retract,
            model_path=str(folder),
            trust_remote_code=False,
            host="127.0.0.1",
            log_path=folder / "engine.log",
            leftovers_path=folder / "engine.leftovers",
            num_threads=1,
            uses_gpu=False,
            seed=0,
            key=KEY,
        )
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Commits:
    """New versions of the same weights, taken by the engine as a staged version is taken."""

    def __init__(self, engine: SGLangEngine, staged: Path) -> None:
        self._engine = engine
        self._staged = staged
        self.version = 0

    async def begin(self) -> None:
        """Every strategy begins with weights of version 0."""
        self.version = -1
        await self.next()

    async def next(self) -> None:
        self.version += 1
        client = self._engine.client
        await client.pause(PauseMode.retract)
        try:
            await client.update_from_disk(str(self._staged), self.version, 60.0)
        finally:
            await client.resume()


class _LimitedParts(WorkerParts):
    """A worker of the house, whose samples get their lengths from the work."""

    lengths: Lengths

    def _make_source(self, sampler: Sampler, chat: ChatFormat) -> EpisodeSource:
        return super()._make_source(LimitedCompleter(sampler, self.lengths), chat)  # type: ignore[arg-type]


def _admit_no_more_than(num_jobs: int, worker: RolloutWorker, buffer: Buffer) -> None:
    """The worker starts no new group once all jobs have begun, so that the work has an end."""
    admit = worker._admit

    async def admit_what_is_left() -> None:
        while worker._stream.position >= num_jobs:
            if (await buffer.stats()).retries_waiting:
                break
            await asyncio.sleep(LOOK_S)
        await admit()

    worker._admit = admit_what_is_left  # type: ignore[method-assign]


@dataclass(kw_only=True, slots=True)
class Pool:
    """One worker with its buffer, ready to run."""

    parts: WorkerParts
    buffer: Buffer
    state: RunState
    consumer: Consumer


class Consumer:
    """Takes a batch as soon as there is one, as a trainer that needs no time for a step."""

    def __init__(
        self,
        buffer: Buffer,
        state: RunState,
        commit: Callable[[], object] | None,
        batch_groups: int,
    ) -> None:
        self._buffer, self._state = buffer, state
        self._commit = commit
        self._batch = batch_groups
        self.num_tokens_used = 0

    async def take(self, num_groups: int, tally: Tally) -> None:
        step, version = 0, 0
        while (left := num_groups - len(tally.ends)) > 0:
            lease = await self._buffer.lease(
                step=step + 1,
                version=version,
                num_groups=min(left, self._batch),
                share=0,
                num_shares=1,
                timeout_s=300.0,
            )
            kept = await self._buffer.validate(lease, version)
            await self._buffer.consume(lease, kept)
            await self._buffer.ack(step + 1)
            self._note(lease, kept, tally)
            step, version = step + 1, version + 1
            await self._buffer.publish_version(version)
            if self._commit is not None:
                await self._commit()  # type: ignore[misc]
            await self._state.record_commits({ENGINE: version})

    def _note(self, lease: Lease, kept: frozenset[str], tally: Tally) -> None:
        now = time.perf_counter()
        groups = [group for group in lease.groups if group.group_id in kept]
        tally.used_tokens += sum(group.num_trainable_tokens for group in groups)
        tally.ends += [now] * len(groups)
        tally.num_steps += 1


@asynccontextmanager
async def pool_at(
    folder: Path,
    info: EngineInfo,
    size: WorkSize,
    jobs: Sequence[Job],
    *,
    commits: Commits | None,
    name: str,
    score_s: float = 0.0,
    reward_processes: int = 1,
    max_running: int | None = None,
) -> AsyncIterator[Pool]:
    """A worker at one engine, with Redis, router, sampler, scorer and push as in a real run."""
    # A straggler is waited for before it becomes too old, and nothing is run twice.
    settings = BufferConfig(max_staleness=size.max_staleness, on_stale=OnStale.wait, audit_length=0)
    rollout = RolloutConfig(
        group_size=size.group_size,
        max_prompt_tokens=64,
        max_response_tokens=size.longest,
        max_groups_in_flight=100_000,
        reward_processes=reward_processes,
        log_rate=0.0,
        engine=EngineConfig(max_running_requests=max_running or size.max_running),
    )
    async with AsyncExitStack() as closing:
        work = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        server = EmbeddedServer.start(work / "redis", settings, "127.0.0.1", work / "redis.log")
        closing.callback(server.stop, 10.0)
        buffer = await connect_buffer(server.url, name, settings)
        closing.push_async_callback(buffer.close)
        await buffer.open(settings, size.batch_groups)
        state = await RunState.connect(server.url, name, settings)
        closing.push_async_callback(state.close)
        await state.record_commits({info.name: 0})
        spec = RolloutSpec(
            config=rollout,
            task=TaskConfig(kind=TaskKind.custom, factory=TASK, params={"score_s": score_s}),
            weight_sync=WeightSyncConfig(),
            buffer=settings,
            model_path=str(folder),
            trust_remote_code=False,
            redis_url=server.url,
            run=name,
            run_dir=str(work),
            host="127.0.0.1",
            num_threads=1,
            uses_gpu=False,
            seed=0,
            engine_key=KEY,
            weights_key=KEY,
        )
        scoring = RewardPool(
            spec.task,
            num_processes=reward_processes,
            timeout_s=rollout.reward_timeout_s,
            log_path=work / "rewards.log",
        )
        parts = _LimitedParts(spec, 0, scoring=scoring)
        parts.lengths = Lengths(jobs)
        closing.push_async_callback(parts.close)
        await parts.prepare()
        await parts.connect([info])
        _admit_no_more_than(len(jobs), parts.worker, buffer)
        commit = commits.next if commits is not None else None
        yield Pool(
            parts=parts,
            buffer=buffer,
            state=state,
            consumer=Consumer(buffer, state, commit, size.batch_groups),
        )


async def run_pool(pool: Pool, num_groups: int) -> Tally:
    """Until all groups are delivered. Whatever ends the worker before ends the benchmark."""
    tally = Tally(time.perf_counter())
    running = asyncio.create_task(pool.parts.worker.run())
    taking = asyncio.create_task(pool.consumer.take(num_groups, tally))
    try:
        await asyncio.wait([running, taking], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            raise AssertionError("the worker ended before its work did")
        await taking
    finally:
        taking.cancel()
        pool.parts.worker.stop()
        await asyncio.gather(taking, running, return_exceptions=True)
    counters = await pool.state.counters()
    tally.wasted_tokens = max(0, round(counters.get("tokens_generated", 0)) - tally.used_tokens)
    return tally
