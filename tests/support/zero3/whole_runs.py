"""Four steps with a checkpoint, whose weights two ranks publish; resumed, and offloaded."""

from __future__ import annotations

import json
from pathlib import Path

from configs.schema import WeightSyncConfig
from tests.support.trainer.loop_scene import WEIGHTS_KEY
from tests.support.zero3.batches import examples
from tests.support.zero3.scene import NUM_STEPS, SAVE_AFTER, Scene
from tests.support.zero3.skipped_updates import step_with_nan, step_without_gradient
from trainer_pool.warm_start import warm_start
from weight_sync.engine import CheckpointEngine
from weight_sync.types import Record


class NoticeBoard:
    """A board in memory, beside which every engine serves what is published."""

    def __init__(self, receivers: dict[str, str]) -> None:
        self._receivers = receivers
        self.published: list[int] = []

    async def receivers(self) -> dict[str, str]:
        return self._receivers

    async def engine_versions(self) -> dict[str, int]:
        return {"engine": self.published[-1]} if self.published else {}

    async def record_staged(self, receiver: str, version: int) -> None:
        pass

    async def publish_weights(self, version: int) -> None:
        self.published.append(version)

    async def wait_engines_at(self, version: int, timeout_s: float) -> dict[str, int]:
        return await self.engine_versions()

    async def append_metrics(self, record: Record, kind: str) -> None:
        pass

    async def close(self) -> None:
        pass


def whole_run(scene: Scene) -> None:
    if scene.ranks.num_ranks == 1:
        scene.train(0, NUM_STEPS)
    else:
        train_and_publish(scene)
    scene.write()
    step_without_gradient(scene)
    step_with_nan(scene)
    start_warm(scene)


def train_and_publish(scene: Scene) -> None:
    """Every step's weights as bfloat16, in full and as deltas; waits for the last one only."""
    board = NoticeBoard(json.loads((scene.folder / "receivers.json").read_text()))

    async def open_board() -> NoticeBoard:
        return board

    weights = CheckpointEngine(
        scene.engine.layout("bfloat16"),
        WeightSyncConfig(bucket_bytes=5_000, full_every=3, max_delta_density=0.5),
        rank=scene.ranks.rank,
        run="zero3",
        host="127.0.0.1",
        key=WEIGHTS_KEY,
        uses_gpu=False,
        open_board=open_board,
        control_timeout_s=60.0,
    )
    weights.publish(0, scene.engine.shards())
    weights.wait_committed(0, 60.0)
    scene.train(
        0,
        NUM_STEPS,
        weights.guard,
        lambda version: weights.publish(version, scene.engine.shards()),
    )
    weights.wait_committed(NUM_STEPS, 60.0)
    scene.results["num_tensors"] = len(scene.engine.layout("bfloat16").tensors)
    scene.results["published"] = board.published
    scene.ranks.barrier()
    weights.close()


def start_warm(scene: Scene) -> None:
    report = warm_start(scene.engine, scene.ranks, examples(), scene.config)
    scene.results["warm_start_losses"] = [report.loss_first, report.loss_last]
    scene.results["largest_moment_left"] = max(float(m.abs().max()) for m in scene.moments())


def resume(scene: Scene) -> None:
    """From the checkpoint of the whole run of two ranks."""
    resume_from(scene, scene.folder / "checkpoints-2")


def offloaded(scene: Scene) -> None:
    """Like `whole_run`, and in `offloaded` where deepspeed itself has put what."""
    optimizer = scene.engine._engine.optimizer
    flat = optimizer.fp32_partitioned_groups_flat[0]
    scene.results["offloaded"] = {
        "optimizer": optimizer.offload_optimizer and optimizer.subgroup_to_device == {0: "cpu"},
        "parameters": optimizer.offload_param and bool(optimizer.param_groups_fp16_flat_cpu_memory),
        "has_gradient_on_host": flat.grad is not None,
    }
    scene.store.folder = scene.folder / "checkpoints-offloaded"
    whole_run(scene)


def offloaded_again(scene: Scene) -> None:
    """From the checkpoint of `offloaded`."""
    resume_from(scene, scene.folder / "checkpoints-offloaded")


def resume_from(scene: Scene, folder: Path) -> None:
    scene.restore_from(folder)
    scene.train(SAVE_AFTER, NUM_STEPS)
    scene.write()
