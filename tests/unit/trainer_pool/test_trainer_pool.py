"""The trainer pool as a whole: Ray actors, a real buffer, and an engine that really receives.

Rollouts come from this process: made-up tokens, admitted and pushed as a rollout worker would.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buffer.redis.server import EmbeddedServer
from buffer.redis.wakeups import BufferClosedError
from buffer.results import BufferStats
from buffer.run_state import STREAM_START, RunState
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from configs.schema import (
    BufferConfig,
    ScratchModelConfig,
    TrainerConfig,
    WarmStartConfig,
    WeightSyncConfig,
)
from tests.support.blocking import BlockingReplayBuffer, BlockingRunState
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.pool import TrainerPool
from trainer_pool.state.checkpoint import CheckpointStore
from trainer_pool.types import SupervisedExample, TrainerSpec, TrainReport, WarmStartReport
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import PublishReport, ReceiverSpec

pytestmark = pytest.mark.slow

RUN, GROUPS_PER_STEP, MAX_STALENESS = "trainer-pool-test", 4, 1
TIMEOUT_S = 120.0
WEIGHTS_KEY = "a-key"


class ReceivingEngine:
    """A receiver's process and, in a thread here, an engine that serves what it stages."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._redis_url = redis_url
        spec = ReceiverSpec(
            name="node-0",
            host="127.0.0.1",
            folder=str(folder / "staged"),
            num_slots=2,
            num_buffers=2,
            timeout_s=60.0,
            min_bandwidth=50e6,
            key=WEIGHTS_KEY,
        )
        self._receiver = ReceiverProcess(spec, folder / "receiver.log")
        self.weights: dict[str, torch.Tensor] = {}
        self._loop = asyncio.new_event_loop()
        self._following = self._loop.create_task(self._follow())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._following)
        self._loop.close()

    async def _follow(self) -> None:
        info = await self._receiver.start()
        run_state = await RunState.connect(self._redis_url, RUN, BufferConfig())
        client = ReceiverClient(info.name, info.url, WEIGHTS_KEY)
        version = -1
        try:
            await run_state.register_receiver(info.name, info.url)
            while True:
                staged = await client.newest(version, timeout_s=TIMEOUT_S)
                if staged is not None:
                    version = staged.version
                    self.weights = load_file(Path(staged.path) / "model.safetensors")
                    await run_state.record_commits({"engine-0": version})
        finally:
            await client.close()
            await run_state.close()
            await self._receiver.stop()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._following.cancel)
        self._thread.join(30)


def make_group(random: np.random.Generator, group_id: str, version: int) -> TrajectoryGroup:
    trajectories = []
    for i in range(4):
        length = int(random.integers(6, 16))
        mask = (np.arange(length) >= 4).astype(np.uint8)
        trajectories.append(
            Trajectory(
                tokens=random.integers(0, 256, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=mask * np.float32(-np.log(264)),
                version_spans=(VersionSpan(version=version, start=4, end=length),),
                prompt_length=4,
                reward=float(i % 2),
                finish_reason="stop",
                episode=i,
            )
        )
    prompt = PromptRef(task="made-up", index=0)
    return TrajectoryGroup(group_id=group_id, prompt=prompt, trajectories=tuple(trajectories))


class MadeUpRollouts:
    """Admits and pushes groups in a thread until it is closed."""

    def __init__(self, url: str) -> None:
        self._buffer = BlockingReplayBuffer(url, RUN, BufferConfig(lease_timeout_s=60))
        self._thread = threading.Thread(target=self._push_groups)
        self._thread.start()

    def _push_groups(self) -> None:
        random = np.random.default_rng(3)
        try:
            for i in range(10**6):
                version = self._buffer.admit(f"group-{i}", TIMEOUT_S).version
                self._buffer.push(make_group(random, f"group-{i}", version))
        except BufferClosedError:
            pass

    def close(self) -> None:
        self._buffer.close()
        self._thread.join(30)


def assert_all_died(deaths: dict[str, Any]) -> None:
    for name, ref in deaths.items():
        with pytest.raises(RayActorError):
            raise AssertionError(f"{name}: {ray.get(ref, timeout=TIMEOUT_S)}")


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Everything that a short run left behind."""

    run_dir: Path
    warm_start: dict[str, WarmStartReport]
    initial: dict[str, PublishReport]
    reports: dict[str, TrainReport]
    records: list[dict[str, Any]]
    waits: dict[tuple[str, str], float]
    stats: BufferStats
    engine_weights: dict[str, torch.Tensor]


def make_spec(run_dir: Path, redis_url: str) -> TrainerSpec:
    build_scratch_model(
        ScratchModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, head_dim=16),
        run_dir / "model",
        seed=0,
    )
    return TrainerSpec(
        config=TrainerConfig(
            num_ranks=2,
            num_steps=10**6,
            groups_per_step=GROUPS_PER_STEP,
            learning_rate=1e-3,
            checkpoint_every=2,
            warm_start=WarmStartConfig(num_steps=2, batch_size=4),
        ),
        weight_sync=WeightSyncConfig(bucket_bytes=20_000, timeout_s=60),
        buffer=BufferConfig(max_staleness=MAX_STALENESS, wait_timeout_s=60),
        model_path=str(run_dir / "model"),
        trust_remote_code=False,
        redis_url=redis_url,
        run=RUN,
        run_dir=str(run_dir),
        seed=0,
        host="127.0.0.1",
        num_threads=1,
        uses_gpu=False,
        serving_dtype="float32",
        weights_key=WEIGHTS_KEY,
    )


def wait_for_steps(run_state: BlockingRunState, num_steps: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    last = STREAM_START
    while len(records) < num_steps:
        entries = run_state.read_metrics(last, TIMEOUT_S)
        assert entries, "no step within the time limit"
        records += [dict(entry.record) for entry in entries if entry.kind == "step"]
        last = entries[-1].id
    return records


def results_of(refs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(refs, ray.get(list(refs.values()), timeout=TIMEOUT_S), strict=True))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """Warm start, version 0, three steps or more, stop."""
    run_dir = tmp_path_factory.mktemp("run")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    server = EmbeddedServer.start(
        run_dir / "redis", BufferConfig(), "127.0.0.1", run_dir / "redis.log"
    )
    bundles = placement_group([{"CPU": 0.5}] * 2)
    spec = make_spec(run_dir, server.url)
    buffer = BlockingReplayBuffer(server.url, RUN, spec.buffer)
    run_state = BlockingRunState(server.url, RUN, spec.buffer)
    buffer.open(spec.buffer, GROUPS_PER_STEP)
    engine = ReceivingEngine(server.url, run_dir)
    try:
        pool = TrainerPool.create(spec, bundles)
        (rendezvous,) = results_of(pool.open_rendezvous()).values()
        results_of(pool.start(rendezvous))
        example = SupervisedExample(
            tokens=np.arange(65, 75, dtype=np.int32), loss_mask=np.ones(10, np.uint8)
        )
        example.loss_mask[0] = 0
        warm_start = results_of(pool.warm_start([example]))
        results_of(pool.connect())
        initial = results_of(pool.publish_initial())
        rollouts = MadeUpRollouts(server.url)
        training = pool.train()
        records = wait_for_steps(run_state, 3)
        results_of(pool.stop())
        reports = results_of(training)
        rollouts.close()
        yield Outcome(
            run_dir=run_dir,
            warm_start=warm_start,
            initial=initial,
            reports=reports,
            records=records,
            waits=run_state.waits(),
            stats=buffer.stats(),
            engine_weights=engine.weights,
        )
        deaths = pool.deaths()
        pool.close(timeout_s=20)
        assert_all_died(deaths)
    finally:
        engine.close()
        buffer.close()
        run_state.close()
        remove_placement_group(bundles)
        ray.shutdown()
        server.stop(10)


def test_stop_ends_all_ranks_after_the_same_step(outcome: Outcome) -> None:
    first, second = outcome.reports.values()
    assert first.was_stopped and second.was_stopped
    assert first.num_steps == second.num_steps == first.version >= 3


def test_engine_has_the_final_weights(outcome: Outcome) -> None:
    model = AutoModelForCausalLM.from_pretrained(outcome.reports["trainer-0"].export_dir)
    names = {name for name, _ in model.named_parameters()}
    assert names == set(outcome.engine_weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), outcome.engine_weights[name]), name
    reports = outcome.initial.values()
    assert [report.version for report in reports] == [0, 0]
    num_bytes = sum(weights.nbytes for weights in outcome.engine_weights.values())
    assert sum(report.num_bytes for report in reports) == num_bytes


def test_trained_groups_are_acked_and_within_the_leash(outcome: Outcome) -> None:
    stats, num_steps = outcome.stats, outcome.reports["trainer-0"].num_steps
    assert stats.is_conserved
    assert stats.acked == num_steps * GROUPS_PER_STEP and stats.consumed == 0
    assert stats.trainer_version == num_steps
    assert stats.engine_versions == {"engine-0": num_steps}
    assert stats.max_staleness_trained is not None
    assert stats.max_staleness_trained <= MAX_STALENESS


def test_last_checkpoint_contains_the_last_step(outcome: Outcome) -> None:
    latest = CheckpointStore(outcome.run_dir / "checkpoints").latest()
    assert latest is not None
    folder, state = latest
    assert state.step == state.version == outcome.reports["trainer-0"].num_steps
    assert len(state.consumed_group_ids) in (GROUPS_PER_STEP, 2 * GROUPS_PER_STEP)
    assert len(list((folder / "zero3").glob("*optim_states.pt"))) == 2


def test_checkpoint_is_read_as_a_whole_model_as_documented(outcome: Outcome) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    code = re.findall(r"^    (.*get_fp32_state_dict_from_zero_checkpoint.*)$", page, re.MULTILINE)
    assert len(code) == 2
    latest = CheckpointStore(outcome.run_dir / "checkpoints").latest()
    assert latest is not None
    names: dict[str, Any] = {}
    exec("\n".join(code).replace("runs/NAME/checkpoints/step-000050", str(latest[0])), names)
    for name, weights in outcome.engine_weights.items():
        read = names["weights"][name]
        assert read.dtype == torch.float32 and torch.equal(read.to(weights.dtype), weights), name


def test_each_step_is_recorded_with_its_times(outcome: Outcome) -> None:
    for number, record in enumerate(outcome.records, start=1):
        assert record["step"] == number and record["version"] == number - 1
        assert record["num_groups"] == GROUPS_PER_STEP and record["num_tokens"] > 0
        assert record["reward_mean"] == 0.5 and record["lr"] == pytest.approx(1e-3)
        assert record["staleness_max"] <= MAX_STALENESS
        for name in ("lease_wait_s", "step_s", "snapshot_s", "snapshot_wait_s", "checkpoint_s"):
            assert record[name] >= 0
    assert {("trainer", "rollout"), ("trainer", "weight_sync")} <= outcome.waits.keys()


def test_warm_start_lowers_the_loss(outcome: Outcome) -> None:
    first, second = outcome.warm_start.values()
    assert first.loss_last < first.loss_first == second.loss_first
    assert first.num_steps == 2
