"""A model under DeepSpeed ZeRO-3: its shards, gradients and updates.

This is the only import of deepspeed. A process may have several: the policy, and a critic.

Parameters, gradients and Adam's moments are sharded. Unless noted otherwise, every public method is
a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.ops
import deepspeed.runtime.compiler
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.zero import partition_parameters as gathered
from deepspeed.runtime.zero import stage3
from torch import Tensor
from transformers.integrations import HfDeepSpeedConfig

from configs.choices import Dtype
from configs.schema import TrainerConfig
from trainer_pool.collectives import RankAddress, RankWaits
from trainer_pool.model.loading import load_model
from trainer_pool.model.recomputing import recompute_layers, tile_mlps

_GATHER_ELEMENTS = 50_000_000
"""Elements gathered on every rank at once during an export."""

# Where a pass on a CPU waits for the other ranks: for parameters, and to add up gradients.
for _handle in (gathered.AllGatherHandle, gathered.AllGatherCoalescedHandle):
    _handle.wait = RankWaits.counted()(_handle.wait)
stage3.reduce_scatter_coalesced = RankWaits.counted()(stage3.reduce_scatter_coalesced)


class Zero3Model:
    """A model whose weights are sharded over the ranks, with its optimizer."""

    SETTING = "model.path"
    """The setting that names the model."""

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        address: RankAddress,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        _prepare(address)
        self.device = address.device
        self.num_ranks = address.num_ranks
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        dtype = _resolve_dtype(config.dtype, uses_gpu=address.uses_gpu)
        settings = _settings(config, dtype, uses_gpu=address.uses_gpu)
        # While this object exists, from_pretrained shards each weight as it is read, so that no
        # rank ever has the whole model in memory.
        self._hf_settings = HfDeepSpeedConfig(settings)
        model = load_model(
            model_path, dtype, trust_remote_code=trust_remote_code, setting=self.SETTING
        )
        trained = self._trained(model, config)
        # Whole decoder layers are gathered and reduced at once: fewer collectives, and far fewer
        # of deepspeed's Python hooks.
        deepspeed.utils.set_z3_leaf_modules(
            model, list(model._no_split_modules or ()), raise_if_not_found=False
        )
        if config.gradient_checkpointing:
            recompute_layers(model, offload=config.offload_activations)
        if config.mlp_tile_tokens is not None:
            tile_mlps(model, config.mlp_tile_tokens)
        # A torch optimizer: one named in `settings` would be compiled first.
        adam = torch.optim.AdamW(
            [parameter for parameter in trained.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._deepspeed: Any
        self._deepspeed, *_ = deepspeed.initialize(
            model=trained, optimizer=adam, config=settings, dist_init_required=False
        )
        self._create_moments()
        self._norm_limit = math.inf
        self._max_grad_value = config.max_grad_value
        adam.register_step_pre_hook(self._skip_or_clip)

    def _trained(self, model: Any, config: TrainerConfig) -> Any:
        """The module that is trained, made of the loaded model."""
        raise NotImplementedError

    def _create_moments(self) -> None:
        """Create the moments that AdamW would create in its first step: a checkpoint is restored
        before it."""
        optimizer = self._deepspeed.optimizer
        for flat in optimizer.fp32_partitioned_groups_flat:
            optimizer.optimizer.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }

    def backward(self, loss: Tensor) -> Any:
        """Add the gradient of `loss`; `step` applies the sum over all calls and ranks."""
        # deepspeed averages over the ranks, but the losses here are shares of one global sum.
        self._deepspeed.backward(loss * self.num_ranks)

    def step(
        self, learning_rate: float, *, norm_limit: float | None = None, divisor: float = 1.0
    ) -> float | None:
        """Divide the gradients by `divisor`, clip, update and clear them; returns their global norm
        before clipping.

        None if a gradient was not finite, 0 if all were zero. In both cases, and if the norm is
        above `norm_limit`, no rank changes its weights or optimizer.
        """
        self._norm_limit = math.inf if norm_limit is None else norm_limit
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        # deepspeed divides by it, as if the losses had been scaled.
        self._deepspeed.optimizer.loss_scale = divisor
        self._deepspeed.step()
        self._deepspeed.optimizer.loss_scale = 1.0
        if not self._deepspeed.was_step_applied():
            return None
        return float(self._deepspeed.get_global_grad_norm())

    def _skip_or_clip(self, adam: torch.optim.Optimizer, *_: object) -> None:
        # With a zero gradient Adam would still change the weights, by momentum and weight decay.
        # deepspeed sets `params` again before each update. Their gradients must stay: offloaded
        # ones are buffers that the next update fills. The norm is global, so all ranks agree.
        if not 0 < self._deepspeed.optimizer._global_grad_norm <= self._norm_limit:
            for group in adam.param_groups:
                group["params"] = []
        elif (most := self._max_grad_value) is not None:
            for group in adam.param_groups:
                for shard in group["params"]:
                    shard.grad.clamp_(-most, most)

    def reset_optimizer(self) -> None:
        """Reset Adam's moments; the weights stay. Not a collective."""
        for state in self._deepspeed.optimizer.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every full parameter by its name in the module, in the same order on all ranks.

        A tensor is valid only until the iterator advances, so copy it to keep it. Every rank must
        iterate to the end, or the others wait for it.
        """
        for bucket in self._gather_buckets():
            with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.data

    def _gather_buckets(self) -> Iterator[list[tuple[str, Any]]]:
        bucket: list[tuple[str, Any]] = []
        num_elements = 0
        for name, parameter in self._deepspeed.module.named_parameters():
            if bucket and num_elements + parameter.ds_numel > _GATHER_ELEMENTS:
                yield bucket
                bucket, num_elements = [], 0
            bucket.append((name, parameter))
            num_elements += parameter.ds_numel
        yield bucket

    def close(self) -> None:
        """Remove deepspeed's hooks from the model and free its buffers. Not a collective."""
        self._deepspeed.destroy()


def _prepare(address: RankAddress) -> None:
    if not address.uses_gpu:
        # Otherwise deepspeed runs numactl in every step to find this number.
        os.environ.setdefault("LOCAL_SIZE", "1")
    # deepspeed would try which of its operators can be compiled here, with nvcc for a GPU, and on a
    # CPU compile a shared-memory transport, which takes minutes.
    deepspeed.ops.__compatible_ops__ = {}
    # For an optimizer that is not ours, it would load torch's compiler: seconds of a core.
    deepspeed.runtime.compiler.compile = lambda: deepspeed.runtime.compiler.dummy_decorator
    # It uses the existing group.
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False
    )
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Ranges for a profiler of GPUs, around hundreds of Python functions in each pass.
    deepspeed.utils.nvtx.enable_nvtx = False
    # deepspeed 0.19 uses names of collectives that torch 2.13 deprecates, many times per step.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    transformers.utils.logging.disable_progress_bar()


def _resolve_dtype(dtype: Dtype, *, uses_gpu: bool) -> torch.dtype:
    if dtype is Dtype.auto:
        return torch.bfloat16 if uses_gpu else torch.float32
    return torch.bfloat16 if dtype is Dtype.bfloat16 else torch.float32


def _settings(config: TrainerConfig, dtype: torch.dtype, *, uses_gpu: bool) -> dict[str, object]:
    """DeepSpeed's configuration; a CPU run has small models, so small buffers."""
    bucket_elements = 200_000_000 if uses_gpu else 5_000_000
    host = {"device": "cpu", "pin_memory": uses_gpu}
    offloads: dict[str, object] = {}
    if config.offload_optimizer:
        offloads["offload_optimizer"] = host
    if config.offload_parameters:
        offloads["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # step() is the boundary, after any number of backward passes.
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_grad_norm,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**31,
        # Offloaded or not, the optimizer is torch's: deepspeed's would be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": uses_gpu,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket_elements,
            "stage3_prefetch_bucket_size": bucket_elements,
            # Small weights that stay unsharded would cost one collective each after every update.
            "stage3_param_persistence_threshold": 0,
            **offloads,
        },
    }
