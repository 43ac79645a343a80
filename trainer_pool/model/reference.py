"""The reference of `algorithm.kl`: shards of a model that take the policy's place for a pass.

The base of an adapted policy is its reference without further weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensors.host_memory import HostMemory
from trainer_pool.model.checkpoint_names import check_reference
from trainer_pool.model.loading import load_model
from trainer_pool.model.lora import base_name, is_adapters, without_adapter
from trainer_pool.state.shards import differences


class Reference:
    """This rank's shards of a model of the policy's shape, with `offload` in host memory."""

    def __init__(
        self,
        deepspeed: Any,
        model_path: str | None,
        policy_path: str,
        *,
        offload: bool,
        trust_remote_code: bool = False,
    ) -> None:
        """`deepspeed`: its engine, with the policy. `model_path`: None is the base of an adapted
        policy. Raises ValueError if the model's shape or its config is another. A collective."""
        self._deepspeed = deepspeed
        self._shards: dict[str, Tensor] = {}
        if model_path is None:
            return
        setting = "algorithm.kl.reference"
        own = self._own_parameters()
        dtype = next(iter(own.values())).ds_tensor.dtype
        model = load_model(model_path, dtype, trust_remote_code=trust_remote_code, setting=setting)
        theirs = dict(model.named_parameters())
        if wrong := differences(own, theirs):
            raise ValueError(
                f"{setting}={model_path!r}: it and the policy differ in the shape of {wrong}; "
                f"choose a model of the same shape as model.path={policy_path!r}"
            )
        check_reference(f"{setting}={model_path!r}", deepspeed.module.config, model.config)
        for name, parameter in theirs.items():
            shard = parameter.ds_tensor.data.detach().clone()
            self._shards[name] = _offloaded(shard) if offload and shard.is_cuda else shard

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Inside this block, forward passes use the reference's weights, without gradients."""
        own: dict[str, Tensor] = {}
        # deepspeed may still hold gathered weights of the policy, and would use them in the next
        # pass.
        self._deepspeed.optimizer.empty_partition_cache()
        try:
            for name, parameter in self._own_parameters().items():
                if name in self._shards:
                    own[name] = parameter.ds_tensor.data
                    parameter.ds_tensor.data = self._shards[name].to(own[name].device)
            with torch.no_grad(), without_adapter(self._deepspeed.module):
                yield
        finally:
            self._deepspeed.optimizer.empty_partition_cache()
            for name, parameter in self._own_parameters().items():
                if name in own:
                    parameter.ds_tensor.data = own[name]

    def _own_parameters(self) -> dict[str, Any]:
        """The policy's, or those of its base, by their names in the checkpoint."""
        named = self._deepspeed.module.named_parameters()
        return {base_name(name): p for name, p in named if not is_adapters(name)}


def _offloaded(shard: Tensor) -> Tensor:
    memory = HostMemory(shard.nbytes)
    memory.pin()
    return memory.tensor()[: shard.nbytes].view(shard.dtype).view(shard.shape).copy_(shard)
