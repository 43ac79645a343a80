"""The policy: passes of a Hugging Face causal language model under DeepSpeed ZeRO-3.

Unless noted otherwise, every public method is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from buffer.types import TrajectoryGroup
from configs.schema import LoraConfig, TrainerConfig
from trainer_pool.collectives import RankAddress
from trainer_pool.data.packing import MicroBatch, PackedRow, PassCost, packed_row
from trainer_pool.model import attention
from trainer_pool.model.checkpoint_names import (
    check_names,
    check_tied_head,
    checkpoint_parts,
    is_tied,
)
from trainer_pool.model.engine import Zero3Model
from trainer_pool.model.head import Candidates, Scores, ScoringHead, TokensToScore
from trainer_pool.model.lora import (
    adapter_name,
    add_adapter,
    base_name,
    is_adapters,
)
from trainer_pool.model.pictures import check_pictures, find_tower
from trainer_pool.model.reference import Reference
from trainer_pool.model.routers import gates
from trainer_pool.model.routing import RoutingReplay, check_routes
from trainer_pool.model.sequence import RowPart, SequenceGroup, check_heads, join_sequence_group
from trainer_pool.model.sharded_state import ShardedState
from trainer_pool.state.adapter import Adapter
from trainer_pool.state.export import write_model


class Zero3Policy(Zero3Model):
    """The policy.

    Example, one update by two micro-batches:

        policy = Zero3Policy("a/model", config, address)    # after join_ranks()
        for batch in micro_batches:
            policy.backward(-policy.score(batch).logprobs.sum() / num_tokens)
        norm = policy.step(learning_rate=1e-6)
    """

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        address: RankAddress,
        *,
        trust_remote_code: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """`lora`: an adapter is trained instead of the weights."""
        self._lora = lora
        super().__init__(model_path, config, address, trust_remote_code=trust_remote_code)
        self.state = ShardedState(
            self._deepspeed,
            address.num_ranks,
            model_path,
            self._parts,
            is_adapter=lora is not None,
        )
        self._sequence: SequenceGroup | None = None
        if config.sequence_parallel_size > 1:
            self._sequence = join_sequence_group(config.sequence_parallel_size, config.timeout_s)
        self.part: RowPart | None = None
        """This rank's part of the last pass's row, if rows are split."""
        self._reference: Reference | None = None
        self._replay: RoutingReplay | None = None
        """From the first pass with known experts on."""
        self._deepspeed.eval()
        attention.check_model(model_path, lambda *row: self._forward(*row)[0], self.device)
        self._deepspeed.train()
        unsampled = () if self._tower is None else self._tower.unsampled
        self._head = ScoringHead(self._deepspeed.module, model_path, unsampled)
        two = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._head.learn_shape(lambda: self._forward(packed_row([two]), two[1:]))

    def _trained(self, model: Any, config: TrainerConfig) -> Any:
        path, lora = self._model_path, self._lora
        self._parts = checkpoint_parts(model)
        check_names(path, self._parts)
        check_tied_head(path, model)
        check_heads(config.sequence_parallel_size, model.config)
        self._tower = find_tower(
            model,
            path,
            trust_remote_code=self._trust_remote_code,
            is_changed=lora is not None or config.sequence_parallel_size > 1,
        )
        if lora is not None:
            add_adapter(model, lora, path)
        self.gates = gates(model)
        """The routers of a mixture of experts, by layer."""
        return model

    @property
    def config(self) -> Any:
        """transformers' of the model."""
        return self._deepspeed.module.config

    @cached_property
    def cost(self) -> PassCost:
        """The cost of a token and of a pair of tokens in a pass on this rank, from the shape of the
        model. Not a collective."""
        model = self._deepspeed.module
        config = model.config.get_text_config()
        weights = {id(p): p.ds_numel * _active(p, config) for p in model.parameters()}
        if not is_tied(model.config):  # rows of it are looked up, not multiplied
            del weights[id(model.get_input_embeddings().weight)]
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_ranks = 1 if self._sequence is None else self._sequence.size
        return PassCost(
            per_token=sum(weights.values()) / num_ranks,
            per_pair=2.0 * config.num_hidden_layers * config.num_attention_heads * size / num_ranks,
        )

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

    def check_groups(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Raises ValueError naming a group whose experts or pictures are not the model's. Not a
        collective."""
        check_routes(self._model_path, self._deepspeed.module, groups)
        check_pictures(self._tower, groups, self._model_path)

    @property
    def is_replaying(self) -> bool:
        """Some pass has had tokens whose experts are known."""
        return self._replay is not None

    def take_routing(self) -> dict[str, Tensor]:
        """Returns the sums of `RoutingReplay.take`, of all parts of the rows; a collective of the
        ranks that split them."""
        found = {} if self._replay is None else self._replay.take()
        if (part := self.part) is None:
            return found
        return {name: part.add_up(pair) for name, pair in found.items()}

    def _forward(
        self, row: PackedRow, places_N: Tensor, wanted: TokensToScore | None = None
    ) -> Tensor:
        """[3, N] scores, or [1, N, V] logits if none are `wanted`."""
        part, routes = None, row.routes_LC
        tokens, positions = row.tokens_L, row.position_ids_L
        if self._sequence is not None:
            part = self._sequence.part(row, places_N)
            tokens, positions, routes = part.tokens_M, part.position_ids_M, part.routes_MC
            places_N, wanted = part.places, wanted and part.wanted(wanted)
        self.part = part
        inputs: dict[str, Tensor | None] = {"position_ids": positions.unsqueeze(0)}
        if self._tower is not None:
            inputs |= self._tower.inputs(row)
        if routes is not None and self._replay is None:
            self._replay = RoutingReplay(self._deepspeed.module)
        with nullcontext() if self._replay is None else self._replay.of(routes):
            output = self._deepspeed(
                input_ids=tokens.unsqueeze(0),
                use_cache=False,
                logits_to_keep=places_N,
                **inputs,
                **attention.arguments(row, part),
                **({} if wanted is None else {"wanted": wanted}),
            )
        # transformers' own output, until the head is replaced.
        found: Tensor = output if isinstance(output, Tensor) else output.logits
        if part is None:
            return found
        return part.join(found) if wanted else part.join(found.mT).mT

    def hold_reference(self, model_path: str | None, *, offload: bool) -> None:
        """Keep this rank's shards of the model `algorithm.kl.reference`; None: use the base of the
        adapted policy. Raises ValueError if its shape or its config is not the policy's."""
        self._reference = Reference(
            self._deepspeed,
            model_path,
            self._model_path,
            offload=offload,
            trust_remote_code=self._trust_remote_code,
        )

    def reference(self) -> AbstractContextManager[None]:
        """Inside this block, forward passes use the weights of the reference, without gradients."""
        assert self._reference is not None, "hold_reference() comes first"
        return self._reference.in_place_of_policy()

    def backward(self, loss: Tensor) -> Tensor:
        """Add the gradient of `loss`; `step` applies the sum over all calls and ranks. Ranks that
        split a row have the same loss, which counts once.

        Returns bool [L]: the positions of the last scored row whose input embedding has a gradient
        that is not finite. A trajectory's gradient reaches only its own positions and shared ones.
        """
        super().backward(loss)
        not_finite = self._head.take_not_finite()
        return not_finite if self.part is None else self.part.join_flags(not_finite)

    def export(self, folder: Path) -> None:
        """Write the whole model for `from_pretrained`, an adapter beside it too; rank 0 does the
        work. Raises OSError."""
        is_writer, tensors = dist.get_rank() == 0, dict[str, Tensor]()
        for name, tensor in self.named_tensors():
            if is_writer:
                tensors[name] = tensor.to("cpu", copy=True)
        if not is_writer:
            return
        adapter, module = None, self._deepspeed.module
        if self._lora is not None:
            own = [name for name in tensors if is_adapters(name)]
            factors = {adapter_name(name): tensors.pop(name) for name in own}
            adapter = Adapter(config=self._lora, tensors=factors)
        weights = {base_name(name): tensors.pop(name) for name in list(tensors)}
        if adapter is not None:
            for name, weight in weights.items():
                weights[name] = adapter.merged(name, weight, weight.dtype)
        # The saved ones: corrections of an expert's scores are no parameters.
        saved = module.state_dict().keys()
        weights |= {name: b.cpu() for name, b in module.named_buffers() if name in saved}
        write_model(
            folder,
            module,
            weights,
            self._model_path,
            trust_remote_code=self._trust_remote_code,
            adapter=adapter,
        )


def _active(parameter: Any, config: Any) -> float:
    """The share of a parameter that one token is multiplied with."""
    if len(parameter.ds_shape) != 3:  # of a tower there are convolutions
        return 1.0
    return float(config.num_experts_per_tok / parameter.ds_shape[0])
