"""The critic of `algorithm.critic`: a second ZeRO-3 model, which learns the values of tokens.

    rows ─► values V at the start of the step ─► gae ─► advantages, returns R
    each minibatch: passes ─► max((V - R)^2, (V clipped to V at the start - R)^2) / 2 ─► update

It has the policy's shape, with a head [H -> 1]. A loss has the weights and the denominator of the
policy's, so the number of ranks changes nothing. It is in checkpoints, and never served.

Letters: L positions of a packed row, N trained tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from configs.advantages import CriticConfig
from configs.algorithm_schema import RETURN_COLUMN, VALUE_COLUMN
from configs.schema import TrainerConfig
from tensors.pictures import takes_pictures
from trainer_pool.collectives import Collectives, RankAddress
from trainer_pool.data.packing import MicroBatch
from trainer_pool.model import attention
from trainer_pool.model.checkpoint_names import check_reference
from trainer_pool.model.engine import Zero3Model
from trainer_pool.model.sharded_state import CRITIC, ShardedState


class Critic(Zero3Model):
    """Values of states, with an optimizer; its methods are collectives, as the policy's."""

    SETTING = "algorithm.critic.path"

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        address: RankAddress,
        policy: Any,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """`policy`: its transformers config. Raises ValueError if the model's is another: the rows
        of a pass and their parts are chosen for the policy."""
        self._policy = policy
        super().__init__(model_path, config, address, trust_remote_code=trust_remote_code)
        ranks = address.num_ranks
        self.state = ShardedState(self._deepspeed, ranks, model_path, {}, prefix=CRITIC)
        self._deepspeed.train()  # loaded models are not, and then no layer is recomputed

    def _trained(self, model: Any, config: TrainerConfig) -> Any:
        setting = f"{self.SETTING}={self._model_path!r}"
        if takes_pictures(model.config):
            raise ValueError(f"{setting}: a critic sees no pictures; set algorithm.critic=null")
        check_reference(setting, self._policy, model.config)
        self._body_name = model.base_model_prefix
        return _ValueModel(model.base_model, model.config.hidden_size)

    def begin_as(self, policy: ShardedState) -> None:
        """Take the policy's weights, all but the head's. Not a collective."""
        names = (name for name, _ in self._deepspeed.module.body.named_parameters())
        theirs = {f"{CRITIC}body.{name}": f"{self._body_name}.{name}" for name in names}
        self.state.copy_from(policy, theirs)

    def values(self, batch: MicroBatch) -> Tensor:
        """[N] in float32: of what came before each trained token of a micro-batch."""
        row = batch.row
        values_N: Tensor = self._deepspeed(
            places_N=batch.places_N,
            input_ids=row.tokens_L.unsqueeze(0),
            position_ids=row.position_ids_L.unsqueeze(0),
            use_cache=False,
            **attention.arguments(row),
        )
        return values_N


class _ValueModel(nn.Module):
    def __init__(self, body: Any, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.head = _ValueHead(hidden_size, 1, dtype=body.dtype)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)  # the same on every rank

    def forward(self, places_N: Tensor, **inputs: Any) -> Tensor:
        hidden_1LH = self.body(**inputs).last_hidden_state
        values_N: Tensor = self.head(hidden_1LH[0, places_N]).squeeze(-1)
        return values_N


class _ValueHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        # In bfloat16 values would have three digits, and their differences none.
        return linear(hidden.float(), self.weight.float(), self.bias.float())


@dataclass(kw_only=True, slots=True, frozen=True)
class CriticStep:
    """The critic in one step."""

    critic: Critic
    config: CriticConfig
    learning_rate: float
    holds_policy: bool
    """The critic alone learns in this step (`warmup_steps`)."""


def value_loss(
    values_N: Tensor, start_N: Tensor, returns_N: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """[N] losses, and whether the clipped value is the worse one: then there is no gradient.

    As PPO's code has it (Engstrom et al. 2020, arXiv 2005.12729, section 3).
    """
    loss_N = (values_N - returns_N).square() / 2
    if clip_range is None:
        return loss_N, torch.zeros_like(loss_N, dtype=torch.bool)
    clipped_N = start_N + (values_N - start_N).clamp(-clip_range, clip_range)
    of_clipped_N = (clipped_N - returns_N).square() / 2
    return torch.maximum(loss_N, of_clipped_N), of_clipped_N > loss_N


def update_critic(
    step: CriticStep,
    minibatches: Iterable[tuple[Sequence[MicroBatch], float]],
    ranks: Collectives,
    before_update: Callable[[], None],
) -> dict[str, float]:
    """An update for each minibatch, of which every rank has the same number of micro-batches, and
    the denominator. Returns metrics of the step; collective."""
    sums = torch.zeros(7, dtype=torch.float64, device=step.critic.device)
    norms = []
    for micro_batches, denominator in minibatches:
        for micro_batch in micro_batches:
            sums += _accumulate(step, micro_batch.to(step.critic.device), denominator)
        before_update()
        norms.append(step.critic.step(step.learning_rate))
    return _metrics(ranks.gather(sums).sum(0).tolist(), norms)


def _accumulate(step: CriticStep, batch: MicroBatch, denominator: float) -> Tensor:
    """Add the gradient of one micro-batch; returns sums over its trained tokens."""
    values_N = step.critic.values(batch)
    mask_N = batch.mask_N != 0
    if not batch.num_tokens:  # backward all the same: other ranks wait for this pass
        step.critic.backward(values_N.masked_fill(~mask_N, 0.0).sum())
        return values_N.new_zeros(7, dtype=torch.float64)
    start_N, returns_N = (
        batch.columns[name].masked_fill(~mask_N, 0.0) for name in (VALUE_COLUMN, RETURN_COLUMN)
    )
    loss_N, is_clipped_N = value_loss(values_N, start_N, returns_N, step.config.clip_range)
    loss_N = loss_N.masked_fill(~mask_N, 0.0)
    step.critic.backward((batch.weights_N * loss_N).sum() / denominator)
    returns_N, errors_N = returns_N.double(), returns_N.double() - start_N
    columns = (
        mask_N,
        loss_N,
        is_clipped_N & mask_N,
        returns_N,
        returns_N**2,
        errors_N,
        errors_N**2,
    )
    return torch.stack([column.detach().double().sum() for column in columns])


def _metrics(sums: Sequence[float], norms: Sequence[float | None]) -> dict[str, float]:
    number, loss, clipped, returns, returns_squared, errors, errors_squared = sums
    if not number:
        return {}
    finite = [norm for norm in norms if norm is not None]
    variance = returns_squared / number - (returns / number) ** 2
    varies = variance > 1e-12 * returns_squared / number  # below it are errors of rounding
    unexplained = errors_squared / number - (errors / number) ** 2
    return {
        "value_loss": loss / number,
        "value_clip_fraction": clipped / number,
        # Of the values by which this step's advantages were estimated.
        "explained_variance": 1 - unexplained / variance if varies else math.nan,
        "critic_grad_norm": sum(finite) / len(finite) if finite else math.nan,
        "critic_skipped_updates": float(len(norms) - len(finite)),
    }
