"""The surroundings of the trainer's loop in its test: rollouts made up, and an engine."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from buffer.errors import RunPausedError
from buffer.redis.client import BufferClosedError
from buffer.run_state import RunState
from buffer.types import TrajectoryGroup
from configs.algorithm_schema import AlgorithmConfig
from configs.schema import BufferConfig, TrainerConfig, WarmStartConfig, WeightSyncConfig
from host.loop_thread import LoopClosedError, LoopThread
from tests.support.blocking import BlockingReplayBuffer
from tests.support.trainer import made_up
from trainer_pool.data.packing import Row
from trainer_pool.types import TrainerSpec
from weight_sync.receiver.client import ReceiverClient

RUN, LOOP_STEPS, GROUPS_PER_STEP, MAX_STALENESS = "trainer-rank-test", 3, 4, 1
SHARDS = 2
LATER_RATE = 5e-4
"""The learning rate of the last step, set after the first."""
TIMEOUT_S = 120.0
PEAK_TFLOPS = 0.5
WEIGHTS_KEY = "a-key"
PROBE_TEXT = [3 + 7 * i % 250 for i in range(40)]
HEAD_TOKENS = 40
"""Two of the rows below in a pass."""


def head_row(number: int) -> Row:
    """One of six sequences, with an advantage and a temperature of its own. The trained tokens of
    every second one were drawn among one to four candidates."""
    dice = np.random.default_rng(number)
    length = 12 + number
    tokens = dice.integers(0, 256, length).astype(np.int32)
    mask = np.array([0, 0, 0] + [1, 1, 0] * length, np.uint8)[:length]
    candidates = (tokens[:, None] + np.array([0, 7, 2, 5])) % 256
    is_one = (mask[:, None] != 0) & (np.arange(4) <= np.arange(length)[:, None] % 4)
    return Row(
        tokens=tokens,
        loss_mask=mask,
        candidates=np.where(is_one, candidates, -1) if number % 2 else None,
        rollout_logprobs=np.zeros(length, np.float32),
        advantages=np.full(length, dice.normal(), np.float32),
        temperatures=np.full(length, 0.7 + 0.1 * number, np.float32),
    )


def loop_spec(folder: Path, redis_url: str) -> TrainerSpec:
    return TrainerSpec(
        config=TrainerConfig(
            num_ranks=2,
            num_steps=10**6,
            groups_per_step=GROUPS_PER_STEP,
            learning_rate=1e-3,
            checkpoint_every=2,
            peak_tflops=PEAK_TFLOPS,
            warm_start=WarmStartConfig(num_steps=2, batch_size=4),
        ),
        algorithm=AlgorithmConfig(),
        weight_sync=WeightSyncConfig(bucket_bytes=20_000, timeout_s=60),
        buffer=BufferConfig(max_staleness=MAX_STALENESS, wait_timeout_s=60, shards=SHARDS),
        model_path=str(folder / "model"),
        trust_remote_code=False,
        redis_url=redis_url,
        run=RUN,
        run_dir=str(folder / "loop-2"),
        seed=0,
        host="127.0.0.1",
        num_threads=1,
        uses_gpu=False,
        serving_dtype="float32",
        weights_key=WEIGHTS_KEY,
        log_rate=1.0,
        max_logprob_diff=math.inf,  # those of the rollouts are made up
    )


class FollowingEngine:
    """An engine, in a thread, that serves what the receiver stages."""

    def __init__(self, redis_url: str, client: ReceiverClient) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._loop = LoopThread("engine")
        self._following = self._loop.run(self._start(redis_url, client))

    async def _start(self, redis_url: str, client: ReceiverClient) -> asyncio.Task[None]:
        self._client = ReceiverClient(client.name, client.url, WEIGHTS_KEY)
        self._run_state = await RunState.connect(redis_url, RUN, BufferConfig(shards=SHARDS))
        await self._run_state.register_receiver(client.name, client.url)
        return asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        version = -1
        while True:
            staged = await self._client.newest(version, timeout_s=TIMEOUT_S)
            if staged is not None:
                version = staged.version
                self.weights = load_file(Path(staged.path) / "model.safetensors")
                await self._run_state.record_commits({"engine-0": version})

    async def _end(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    def close(self) -> None:
        self._loop.stop(self._end(), self._client.close(), self._run_state.close())


def make_group(random: np.random.Generator, group_id: str, version: int) -> TrajectoryGroup:
    trajectories = []
    for i in range(4):
        length = int(random.integers(6, 16))
        mask = (np.arange(length) >= 4).astype(np.uint8)
        trajectories.append(
            made_up.trajectory(
                mask,
                version=version,
                tokens=random.integers(0, 256, length).astype(np.int32),
                rollout_logprobs=mask * np.float32(-np.log(264)),
                reward=float(i % 2),
                episode=i,
            )
        )
    return made_up.group(*trajectories, group_id=group_id, task="made-up")


class MadeUpRollouts:
    """Admits and pushes groups in a thread, as a rollout worker would, until it is closed or the
    run is paused."""

    def __init__(self, url: str, name: str = "group") -> None:
        self._name = name
        settings = BufferConfig(lease_timeout_s=60, shards=SHARDS)
        self._buffer = BlockingReplayBuffer(url, RUN, settings)
        self._thread = threading.Thread(target=self._push_groups)
        self._thread.start()

    def _push_groups(self) -> None:
        random = np.random.default_rng(3)
        try:
            for i in range(10**6):
                admission = self._buffer.admit(f"{self._name}-{i}", TIMEOUT_S)
                self._buffer.push(make_group(random, admission.group_id, admission.version))
        except (BufferClosedError, LoopClosedError, RunPausedError):
            pass

    def close(self) -> None:
        self._buffer.close()
        self._thread.join(30)
