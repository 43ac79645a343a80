"""The worker and the trainer of the soak of trained lengths, each a process that may be killed.

The worker is the house's own; a thin layer tells the emulated engine how long each answer is. The
trainer takes over, leases, validates, consumes, publishes, checkpoints and acknowledges in the
order of `trainer_pool.rank`; a checkpoint holds what was trained instead of weights.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import KEY
from buffer.connect import Buffer, connect_buffer
from buffer.results import TaskProgress
from buffer.run_state import RunState
from buffer.types import TrajectoryGroup
from configs.choices import PauseMode
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.episodes.conversation import Chat
from rollout_pool.sampling.engine_watch import ASK_EVERY_S
from rollout_pool.sampling.sample import Clock, Completer, Sample
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.worker import build, stragglers
from tests.soak.crash.checkpoints import write_whole
from tests.soak.lengths.scene import ENGINE, RUN, Draws, Scene
from tests.soak.lengths.task import index_of
from tests.support.buffer.groups import lease_batch
from tests.support.rollout import Letters, place_of

TIMEOUT_S = 60.0


# The worker ---------------------------------------------------------------------------------------


class _DrawnLengths:
    """Completes samples to the lengths that are drawn for them."""

    def __init__(self, completer: Completer, draws: Draws) -> None:
        self._completer = completer
        self._draws = draws
        self._wasted: dict[str, int] = {}
        """Tokens that each sample had lost when its length was drawn."""

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        # It begins, or begins again without the tokens that it had.
        if self._wasted.get(sample.sample_id) != sample.num_wasted:
            self._wasted[sample.sample_id] = sample.num_wasted
            place = (index_of(sample.prompt), place_of(sample), sample.group)
            length = self._draws.draw(*place, again=bool(sample.output_ids))
            sample.max_new_tokens = length
        await self._completer.complete(sample, clock)

    def interrupt(self, sample: Sample) -> None:
        self._completer.interrupt(sample)


class _Parts(build.WorkerParts):
    draws: Draws

    def _read_tokenizer(self) -> None:
        # Bytes, without the seconds that transformers takes to load a tokenizer.
        self._tokenizer, self._num_tokens = Letters(), len(Letters())
        self._end_tokens = frozenset({Letters.eos_token_id})
        self._pictures = None

    def _make_source(self, sampler: Sampler, chat: Chat) -> EpisodeSource:
        return super()._make_source(_DrawnLengths(sampler, self.draws), chat)  # type: ignore[arg-type]


def run_worker(scene: Scene, redis_url: str) -> None:
    """Until SIGTERM."""
    stragglers.LOOK_EVERY_S /= scene.speed  # as the engine's time
    asyncio.run(_run_worker(scene, redis_url))


async def _run_worker(scene: Scene, redis_url: str) -> None:
    parts = _Parts(scene.rollout(redis_url), 0)
    parts.draws = Draws(scene)
    parts.load_every_s = ASK_EVERY_S / scene.speed
    try:
        await parts.prepare()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, parts.worker.stop)
        await parts.worker.run()
    finally:
        await parts.close()


# The trainer --------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Trained:
    """One group that a step trained."""

    step: int
    index: int
    group_id: str
    lengths: tuple[int, ...]
    """Lengths of the group's samples, by place."""
    trainable: tuple[int, ...]
    """The same without tokens that were masked out."""
    num_versions: int
    """From that of its first token to that of its last."""

    @classmethod
    def of(cls, group: TrajectoryGroup, step: int) -> Trained:
        by_place = sorted(group.trajectories, key=lambda trajectory: trajectory.episode)
        of_samples = [one.version_spans for one in by_place]
        return cls(
            step,
            group.prompt.index,
            group.group_id,
            tuple(one.num_tokens - one.prompt_length for one in by_place),
            tuple(one.num_trainable_tokens for one in by_place),
            1 + max(spans[-1].version - spans[0].version for spans in of_samples),
        )


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    step: int = 0
    version: int = 0
    trained: list[Trained] = field(default_factory=list)
    """By all steps so far."""
    unacked: list[str] = field(default_factory=list)
    """Groups that no checkpoint before it contains."""
    progress: TaskProgress = field(default_factory=lambda: TaskProgress(positions={}, untrained=()))
    is_last: bool = False
    """Each of the first prompts is trained or lost."""


def read_checkpoint(scene: Scene) -> Checkpoint | None:
    path = _path(scene)
    return msgspec.json.decode(path.read_bytes(), type=Checkpoint) if path.exists() else None


def _path(scene: Scene) -> Path:
    return scene.folder / "checkpoint.json"


def run_trainer(scene: Scene, redis_url: str, engine: EngineInfo, channel: Any) -> None:
    """Sends each step's number through `channel`; ends when each of the first prompts is trained or
    lost, or after the step in which SIGTERM came. In either case with a checkpoint."""
    asyncio.run(_run_trainer(scene, redis_url, engine, channel))


async def _run_trainer(scene: Scene, redis_url: str, engine: EngineInfo, channel: Any) -> None:
    async with AsyncExitStack() as closing:
        buffer = await connect_buffer(redis_url, RUN, scene.buffer)
        closing.push_async_callback(buffer.close)
        state = await RunState.connect(redis_url, RUN, scene.buffer)
        closing.push_async_callback(state.close)
        client = SGLangClient(engine.name, engine.url, key=KEY, request_timeout_s=TIMEOUT_S)
        closing.push_async_callback(client.close)
        trainer = Trainer(scene, buffer, state, client)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, trainer.stop)
        await state.register_engine(engine.name, engine.url)
        await trainer.take_over()
        while not trainer.is_over:
            await trainer.run_step()
            channel.send(trainer.step)
        await trainer.save()


class Trainer:
    def __init__(self, scene: Scene, buffer: Buffer, state: RunState, client: SGLangClient) -> None:
        self._scene, self._buffer, self._state, self._client = scene, buffer, state, client
        self._restored = read_checkpoint(scene)
        restored = self._restored or Checkpoint()
        self.step, self._version = restored.step, restored.version
        self._trained = restored.trained
        self._unacked: list[str] = []
        self._lineage = secrets.token_hex(6)
        self._history = scene.folder / "newest-version"
        self.is_over = False

    def stop(self) -> None:
        self.is_over = True

    async def take_over(self) -> None:
        restored, history = self._restored, self._history
        newest = max(
            await self._state.trainer_version(),
            int(history.read_text()) if history.exists() else 0,
        )
        if restored is not None and self._version < newest:
            self._version = newest + 1
        await self._buffer.reconcile(
            self._lineage,
            step=self.step,
            version=self._version if restored is None else restored.version,
            resume_version=self._version,
            consumed_group_ids=() if restored is None else restored.unacked,
        )
        await self._publish()
        await self._commit()
        if restored is None:
            await self.save()

    async def run_step(self) -> None:
        scene = self._scene
        lease = await lease_batch(
            self._buffer, self.step + 1, scene.groups_per_step, version=self._version, timeout_s=60
        )
        kept = await self._buffer.validate(lease, self._version)
        if not kept:
            return  # all of it went back or was dropped: lease the step again
        self.step += 1
        self._version += 1
        await self._publish()
        num_consumed = await self._buffer.consume(lease, kept)
        assert num_consumed == len(kept), f"{num_consumed} of {len(kept)} consumed: lease lost"
        self._unacked += kept
        groups = [group for group in lease.groups if group.group_id in kept]
        self._trained += [Trained.of(group, self.step) for group in groups]
        await self._commit()
        if self.step % scene.checkpoint_every == 0:
            await self.save()

    async def save(self) -> None:
        """The checkpoint is durable before its groups are acknowledged."""
        progress = await self._buffer.task_progress(self.step)
        first = range(self._scene.num_prompts)
        is_last = max(progress.positions.values(), default=0) >= len(first)
        is_last = is_last and not any(prompt.index in first for prompt in progress.untrained)
        checkpoint = Checkpoint(
            step=self.step,
            version=self._version,
            trained=self._trained,
            unacked=self._unacked,
            progress=progress,
            is_last=is_last,
        )
        write_whole(_path(self._scene), msgspec.json.encode(checkpoint))
        await self._buffer.ack(self.step, self._lineage)
        self._unacked = []
        self.is_over = self.is_over or is_last

    async def _publish(self) -> None:
        self._history.write_text(str(self._version))
        await self._buffer.announce_version(self._version)

    async def _commit(self) -> None:
        """The engine takes the version."""
        await self._client.pause(PauseMode.retract)
        try:
            await self._client.update_from_disk("none", self._version, TIMEOUT_S)
        finally:
            await self._client.resume()
        await self._state.record_commits({ENGINE: self._version})
