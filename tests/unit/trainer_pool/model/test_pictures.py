"""Passes of packed rows with pictures, against transformers' own of each sequence by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

from buffer.types import SamplingParams, Trajectory, TrajectoryGroup, VersionSpan, digest_of
from tensors.pictures import PictureProcessor, has_pictures
from tests.support.buffer.groups import make_group
from tests.support.pictures import picture, plain_logprobs, row_of, tokens_of
from trainer_pool.data.packing import fill_up, pack
from trainer_pool.model import attention
from trainer_pool.model.head import ScoringHead, TokensToScore
from trainer_pool.model.loading import load_model
from trainer_pool.model.pictures import Tower, check_pictures, find_tower

PICTURES = (picture(1), picture(2, 33, 50), picture(3, 20, 64, "JPEG"))


class Policy:
    """The trainer's passes without ZeRO-3."""

    def __init__(self, folder: Any, processor: PictureProcessor) -> None:
        self.model = load_model(str(folder), torch.float32, trust_remote_code=False)
        self.tower = Tower(self.model, processor)
        ScoringHead(self.model, "a/model", self.tower.unsampled)

    def score(self, batch: Any) -> torch.Tensor:
        row = batch.row
        wanted = TokensToScore(
            places_N=batch.places_N,
            targets_N=batch.targets_N,
            temperatures_N=batch.temperatures_N,
            candidates=None,
        )
        inputs = {"position_ids": row.position_ids_L.unsqueeze(0)} | self.tower.inputs(row)
        scores: torch.Tensor = self.model(
            input_ids=row.tokens_L.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.places_N,
            wanted=wanted,
            **inputs,
            **attention.arguments(row),
        )
        return scores[0]


def test_adapted_policy_and_split_rows_are_refused(seeing_model):
    with pytest.raises(ValueError, match=r"takes pictures, with which neither model.lora nor"):
        find_tower(None, str(seeing_model), trust_remote_code=False, is_changed=True)
    assert find_tower(None, "/no/model", trust_remote_code=False, is_changed=True) is None


def test_packed_rows_with_pictures_have_the_logprobs_of_each_sequence_by_itself(
    seeing_model, processor
):
    rows = [
        row_of(processor, PICTURES[:1], 5),
        row_of(processor, (), 7),
        row_of(processor, PICTURES[1:], 4),
    ]
    [batch] = pack(rows, 400)
    found = Policy(seeing_model, processor).score(batch)
    expected = torch.cat([plain_logprobs(seeing_model, processor, rows[i]) for i in batch.rows])
    assert (found - expected).abs().max() < 1e-5


def test_other_pixels_give_other_logprobs(seeing_model, processor):
    """So that a picture which trainer and engine do not share would be noticed."""
    row = row_of(processor, PICTURES[:1], 5)
    policy = Policy(seeing_model, processor)
    right, wrong = (
        policy.score(pack([replace(row, pictures=(file,))], 400)[0])
        for file in (PICTURES[0], picture(9))
    )
    assert (right - wrong).abs().max() > 1e-3


def test_tower_is_frozen_and_sees_every_row_so_that_all_ranks_gather_it(seeing_model, processor):
    policy, seen = Policy(seeing_model, processor), list[int]()
    policy.model.model.visual.register_forward_hook(lambda *_: seen.append(1))
    [empty] = fill_up([], 1)
    batches = [*pack([row_of(processor, PICTURES[:1], 5)], 400), empty]
    for batch in batches:
        policy.score(batch).sum().backward()
    assert len(seen) == 2
    got = {name for name, one in policy.model.named_parameters() if one.grad is not None}
    assert got and not any("visual" in name for name in got)


def test_rows_with_pictures_share_no_prefix(processor):
    """The tokens of two pictures of one size are the same."""
    rows = [row_of(processor, (picture(seed),), 5) for seed in (1, 2)]
    assert np.array_equal(rows[0].tokens, rows[1].tokens)
    [batch] = pack(rows, 400, should_share_prefixes=True)
    assert len(batch.row.tokens_L) == batch.num_tokens
    assert batch.row.pictures == rows[0].pictures + rows[1].pictures


def group_of(tokens: list[int], files: tuple[bytes, ...], trained: int) -> TrajectoryGroup:
    length = len(tokens)
    mask = np.zeros(length, np.uint8)
    mask[trained] = 1
    trajectory = Trajectory(
        tokens=np.array(tokens, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.zeros(length, np.float32),
        version_spans=(VersionSpan(version=0, start=1, end=length),),
        prompt_length=1,
        reward=1.0,
        finish_reason="stop",
        pictures=tuple(map(digest_of, files)),
    )
    whole = make_group("g")
    return replace(
        whole,
        trajectories=(trajectory,),
        pictures={digest_of(file): file for file in files},
        sampling=SamplingParams(),
    )


def test_group_whose_pictures_are_not_the_models_is_refused(seeing_model, processor):
    tower = Policy(seeing_model, processor).tower
    tokens = tokens_of(processor, PICTURES[:1], 3)
    good = group_of(tokens, PICTURES[:1], trained=-1)
    check_pictures(tower, [good], "a/model")
    wrong = {
        "its pictures have .8. tokens, and their places are": group_of(
            tokens, (picture(3, 16, 32),), trained=-1
        ),
        "1 of its trained tokens are marks of pictures": group_of(tokens, PICTURES[:1], trained=3),
    }
    for why, group in wrong.items():
        with pytest.raises(ValueError, match=f"group g, trajectory 0: {why}"):
            check_pictures(tower, [group], "a/model")
    with pytest.raises(
        ValueError, match=r"group g: it has pictures, and model.path='a/model' take"
    ):
        check_pictures(None, [good], "a/model")


def test_patches_are_kept_up_to_their_size(seeing_model, processor):
    made = Qwen2VLImageProcessorPil.from_pretrained(seeing_model)
    first, second, third = (picture(seed) for seed in range(3))  # of one size
    size = processor.patches(first).values_PD.nbytes
    keeps = PictureProcessor(made, processor.tokens, kept_bytes=2 * size)
    one, two = keeps.patches(first), keeps.patches(second)
    assert keeps.patches(first) is one and keeps.patches(second) is two
    keeps.patches(first)
    keeps.patches(third)
    assert keeps.patches(first) is one and keeps.patches(second) is not two


def test_config_that_cannot_be_read_is_told(tmp_path):
    assert not has_pictures(str(tmp_path), trust_remote_code=False)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting property name"):
        has_pictures(str(tmp_path), trust_remote_code=False)
