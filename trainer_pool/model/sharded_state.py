"""This rank's pieces of the policy and of its optimizer's state, where deepspeed keeps them.

    weights as engines serve them     served_layout, served_shards     for each version
    float32 weights, Adam's moments   layout, shards, restore          for checkpoints

Nothing here is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tensors.layout import Layout, Part, TensorSpec
from tensors.snapshots import Shard
from trainer_pool.model.lora import adapter_name
from trainer_pool.state.shards import ShardReader, differences

CRITIC = "critic:"
"""Prefix of a critic's tensors in a checkpoint."""


class ShardedState:
    """One rank's pieces of the weights and of the optimizer's state."""

    def __init__(
        self,
        deepspeed: Any,
        num_ranks: int,
        model_path: str,
        parts: Mapping[str, tuple[Part, ...]],
        *,
        is_adapter: bool = False,
        prefix: str = "",
    ) -> None:
        """`deepspeed`: its engine, around the model at `model_path`. `parts`: what each parameter
        is in a checkpoint. `is_adapter`: the state is that of the model's adapter alone, by the
        names of its file. `prefix`: begins all names, beside those of another model."""
        self._deepspeed = deepspeed
        self.num_ranks = num_ranks
        self._model_path = model_path
        self._parts = parts
        self._is_adapter = is_adapter
        self._prefix = prefix

    def served_layout(self, dtype: str) -> Layout:
        """Every parameter by its name in the checkpoint, as engines serve it.

        A tied output head is not listed. Raises RuntimeError if deepspeed has sharded a parameter
        differently from the layout.
        """
        parameters = list(self._named_parameters())
        specs = [
            TensorSpec(
                name=name,
                dtype=dtype,
                shape=tuple(parameter.ds_shape),
                parts=self._parts_of(name, tuple(parameter.ds_shape)),
            )
            for name, parameter in parameters
        ]
        layout = Layout.of(specs, self.num_ranks)
        for name, parameter in parameters:
            share = -(-parameter.ds_numel // self.num_ranks)
            if parameter.ds_tensor.numel() != share:
                raise RuntimeError(
                    f"deepspeed gave this rank {parameter.ds_tensor.numel()} elements of {name}, "
                    f"not a share of {share}: weights can only be sent from shares of that size"
                )
        return layout

    def served_shards(self) -> Iterator[Shard]:
        """This rank's piece of each parameter, as views of the live weights."""
        for name, parameter in self._named_parameters():
            start, stop = self._own_range(parameter)
            yield Shard(name=name, tensor=parameter.ds_tensor.data.flatten()[: stop - start])

    def layout(self) -> Layout:
        """The whole tensors that `restore` needs: the float32 weights of each trained parameter, as
        NAME, and its optimizer's state, as NAME:KEY."""
        specs = []
        for name, parameter in self._named_parameters():
            shape = tuple(parameter.ds_shape)
            for key in ("", *self._optimizer_keys(parameter)):
                dtype = torch.float32 if parameter.requires_grad else parameter.ds_tensor.dtype
                text = str(dtype).removeprefix("torch.")
                specs.append(TensorSpec(name=_state_name(name, key), dtype=text, shape=shape))
        return Layout.of(specs, self.num_ranks)

    def shards(self) -> Iterator[Shard]:
        """This rank's pieces of `layout`, as views of the live state."""
        for name, parameter in self._named_parameters():
            start, stop = self._own_range(parameter)
            for key in ("", *self._optimizer_keys(parameter)):
                tensor = self._local_state(parameter, key)[: stop - start]
                yield Shard(name=_state_name(name, key), tensor=tensor)

    @property
    def num_updates(self) -> int:
        """Updates of the optimizer since its state was new, by which Adam corrects its bias."""
        states = self._deepspeed.optimizer.optimizer.state.values()
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def restore(self, reader: ShardReader, num_updates: int) -> None:
        """Continue from a state that any number of ranks wrote. Raises ValueError if it is that of
        another model."""
        own = [t for t in reader.layout.tensors if t.name.startswith(CRITIC) == bool(self._prefix)]
        if wrong := differences(*({t.name: t for t in of} for of in (self.layout().tensors, own))):
            raise ValueError(
                f"the checkpoint is of another model: it and model.path={self._model_path!r} "
                f"differ in {wrong}; set model.path to the model that the run began with, and "
                "model.lora as it was"
            )
        for name, parameter in self._named_parameters():
            start, stop = self._own_range(parameter)
            for key in ("", *self._optimizer_keys(parameter)):
                piece = reader.read(_state_name(name, key), start, stop)
                self._local_state(parameter, key)[: stop - start].copy_(piece)
                if not key:
                    parameter.ds_tensor.data.flatten()[: stop - start].copy_(piece)
        for state in self._deepspeed.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)

    def copy_from(self, other: ShardedState, names: Mapping[str, str]) -> None:
        """Take the float32 weights of parameters of the same shapes: `names` in `other`, by those
        here."""
        theirs = dict(other._named_parameters())
        for name, parameter in self._named_parameters():
            if name in names:
                weights = other._local_state(theirs[names[name]], "")
                self._local_state(parameter, "").copy_(weights)
                parameter.ds_tensor.data.flatten().copy_(weights)

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._deepspeed.module.named_parameters():
            if not self._is_adapter:
                yield self._prefix + name, parameter
            elif parameter.requires_grad:
                yield adapter_name(name), parameter

    def _parts_of(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Empty if the parameter is one tensor of the same name."""
        parts = self._parts.get(name, ())
        return () if parts == (Part(name, shape),) else parts

    def _own_range(self, parameter: Any) -> tuple[int, int]:
        """This rank's elements of the flattened parameter, without the last ranks' padding."""
        share = parameter.ds_tensor.numel()
        start = min(dist.get_rank() * share, parameter.ds_numel)
        return start, min(start + share, parameter.ds_numel)

    def _optimizer_keys(self, parameter: Any) -> list[str]:
        """Names of the optimizer's state that is as large as the parameter."""
        if not parameter.requires_grad:
            return []
        flat, _, _ = self._place(parameter)
        state = self._deepspeed.optimizer.optimizer.state[flat]
        return sorted(key for key, value in state.items() if value.numel() == flat.numel())

    def _place(self, parameter: Any) -> tuple[Tensor, int, int]:
        """The flat float32 weights that contain this rank's piece, the piece's start, its size."""
        optimizer = self._deepspeed.optimizer
        group, begin, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return optimizer.fp32_partitioned_groups_flat[group], begin, size

    def _local_state(self, parameter: Any, key: str) -> Tensor:
        """[share] the float32 weights of this rank's piece, or the optimizer's state of this key;
        the piece itself of a parameter that is not trained."""
        if not parameter.requires_grad:
            frozen: Tensor = parameter.ds_tensor.detach().flatten()
            return frozen
        # deepspeed's own functions copy what is offloaded to the GPU.
        flat, begin, size = self._place(parameter)
        whole: Tensor = self._deepspeed.optimizer.optimizer.state[flat][key] if key else flat
        return whole.detach().narrow(0, begin, size)


def joint_layout(states: Sequence[ShardedState]) -> Layout:
    """The layout of several models in one checkpoint."""
    tensors = (tensor for state in states for tensor in state.layout().tensors)
    return Layout.of(tensors, states[0].num_ranks)


def joint_shards(states: Sequence[ShardedState]) -> Iterator[Shard]:
    """This rank's pieces of `joint_layout`."""
    for state in states:
        yield from state.shards()


def _state_name(parameter: str, key: str) -> str:
    return f"{parameter}:{key}" if key else parameter
