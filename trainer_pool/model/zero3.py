"""DeepSpeed ZeRO-3 around a Hugging Face causal language model; the only import of deepspeed.

Parameters, gradients and Adam's moments are sharded. Unless noted otherwise, every public method is
a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import socket
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from configs.choices import Backend, Dtype
from configs.schema import TrainerConfig
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch, PackedRow, PassCost, packed_row
from trainer_pool.model import attention
from trainer_pool.model.checkpoint_names import check_names, check_tied_head
from trainer_pool.model.head import Candidates, Scores, ScoringHead, TokensToScore
from trainer_pool.state.export import write_model
from trainer_pool.state.shards import ShardReader
from weight_sync.layout import Layout
from weight_sync.sender.snapshot import Shard
from weight_sync.types import TensorSpec

Shape = tuple[int, ...]
_GATHER_ELEMENTS = 50_000_000
"""Elements gathered on every rank at once during an export."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankAddress:
    """This process's rank, and the address on which rank 0 listens."""

    rank: int
    num_ranks: int
    host: str
    port: int
    uses_gpu: bool

    @property
    def device(self) -> torch.device:
        # Ray shows each rank its own GPU only, so it is always device 0.
        return torch.device("cuda", 0) if self.uses_gpu else torch.device("cpu")


def join_ranks(
    address: RankAddress, backend: Backend, timeout_s: float, listener: socket | None
) -> Collectives:
    """Join the other ranks in torch's default process group; returns when all have joined.

    Rank 0 passes the socket that listens at `address`: torch would listen on all interfaces.
    """
    if not address.uses_gpu:
        # Otherwise deepspeed runs numactl in every step to find this number.
        os.environ.setdefault("LOCAL_SIZE", "1")
    # On a CPU deepspeed would compile a shared-memory transport here, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    name = backend.value if backend is not Backend.auto else "nccl" if address.uses_gpu else "gloo"
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(
        address.host,
        address.port,
        None,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    dist.init_process_group(
        name, store=store, rank=address.rank, world_size=address.num_ranks, timeout=timeout
    )
    # deepspeed uses the existing group.
    deepspeed.init_distributed(dist_backend=name, auto_mpi_discovery=False, verbose=False)
    device = address.device if name == "nccl" else torch.device("cpu")
    return Collectives(rank=address.rank, num_ranks=address.num_ranks, device=device, store=store)


def leave_ranks() -> None:
    """Close the default process group; a dead peer does not delay it."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Zero3Engine:
    """A policy whose weights are sharded over the ranks, with its optimizer."""

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        address: RankAddress,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        _quieten()
        self.device = address.device
        self.num_ranks = address.num_ranks
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        dtype = _resolve_dtype(config.dtype, uses_gpu=address.uses_gpu)
        settings = _settings(config, dtype, uses_gpu=address.uses_gpu)
        # While this object exists, from_pretrained shards each weight as it is read, so that no
        # rank ever has the whole model in memory.
        self._hf_settings = HfDeepSpeedConfig(settings)
        model = _load(model_path, dtype, trust_remote_code=trust_remote_code)
        check_names(model_path, (name for name, _ in model.named_parameters()))
        check_tied_head(model_path, model)
        # Whole decoder layers are gathered and reduced at once: fewer collectives, and far fewer
        # of deepspeed's Python hooks.
        deepspeed.utils.set_z3_leaf_modules(
            model, list(model._no_split_modules or ()), raise_if_not_found=False
        )
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # A torch optimizer: one named in `settings` would be compiled first.
        adam = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=adam, config=settings, dist_init_required=False
        )
        self._create_moments()
        self._reference: dict[str, Tensor] = {}
        self._norm_limit = math.inf
        adam.register_step_pre_hook(self._skip_update)
        self._engine.eval()
        attention.check_model(model_path, self.logits, self.device)
        self._engine.train()
        self._head = ScoringHead(self._engine.module, model_path)
        two = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._head.learn_shape(lambda: self._forward(packed_row([two]), two[1:]))

    @property
    def cost(self) -> PassCost:
        """The cost of a token and of a pair of tokens in a pass, from the shape of the model. Not a
        collective."""
        model = self._engine.module
        config = model.config.get_text_config()
        weights = {id(p): p.ds_numel for p in model.parameters()}
        if not config.tie_word_embeddings:  # rows of it are looked up, not multiplied
            del weights[id(model.get_input_embeddings().weight)]
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return PassCost(
            per_token=float(sum(weights.values())),
            per_pair=2.0 * config.num_hidden_layers * config.num_attention_heads * size,
        )

    def _create_moments(self) -> None:
        """Create the moments that AdamW would create in its first step: a checkpoint is restored
        before it."""
        optimizer = self._engine.optimizer
        for flat in optimizer.fp32_partitioned_groups_flat:
            optimizer.optimizer.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }

    def logits(self, row: PackedRow, places_N: Tensor) -> Tensor:
        """[N, V] next-token logits at these positions of a packed row; only before the head is
        replaced by `score`'s."""
        logits: Tensor = self._forward(row, places_N).logits[0]
        return logits

    def score(self, batch: MicroBatch) -> Scores:
        """The policy's scores of a micro-batch's N trained tokens, each among its candidates."""
        candidates = None
        if len(batch.candidates_K):
            ends_N = batch.num_candidates_N.cumsum(0).cpu()
            candidates = Candidates(ids_K=batch.candidates_K, ends_N=ends_N)
        wanted = TokensToScore(
            places_N=batch.places_N,
            targets_N=batch.targets_N,
            temperatures_N=batch.temperatures_N,
            candidates=candidates,
        )
        logprobs, entropy, sum_squares = self._forward(batch.row, batch.places_N, wanted=wanted)
        return Scores(logprobs, entropy, sum_squares.detach())

    def _forward(self, row: PackedRow, places_N: Tensor, **wanted: TokensToScore) -> Any:
        return self._engine(
            input_ids=row.tokens_L.unsqueeze(0),
            position_ids=row.position_ids_L.unsqueeze(0),
            use_cache=False,
            logits_to_keep=places_N,
            **attention.arguments(row),
            **wanted,
        )

    def hold_reference(self, model_path: str, *, offload: bool) -> None:
        """Keep this rank's shards of another model of the same shape, as `algorithm.kl.reference`;
        with `offload` in host memory. Raises ValueError if its shape is another."""
        own = dict(self._engine.module.named_parameters())
        dtype = next(iter(own.values())).ds_tensor.dtype
        model = _load(
            model_path,
            dtype,
            trust_remote_code=self._trust_remote_code,
            setting="algorithm.kl.reference",
        )
        theirs = dict(model.named_parameters())
        shapes = [{name: tuple(p.ds_shape) for name, p in of.items()} for of in (own, theirs)]
        if wrong := _differences(*shapes):
            raise ValueError(
                f"algorithm.kl.reference={model_path!r}: it and the policy differ in the shape of "
                f"{wrong}; choose a model of the same shape as model.path={self._model_path!r}"
            )
        for name, parameter in theirs.items():
            shard = parameter.ds_tensor.data.detach().clone()
            if offload and shard.is_cuda:
                shard = shard.cpu().pin_memory()
            self._reference[name] = shard

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside this block, forward passes use the weights of the reference, without gradients."""
        assert self._reference, "hold_reference() comes first"
        own: dict[str, Tensor] = {}
        # deepspeed may still hold gathered weights of the policy, and would use them in the next
        # pass.
        self._engine.optimizer.empty_partition_cache()
        try:
            for name, parameter in self._engine.module.named_parameters():
                own[name] = parameter.ds_tensor.data
                parameter.ds_tensor.data = self._reference[name].to(own[name].device)
            with torch.no_grad():
                yield
        finally:
            self._engine.optimizer.empty_partition_cache()
            for name, parameter in self._engine.module.named_parameters():
                if name in own:
                    parameter.ds_tensor.data = own[name]

    def backward(self, loss: Tensor) -> Tensor:
        """Add the gradient of `loss`; `step` applies the sum over all calls and ranks.

        Returns bool [L]: the positions of the last scored row whose input embedding has a gradient
        that is not finite. A trajectory's gradient reaches only its own positions and shared ones.
        """
        # deepspeed averages over the ranks, but the losses here are shares of one global sum.
        self._engine.backward(loss * self.num_ranks)
        return self._head.take_not_finite()

    def step(
        self, learning_rate: float, *, norm_limit: float | None = None, divisor: float = 1.0
    ) -> float | None:
        """Divide the gradients by `divisor`, clip, update and clear them; returns their global norm
        before clipping.

        None if a gradient was not finite, 0 if all were zero. In both cases, and if the norm is
        above `norm_limit`, no rank changes its weights or optimizer.
        """
        self._norm_limit = math.inf if norm_limit is None else norm_limit
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        # deepspeed divides by it, as if the losses had been scaled.
        self._engine.optimizer.loss_scale = divisor
        self._engine.step()
        self._engine.optimizer.loss_scale = 1.0
        if not self._engine.was_step_applied():
            return None
        return float(self._engine.get_global_grad_norm())

    def _skip_update(self, adam: torch.optim.Optimizer, *_: object) -> None:
        # With a zero gradient Adam would still change the weights, by momentum and weight decay.
        # deepspeed sets `params` again before each update. Their gradients must stay: offloaded
        # ones are buffers that the next update fills. The norm is global, so all ranks agree.
        if not 0 < self._engine.optimizer._global_grad_norm <= self._norm_limit:
            for group in adam.param_groups:
                group["params"] = []

    def reset_optimizer(self) -> None:
        """Reset Adam's moments; the weights stay. Not a collective."""
        for state in self._engine.optimizer.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def layout(self, serving_dtype: str) -> Layout:
        """Every parameter by its Hugging Face name, as engines serve it. Not a collective.

        A tied output head is not listed. Raises RuntimeError if deepspeed has sharded a parameter
        differently from the layout.
        """
        parameters = list(self._engine.module.named_parameters())
        specs = [
            TensorSpec(name=name, dtype=serving_dtype, shape=tuple(parameter.ds_shape))
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

    def shards(self) -> Iterator[Shard]:
        """This rank's piece of each parameter, as views of the live weights. Not a collective."""
        for name, parameter in self._engine.module.named_parameters():
            start, stop = self._own_range(parameter)
            yield Shard(name=name, tensor=parameter.ds_tensor.data.flatten()[: stop - start])

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every full parameter by its Hugging Face name, in the same order on all ranks.

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
        for name, parameter in self._engine.module.named_parameters():
            if bucket and num_elements + parameter.ds_numel > _GATHER_ELEMENTS:
                yield bucket
                bucket, num_elements = [], 0
            bucket.append((name, parameter))
            num_elements += parameter.ds_numel
        yield bucket

    # The training state, for checkpoints ---------------------------------------------------------

    def state_layout(self) -> Layout:
        """The whole tensors that `restore_state` needs: the float32 weights of each trained
        parameter, as NAME, and its optimizer's state, as NAME:KEY. Not a collective."""
        specs = []
        for name, parameter in self._engine.module.named_parameters():
            shape = tuple(parameter.ds_shape)
            for key in ("", *self._optimizer_keys(parameter)):
                dtype = torch.float32 if parameter.requires_grad else parameter.ds_tensor.dtype
                text = str(dtype).removeprefix("torch.")
                specs.append(TensorSpec(name=_state_name(name, key), dtype=text, shape=shape))
        return Layout.of(specs, self.num_ranks)

    def state_shards(self) -> Iterator[Shard]:
        """This rank's pieces of `state_layout`, as views of the live state. Not a collective."""
        for name, parameter in self._engine.module.named_parameters():
            start, stop = self._own_range(parameter)
            for key in ("", *self._optimizer_keys(parameter)):
                tensor = self._local_state(parameter, key)[: stop - start]
                yield Shard(name=_state_name(name, key), tensor=tensor)

    @property
    def num_updates(self) -> int:
        """Updates of the optimizer since its state was new, by which Adam corrects its bias. Not a
        collective."""
        states = self._engine.optimizer.optimizer.state.values()
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def restore_state(self, reader: ShardReader, num_updates: int) -> None:
        """Continue from a state that any number of ranks wrote. Not a collective.

        Raises ValueError if it is that of another model.
        """
        expected = {spec.name: spec.shape for spec in self.state_layout().tensors}
        found = {spec.name: spec.shape for spec in reader.layout.tensors}
        if wrong := _differences(expected, found):
            raise ValueError(
                f"the checkpoint is of another model: it and model.path={self._model_path!r} "
                f"differ in {wrong}; set model.path to the model that the run began with"
            )
        for name, parameter in self._engine.module.named_parameters():
            start, stop = self._own_range(parameter)
            for key in ("", *self._optimizer_keys(parameter)):
                piece = reader.read(_state_name(name, key), start, stop)
                self._local_state(parameter, key)[: stop - start].copy_(piece)
                if not key:
                    parameter.ds_tensor.data.flatten()[: stop - start].copy_(piece)
        for state in self._engine.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)

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
        state = self._engine.optimizer.optimizer.state[flat]
        return sorted(key for key, value in state.items() if value.numel() == flat.numel())

    def _place(self, parameter: Any) -> tuple[Tensor, int, int]:
        """The flat float32 weights that contain this rank's piece, the piece's start, its size."""
        optimizer = self._engine.optimizer
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
        whole: Tensor = self._engine.optimizer.optimizer.state[flat][key] if key else flat
        return whole.detach().narrow(0, begin, size)

    def export(self, folder: Path) -> None:
        """Write the whole model for `from_pretrained`; rank 0 does the work. Raises OSError."""
        is_writer = dist.get_rank() == 0
        weights = {
            name: tensor.to("cpu", copy=True) for name, tensor in self.named_tensors() if is_writer
        }
        if is_writer:
            write_model(
                folder,
                self._engine.module,
                weights,
                self._model_path,
                trust_remote_code=self._trust_remote_code,
            )

    def close(self) -> None:
        """Remove deepspeed's hooks from the model and free its buffers. Not a collective."""
        self._engine.destroy()


def _load(
    model_path: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool,
    setting: str = "model.path",
) -> Any:
    """The torch module; transformers' annotation of it is too loose to use."""

    def build() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=dtype,
            attn_implementation=attention.PACKED,
            trust_remote_code=trust_remote_code,
        )

    try:
        return without_dropout(attention.packable(model_path, build))
    except OSError as error:
        raise ValueError(
            f"{setting}={model_path!r}: neither a folder with a Hugging Face model nor the name "
            f"of one that can be reached; correct {setting} ({error})"
        ) from error


def without_dropout(model: Any) -> Any:
    """The model with all its dropout at 0, in training too.

    The engines sample without dropout. With it the policy's log-probabilities would be noisy, and
    so would the ratio of policies, which multiplies the advantages.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _differences(mine: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> str:
    """The first names of tensors whose shapes differ, or that only one of the two has."""
    wrong = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
    return ", ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else "")


def _state_name(parameter: str, key: str) -> str:
    return f"{parameter}:{key}" if key else parameter


def _quieten() -> None:
    deepspeed.utils.logger.setLevel(logging.WARNING)
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
