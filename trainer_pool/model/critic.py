"""The critic of `algorithm.critic`: the value of each token's beginning, by a model of the policy's
shape with weights of its own.

    tokens ─► body, as the policy's ─► hidden [N, H] ─► head [H -> 1], float32 ─► values [N]

It is a second ZeRO-3 engine on the same ranks, in checkpoints beside the policy, and never served.

Letters: L positions of a packed row, N trained tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from configs.schema import TrainerConfig
from trainer_pool.collectives import RankAddress
from trainer_pool.data.packing import MicroBatch
from trainer_pool.model import attention
from trainer_pool.model.checkpoint_names import check_reference
from trainer_pool.model.sharded_state import CRITIC, ShardedState
from trainer_pool.model.zero3 import Zero3Model, Zero3Policy


class Critic(Zero3Model):
    """Values of states, with an optimizer; its methods are collectives, as the policy's.

    Example, one update:

        critic = Critic("a/model", config, address, policy)
        critic.backward((critic.values(batch) - returns_N).square().mean())
        critic.step(learning_rate=1e-5)
    """

    SETTING = "algorithm.critic.path"

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        address: RankAddress,
        policy: Zero3Policy,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Raises ValueError if the model's config is not the policy's, by whose passes its rows are
        balanced over the ranks."""
        self._policy_config = policy.config
        super().__init__(model_path, config, address, trust_remote_code=trust_remote_code)
        self.state = ShardedState(self._deepspeed, address.num_ranks, model_path, {}, prefix=CRITIC)

    def _trained(self, model: Any, config: TrainerConfig) -> Any:
        setting = f"{self.SETTING}={self._model_path!r}"
        check_reference(setting, self._policy_config, model.config)
        self._body_name = model.base_model_prefix
        return _ValueModel(model.base_model, model.config.hidden_size)

    def begin_as(self, policy: Zero3Policy) -> None:
        """Take the policy's weights, all but the head's. Not a collective."""
        names = (name for name, _ in self._deepspeed.module.body.named_parameters())
        self.state.copy_from(
            policy.state, {f"{CRITIC}body.{name}": f"{self._body_name}.{name}" for name in names}
        )

    def values(self, batch: MicroBatch) -> Tensor:
        """[N] in float32: of what came before each trained token of a micro-batch."""
        row = batch.row
        values_N: Tensor = self._deepspeed(
            places_N=batch.places_N,
            input_ids=row.tokens_L.unsqueeze(0),
            position_ids=row.position_ids_L.unsqueeze(0),
            use_cache=False,
            **attention.arguments(row, None),
        )
        return values_N

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`; `step` applies the sum over all calls and ranks."""
        self._add_gradient(loss)


class _ValueModel(nn.Module):
    def __init__(self, body: Any, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.head = _ValueHead(hidden_size, 1, dtype=body.dtype)
        # All values are 0 at first, on every rank.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, places_N: Tensor, **inputs: Any) -> Tensor:
        hidden_1LH = self.body(**inputs).last_hidden_state
        values_N: Tensor = self.head(hidden_1LH[0, places_N]).squeeze(-1)
        return values_N


class _ValueHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        # In bfloat16 values would have three digits, and their differences none.
        return linear(hidden.float(), self.weight.float(), self.bias.float())
