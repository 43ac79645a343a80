"""Checkpoints: for other numbers of ranks, of frozen weights and random numbers, failed, copied."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

from tests.support.zero3.scene import NUM_STEPS, SAVE_AFTER, Scene
from trainer_pool.model import engine
from trainer_pool.state.peer_copies import PeerCopies
from trainer_pool.state.shards import ShardReader, restore_rng, shard_file


def reshard(scene: Scene) -> None:
    """From 2 ranks to 4, and to 1; what each has of the state is written again."""
    source = {4: 2, 1: 4}[scene.ranks.num_ranks]
    scene.restore_from(scene.folder / f"checkpoints-{source}")
    scene.save(SAVE_AFTER)
    scene.writer.finish()
    for name, tensor in scene.policy.named_tensors():  # what the next pass would see
        scene.results[name] = float(tensor.double().sum())


@contextlib.contextmanager
def frozen_layers() -> Iterator[None]:
    """The MLPs of the model that is loaded are not trained."""
    load = engine.load_model

    def load_frozen(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp." not in name)
        return model

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(engine, "load_model", load_frozen)
        yield


def frozen(scene: Scene) -> None:
    """Part of the model is not trained, and differs from the model in the folder: two ranks
    train and save it, four read theirs, and one rank those of the four."""
    num_ranks = scene.ranks.num_ranks
    scene.store.folder = scene.folder / f"checkpoints-frozen-{num_ranks}"
    if num_ranks == 2:
        for parameter in scene.policy._deepspeed.module.parameters():
            if not parameter.requires_grad:
                parameter.ds_tensor.data.add_(0.25)
        scene.train(0, SAVE_AFTER)
    else:
        source = {4: 2, 1: 4}[num_ranks]
        scene.restore_from(scene.folder / f"checkpoints-frozen-{source}")
        scene.save(SAVE_AFTER)
        scene.writer.finish()
    scene.write()


def noise(scene: Scene) -> None:
    """Train on from the last checkpoint, if there is one, with a model and steps that draw
    random numbers."""
    scene.store.folder = scene.folder / "checkpoints-noise"
    norm = scene.policy._deepspeed.module.model.norm
    norm.register_forward_hook(lambda _module, _inputs, hidden: dropout(hidden, 0.2))
    found, first = scene.store.latest(), 0
    if found is not None:
        scene.restore_from(scene.store.folder)
        restore_rng(found[0], scene.ranks.rank)
        first = found[1].step
    draws: list[float] = []

    def draw() -> None:
        draws.extend((random.random(), random.gauss(), np.random.standard_normal()))

    scene.train(first, NUM_STEPS, before_update=draw)
    scene.results |= {"first": first, "draws": draws}
    scene.write()


def refuse(file: Path) -> None:
    raise ConnectionError(f"no Redis for {file.name}")


def full_disk(scene: Scene) -> None:
    """Rank 1 can write nothing: its checkpoint fails, training goes on, the next succeeds."""
    scene.store.folder = scene.folder / "checkpoints-full"
    scene.save(1)
    scene.writer.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if scene.ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    scene.train(0, 1, save_after=())
    scene.save(2)
    scene.train(1, 2, save_after=())
    scene.writer.finish()
    latest = scene.store.latest()
    assert latest is not None
    scene.results["latest_then"] = latest[1].step
    scene.results["left"] = sorted(path.name for path in scene.store.folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    scene.save(3)
    scene.writer.finish()
    # The groups are written on rank 0: they alone may fail.
    scene.dump_groups = refuse
    scene.save(4)
    scene.writer.finish()
    scene.results["errors"] = [record.get("error") for record in scene.saved]
    scene.results["groups_errors"] = [one.get("groups_error") for one in scene.saved]
    folders = [scene.store.folder / f"step-{step:06d}" for step in (3, 4)]
    scene.results["has_groups"] = [(folder / "groups.dump").exists() for folder in folders]


def copies(scene: Scene) -> None:
    """Each rank has a machine of its own, and that of rank 1 is lost with its copy of step 2.
    In `same` whether the ranks that go on from rank 0's machine train to the same weights."""
    folder = scene.folder / f"memory-{scene.ranks.rank}"
    layout = scene.policy.state.layout()
    copies = PeerCopies(folder, layout, scene.ranks, timeout_s=60.0)
    scene.train(0, SAVE_AFTER, save_after=())
    for step in (1, SAVE_AFTER):
        unsaved = [(SAVE_AFTER, ("a", "b"))] if scene.ranks.rank == 0 else []
        state = scene.state(step)
        while copies.save(state, unsaved, scene.policy.state.shards()) is not None:
            pass  # the one before is being sent
    assert copies._thread is not None
    copies._thread.join()
    kept = [sorted(path.name for path in folder.iterdir())]
    scene.train(SAVE_AFTER, NUM_STEPS, save_after=())
    expected = scene.weights()

    scene.ranks.barrier()
    if scene.ranks.rank == 1:
        shutil.rmtree(folder)
    (folder / "step-000003").mkdir(parents=True)  # of one that died while it copied
    copies = PeerCopies(folder, layout, scene.ranks, timeout_s=60.0)
    assert copies.newest(after=SAVE_AFTER) is None
    found = copies.newest(after=1)
    assert found is not None and found.state == scene.state(SAVE_AFTER, found.state.num_updates)
    with ShardReader(found.folder, only=scene.ranks.rank) as reader:
        scene.policy.state.restore(reader, found.state.num_updates)
    copies.clear(kept=found)
    kept.append(sorted(path.name for path in folder.iterdir()))
    scene.train(SAVE_AFTER, NUM_STEPS, save_after=())
    same = all(torch.equal(tensor, expected[name]) for name, tensor in scene.weights().items())
    scene.results |= {"same": same, "kept": kept, "unsaved": found.unsaved}

    scene.ranks.barrier()
    if scene.ranks.rank == 1:  # a bit of its weights flips
        file = shard_file(found.folder, 1)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert copies.newest(after=1) is None
