"""A policy that takes pictures, with a reference that sees them: as a whole run, and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from buffer.types import TrajectoryGroup, digest_of
from configs.algorithm_schema import KLConfig
from tensors.pictures import PictureProcessor
from tests.support.pictures import picture, row_of, tokens_of
from tests.support.trainer.token_batch import algorithm
from tests.support.zero3.batches import behind
from tests.support.zero3.scene import NUM_STEPS, SAVE_AFTER, Scene
from trainer_pool.data.packing import Row, pack


def train(scene: Scene) -> None:
    """Its checkpoint, export, and the scores of policy and reference: before, after, and with the
    policy itself as the reference, as a run without another one keeps it."""
    begin(scene)
    scene.results["scores"] = [scores(scene)]
    scene.train(0, NUM_STEPS)
    scene.results["scores"].append(scores(scene))
    scene.write()
    scene.ranks.barrier()
    scene.policy.hold_reference(str(scene.output / "export"), offload=False)
    scene.results["scores"].append(scores(scene))


def resume(scene: Scene) -> None:
    """From the checkpoint of `train`."""
    begin(scene)
    scene.restore_from(scene.store.folder)
    scene.train(SAVE_AFTER, NUM_STEPS)
    scene.write()


def begin(scene: Scene) -> None:
    scene.store.folder = scene.folder / "checkpoints-seeing"
    scene.folder = scene.folder / "shown"  # the batches
    scene.algorithm = algorithm(kl=KLConfig(weight=0.1, estimator="k2"))
    scene.policy.hold_reference(str(scene.folder.parent / "seeing_other"), offload=False)


def scores(scene: Scene) -> dict[str, list[float]]:
    (batch,) = pack(shown_rows(scene.folder.parent / "seeing"), 400)
    with torch.no_grad():
        own: list[float] = scene.policy.score(batch).logprobs.tolist()
        with scene.policy.reference():
            of_reference: list[float] = scene.policy.score(batch).logprobs.tolist()
    return {"policy": own, "reference": of_reference}


def shown_rows(model: Path) -> list[Row]:
    """Rows of two pictures, of none, and of one, in the order in which they are packed."""
    processor = PictureProcessor.of(str(model), trust_remote_code=False)
    assert processor is not None
    shown = ((picture(1), picture(2, 33, 50)), (), (picture(3, 20, 64),))
    return [row_of(processor, files, tail) for files, tail in zip(shown, (9, 7, 5), strict=True)]


def with_pictures(group: TrajectoryGroup, processor: PictureProcessor) -> TrajectoryGroup:
    """The trajectories of all but the first episode behind a picture of its own."""
    files = {t.episode: picture(seed_of(group, t.episode), 16, 24) for t in group.trajectories}
    del files[0]
    trajectories = (
        replace(
            behind(t, tokens_of(processor, (files[t.episode],), 0)),
            pictures=(digest_of(files[t.episode]),),
        )
        if t.episode
        else t
        for t in group.trajectories
    )
    return replace(
        group,
        trajectories=tuple(trajectories),
        pictures={digest_of(file): file for file in files.values()},
    )


def seed_of(group: TrajectoryGroup, episode: int) -> int:
    step, place = map(int, group.group_id.split("-"))
    return 100 * step + 10 * place + episode
