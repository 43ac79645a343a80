"""The pictures of a packed row, and the tower of the model that sees them.

    row       [ a a P P P P a a | b P P b b ]      P: places of pictures
    tower       ▲ patches of the pictures ─► features, written to the places
    positions   by the model's own rule, of each sequence: a picture's run in two dimensions

The tower is frozen. Under ZeRO-3 a pass gathers its weights, in which all ranks take part. So a
row without a picture shows the tower a blank one, whose features are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffer.types import Trajectory, TrajectoryGroup
from tensors.pictures import PictureProcessor, takes_pictures
from trainer_pool.data.packing import PackedRow

ON_TOWER = "vision_config"
"""The part of a config whose attention is of whole pictures, and not of packed rows."""


def attention_of(config: Any, name: str) -> str | dict[str, str]:
    """`attn_implementation` of a model whose language layers compute theirs by `name`."""
    return {"": name, "text_config": name, ON_TOWER: "sdpa"} if takes_pictures(config) else name


def find_tower(
    model: Any, model_path: str, *, trust_remote_code: bool, is_changed: bool
) -> Tower | None:
    """The tower of `model`; None for one without pictures. Raises ValueError if the policy
    `is_changed`: adapted, or with rows that ranks split."""
    processor = PictureProcessor.of(model_path, trust_remote_code=trust_remote_code)
    if processor is None:
        return None
    if is_changed:
        raise ValueError(
            f"model.path={model_path!r} takes pictures, with which neither model.lora nor "
            "trainer.sequence_parallel_size can be used; set them to null and 1"
        )
    return Tower(model, processor)


class Tower:
    """The tower of a model with pictures. Freezes it."""

    def __init__(self, model: Any, processor: PictureProcessor) -> None:
        self._model = model.model
        self._processor = processor
        self._model.visual.requires_grad_(False)
        vision = model.config.vision_config
        size = vision.spatial_merge_size
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self._blank = torch.zeros(size**2, values), torch.tensor([[1, size, size]])
        self._model.get_image_features = self._features

    @property
    def unsampled(self) -> tuple[int, ...]:
        """Tokens that are no part of the policy's distribution."""
        return self._processor.tokens.unsampled

    def check(self, group: TrajectoryGroup, trajectory: Trajectory) -> None:
        """Raises ValueError unless the places of a trajectory are those of its pictures, and none
        is trained."""
        tokens = trajectory.tokens
        self._processor.check(tokens.tolist(), group.pictures_of(trajectory))
        trained = np.isin(tokens[trajectory.loss_mask != 0], self.unsampled)
        if trained.any():
            raise ValueError(f"{trained.sum()} of its trained tokens are marks of pictures")

    def inputs(self, row: PackedRow) -> dict[str, Tensor | None]:
        """Arguments of the model's forward pass for a row with or without pictures."""
        device = row.tokens_L.device
        if not row.pictures:
            values_PD, _ = self._blank
            return {"pixel_values": values_PD.to(device), "image_grid_thw": None}
        patches = [self._processor.patches(picture) for picture in row.pictures]
        grids_G3 = torch.tensor([one.grid for one in patches], device=device)
        return {
            "pixel_values": torch.cat([one.values_PD for one in patches]).to(device),
            "image_grid_thw": grids_G3,
            "position_ids": self.positions(row, grids_G3),
        }

    def positions(self, row: PackedRow, grids_G3: Tensor) -> Tensor:
        """int64 [4, 1, L]: the plain positions, and the model's own in time, height and width."""
        lengths, taken, found = row.starts.diff().tolist(), 0, list[Tensor]()
        for tokens in torch.split(row.tokens_L, lengths):
            runs = self._processor.tokens.runs(tokens.tolist())
            count = len(list(runs))
            own_3T, _ = self._model.get_rope_index(
                tokens.unsqueeze(0),
                mm_token_type_ids=(tokens == self._processor.tokens.place).int().unsqueeze(0),
                image_grid_thw=grids_G3[taken : taken + count],
            )
            taken += count
            found.append(own_3T.squeeze(1))
        return torch.cat([row.position_ids_L.unsqueeze(0), torch.cat(found, 1)]).unsqueeze(1)

    def _features(self, pixel_values: Tensor, image_grid_thw: Tensor | None, **_: Any) -> Any:
        """In the place of the model's method, which hands on the borders of the row as well."""
        tower, is_blank = self._model.visual, image_grid_thw is None
        grids_G3 = self._blank[1].to(pixel_values.device) if is_blank else image_grid_thw
        with torch.no_grad():
            seen = tower(pixel_values.type(tower.dtype), grid_thw=grids_G3, return_dict=True)
        if is_blank:
            seen.deepstack_features = [each[:0] for each in seen.deepstack_features]
            seen.pooler_output = seen.pooler_output[:0]
        seen.pooler_output = (seen.pooler_output,)
        return seen


def check_pictures(tower: Tower | None, groups: Sequence[TrajectoryGroup], model_path: str) -> None:
    """Raises ValueError naming a group whose pictures are not the model's."""
    for group in groups:
        if tower is None and group.pictures:
            raise ValueError(
                f"group {group.group_id}: it has pictures, and model.path={model_path!r} takes "
                "none; it is of another run"
            )
        for number, trajectory in enumerate(group.trajectories):
            if tower is not None:
                try:
                    tower.check(group, trajectory)
                except ValueError as error:
                    where = f"group {group.group_id}, trajectory {number}"
                    raise ValueError(f"{where}: {error}") from None
