"""The scene of the rollout benchmark: a real engine, a real Redis, and a consumer of batches.

worker ──► engine          a core for the engine's decoding, the other for all the rest
  │ push
  ▼
Redis ──► consumer ──► new version, committed by the engine (the same weights once more)
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file

from benchmarks import KEY
from benchmarks.engines import make_engine, random_qwen3
from benchmarks.rollouts.work import Job, Lengths, LimitedCompleter, Tally, WorkSize, now
from buffer.connect import Buffer, connect_buffer
from buffer.redis.server import EmbeddedServer
from buffer.run_state import RunState
from configs.choices import OnStale, PauseMode, TailPolicy, TaskKind
from configs.rollout_schema import EngineConfig, RolloutConfig, TaskConfig
from configs.schema import BufferConfig, WeightSyncConfig
from processes.child import Child
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.episodes.conversation import Chat
from rollout_pool.sampling.engine_watch import ASK_EVERY_S
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.types import RolloutSpec
from rollout_pool.worker.build import WorkerParts
from rollout_pool.worker.loop import RolloutWorker
from trainer_pool.model.scratch import byte_tokenizer

ENGINE = "engine-0"
TASK = f"{Path(__file__).with_name('task.py')}:JobTask"
LOOK_S = 0.02


def build_model(size: WorkSize, folder: Path) -> None:
    """Random weights, once more as a staged version, and a tokenizer of bytes."""
    model = random_qwen3(
        0,
        vocab_size=264,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden // 4,
        max_position_embeddings=4096,
    )
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "staged").mkdir()
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, folder / "staged" / "model.safetensors")


@asynccontextmanager
async def engines_of(module: str, folder: Path, *words: object) -> AsyncIterator[list[EngineInfo]]:
    """Engines of one other process, which runs this module and prints their ports."""
    command = [sys.executable, "-m", f"benchmarks.rollouts.{module}", *map(str, words)]
    child = Child(command, folder / f"{module}.log", speaks=True)
    try:
        ports = (await child.first_line()).split()
        yield [
            EngineInfo(name=f"engine-{place}", url=f"http://127.0.0.1:{int(port)}", pid=child.pid)
            for place, port in enumerate(ports)
        ]
    finally:
        child.stop(timeout_s=5.0)


@asynccontextmanager
async def engine_at(folder: Path, size: WorkSize) -> AsyncIterator[SGLangEngine]:
    engine = make_engine(
        ENGINE, folder, folder, max_running=size.max_running, pause_mode=PauseMode.retract
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Taking(Protocol):
    async def next(self) -> None:
        """The engines take the next version."""


class Commits:
    """New versions of the same weights, taken by the engine as a staged version is taken."""

    def __init__(self, client: SGLangClient, folder: Path) -> None:
        self._client = client
        self._staged = str(folder / "staged")
        self._version = 0

    async def begin(self) -> None:
        """Every strategy begins with weights of version 0."""
        self._version = -1
        await self.next()

    async def next(self) -> None:
        self._version += 1
        await self._client.pause(PauseMode.retract)
        try:
            await self._client.update_from_disk(self._staged, self._version, 60.0)
        finally:
            await self._client.resume()


class _LimitedParts(WorkerParts):
    """A worker of the house, whose samples get their lengths from the work."""

    lengths: Lengths

    def _make_source(self, sampler: Sampler, chat: Chat) -> EpisodeSource:
        return super()._make_source(LimitedCompleter(sampler, self.lengths), chat)  # type: ignore[arg-type]


def _admit_no_more_than(num_jobs: int, worker: RolloutWorker, buffer: Buffer) -> None:
    """The worker starts no new group once all jobs have begun, so that the work has an end."""
    wait_room = worker.wait_room

    async def room_for_what_is_left(num_samples: int) -> int:
        room = await wait_room(num_samples)
        while (left := num_jobs - worker.stream.position + len(worker._in_hand)) <= 0:
            if (await buffer.stats()).retries_waiting:
                return 1
            await asyncio.sleep(LOOK_S)
        return min(room, left)

    worker.wait_room = room_for_what_is_left


@dataclass(kw_only=True, slots=True)
class Pool:
    """One worker with its buffer, and a consumer that takes batches as soon as there are any."""

    worker: RolloutWorker
    buffer: Buffer
    state: RunState
    commits: Taking | None
    batch_groups: int
    train_s: float = 0.0
    """A training step."""
    token_s: float = 0.0
    """Seconds that a token adds to it."""
    engines: Sequence[str] = (ENGINE,)

    async def run(self, num_groups: int) -> Tally:
        """Until all groups are delivered. Whatever ends the worker before ends the benchmark."""
        tally = Tally(now())
        running = asyncio.create_task(self.worker.run())
        taking = asyncio.create_task(self._take(num_groups, tally))
        try:
            await asyncio.wait([running, taking], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                raise AssertionError("the worker ended before its work did")
            await taking
            counters = await self.state.counters()
            tally.lost_tokens = round(counters.get("tokens_wasted", 0))
        finally:
            taking.cancel()
            self.worker.stop()
            await asyncio.gather(taking, running, return_exceptions=True)
        counters = await self.state.counters()
        tally.wasted_tokens = max(0, round(counters.get("tokens_generated", 0)) - tally.used_tokens)
        return tally

    async def _take(self, num_groups: int, tally: Tally) -> None:
        """As a trainer that needs `train_s` for a step."""
        step = 0
        while (left := num_groups - len(tally.ends)) > 0:
            lease = await self.buffer.lease(
                step=step + 1,
                version=step,
                num_groups=min(left, self.batch_groups),
                share=0,
                num_shares=1,
                timeout_s=300.0,
            )
            kept = await self.buffer.validate(lease, step)
            lengths = [g.num_trainable_tokens for g in lease.groups if g.group_id in kept]
            ages = [step - g.min_version for g in lease.groups if g.group_id in kept]
            await asyncio.sleep(self.train_s + self.token_s * sum(lengths))
            step += 1
            await self.buffer.consume(lease, kept)
            await self.buffer.ack(step)
            tally.deliver(lengths, ages)
            await self.buffer.announce_version(step)
            await self.publish(step)

    async def publish(self, step: int) -> None:
        """The engines take the version, while the trainer waits."""
        if self.commits is not None:
            await self.commits.next()
        await self.state.record_commits(dict.fromkeys(self.engines, step))


@asynccontextmanager
async def pool_at(
    folder: Path,
    info: EngineInfo,
    size: WorkSize,
    jobs: Sequence[Job],
    *,
    name: str,
    commits: Taking | None = None,
    score_s: float = 0.0,
    reward_processes: int = 1,
    tail: TailPolicy = TailPolicy.continue_across_versions,
    load_every_s: float = ASK_EVERY_S,
    train_s: float = 0.0,
    max_groups_in_flight: int = 100_000,
) -> AsyncIterator[Pool]:
    """A worker at one engine, with Redis, router, sampler, scorer and push as in a real run."""
    # A straggler is waited for before it becomes too old, and nothing is run twice.
    # A postponed one would be waited for in vain, so then it runs again.
    on_stale = OnStale.requeue if tail is TailPolicy.postpone else OnStale.wait
    settings = BufferConfig(max_staleness=size.max_staleness, on_stale=on_stale, audit_length=0)
    rollout = RolloutConfig(
        group_size=size.group_size,
        tail=tail,
        max_prompt_tokens=64,
        max_response_tokens=size.longest + size.pauses.turns,  # a token between two turns
        max_groups_in_flight=max_groups_in_flight,
        reward_processes=reward_processes,
        log_rate=0.0,
        engine=EngineConfig(max_running_requests=size.max_running),
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
            task=TaskConfig(
                kind=TaskKind.custom,
                factory=TASK,
                max_turns=size.pauses.turns,
                params={"score_s": score_s, **size.pauses._asdict()},
            ),
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
        parts = _LimitedParts(spec, 0)
        parts.lengths = Lengths(jobs)
        parts.load_every_s = load_every_s
        closing.push_async_callback(parts.close)
        await state.register_engine(info.name, info.url)
        await parts.prepare()
        _admit_no_more_than(len(jobs), parts.worker, buffer)
        yield Pool(
            worker=parts.worker,
            buffer=buffer,
            state=state,
            commits=commits,
            batch_groups=size.batch_groups,
            train_s=train_s,
        )
