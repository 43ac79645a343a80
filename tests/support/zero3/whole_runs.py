"""Four steps with a checkpoint, whose weights two ranks publish; resumed, and offloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from deepspeed.utils import safe_get_full_grad

from configs.schema import WeightSyncConfig
from tests.support.experts import random_routes
from tests.support.trainer.loop_scene import WEIGHTS_KEY, head_row
from tests.support.trainer.token_batch import algorithm
from tests.support.weights.memory_board import MemoryBoard
from tests.support.zero3.batches import examples, with_routes
from tests.support.zero3.scene import NUM_STEPS, SAVE_AFTER, Scene, recorded
from tests.support.zero3.skipped_updates import step_with_nan, step_without_gradient
from trainer_pool.data.packing import pack
from trainer_pool.warm_start import warm_start
from weight_sync.checkpoint_engine import CheckpointEngine


class NoticeBoard(MemoryBoard):
    """A board beside which every engine serves what is available."""

    async def mark_available(self, version: int) -> None:
        await super().mark_available(version)
        self.set_engine("engine", version)


def whole_run(scene: Scene) -> None:
    if scene.ranks.num_ranks == 1:
        scene.train(0, NUM_STEPS)
    else:
        train_and_publish(scene)
    scene.write()
    step_without_gradient(scene)
    step_with_nan(scene)
    start_warm(scene)


def experts(scene: Scene) -> None:
    """Like `whole_run`, of a mixture of experts whose load is balanced; then with the experts that
    engines have chosen."""
    note_gradient_of_balance(scene)
    scene.algorithm = algorithm("tis_token", load_balancing_weight=0.05)
    scene.store.folder = scene.folder / f"checkpoints-experts-{scene.ranks.num_ranks}"
    if scene.ranks.num_ranks == 1:
        scene.train(0, NUM_STEPS)
    else:
        train_and_publish(scene)
    scene.write()
    replay(scene)


def replay(scene: Scene) -> None:
    """The log-probabilities of a row, and a step."""
    row = replace(head_row(0), routes=random_routes(len(head_row(0).tokens)))
    [micro_batch] = pack([row], 100)
    scene.results["replayed"] = scene.policy.score(micro_batch).logprobs.tolist()
    scene.policy.take_routing()
    batch = scene.batch(0)
    routed = tuple(map(with_routes, batch.groups))
    stats = scene.step(replace(batch, groups=routed), learning_rate=0.0)
    scene.results["replaying_step"] = recorded(stats)


def note_gradient_of_balance(scene: Scene) -> None:
    """By parameter: how much load balancing changes the gradient of an update. Nothing is
    updated."""
    config = replace(scene.config, num_minibatches=1)
    for weight in (0.0, 10.0):

        def note(sign: float = 1.0 if weight else -1.0) -> None:
            for name, parameter in scene.policy._deepspeed.module.named_parameters():
                gradient = sign * safe_get_full_grad(parameter).numpy() / 10
                scene.gradients[name] = scene.gradients.get(name, 0.0) + gradient

        stats = scene.step(
            scene.batch(1),
            config=config,
            algorithm=algorithm("tis_token", load_balancing_weight=weight),
            learning_rate=0.0,
            before_update=note,
        )
        scene.results.setdefault("balanced", []).append(recorded(stats))


def train_and_publish(scene: Scene) -> None:
    """Every step's weights as bfloat16, in full and as deltas; waits for the last one only."""
    board = NoticeBoard()
    board.registered = json.loads((scene.folder / "receivers.json").read_text())

    async def open_board() -> NoticeBoard:
        return board

    weights = CheckpointEngine(
        scene.policy.state.served_layout("bfloat16"),
        WeightSyncConfig(bucket_bytes=5_000, full_every=3, max_delta_density=0.5),
        rank=scene.ranks.rank,
        run="zero3",
        host="127.0.0.1",
        key=WEIGHTS_KEY,
        uses_gpu=False,
        open_board=open_board,
        control_timeout_s=60.0,
    )
    weights.send(0, scene.policy.state.served_shards())
    weights.wait_committed(0, 60.0)
    scene.train(
        0,
        NUM_STEPS,
        weights.protect_copy,
        lambda version: weights.send(version, scene.policy.state.served_shards()),
    )
    weights.wait_committed(NUM_STEPS, 60.0)
    scene.results["num_tensors"] = len(scene.policy.state.served_layout("bfloat16").tensors)
    scene.results["published"] = board.available
    scene.ranks.barrier()
    weights.close()


def start_warm(scene: Scene) -> None:
    report = warm_start(scene.policy, scene.ranks, examples(), scene.config)
    scene.results["warm_start_losses"] = [report.loss_first, report.loss_last]
    scene.results["largest_moment_left"] = max(float(m.abs().max()) for m in scene.moments())


def resume(scene: Scene) -> None:
    """From the checkpoint of the whole run of two ranks."""
    resume_from(scene, scene.folder / "checkpoints-2")


def offloaded(scene: Scene) -> None:
    """Like `whole_run`, and in `offloaded` where deepspeed itself has put what."""
    optimizer = scene.policy._deepspeed.optimizer
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
