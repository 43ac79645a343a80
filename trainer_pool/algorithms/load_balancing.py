"""The load of the experts of a mixture, and the loss that evens it out; pure.

Only trained tokens count, once for each trajectory that has them: each at the position that
predicts it. So neither padding nor packing, shared prefixes nor the split into micro-batches and
ranks changes a sum.

Letters: N trained tokens of a pass, G layers with experts, E experts, C columns of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class RouterSums:
    """Sums over tokens of what each router computed for them, as one table that can be added up.

    Example, of two tokens, one layer, three experts, one expert a token:

        probabilities   0.7 0.2 0.1        chosen_GE          1   1   0
                        0.3 0.6 0.1        probabilities_GE   1.0 0.8 0.2
    """

    table_GC: Tensor
    """C = 2 E + 2."""

    @classmethod
    def of_pass(cls, layers: Sequence[Tensor]) -> RouterSums:
        """The sums of a pass from [C] of each of its layers; a dense model has none."""
        return cls(table_GC=torch.stack([*layers]) if layers else torch.zeros(0, 2))

    def plus(self, other: RouterSums) -> RouterSums:
        """The sums of the tokens of both, in float64."""
        mine, theirs = self.table_GC, other.table_GC.double()
        return RouterSums(table_GC=mine + theirs if len(mine) else theirs)

    @property
    def num_experts(self) -> int:
        return self.table_GC.shape[1] // 2 - 1

    @property
    def chosen_GE(self) -> Tensor:
        """How many tokens chose the expert."""
        return self.table_GC[:, : self.num_experts]

    @property
    def probabilities_GE(self) -> Tensor:
        return self.table_GC[:, self.num_experts : -2]

    @property
    def tokens_G1(self) -> Tensor:
        return self.table_GC[:, -1:]

    def metrics(self) -> dict[str, float]:
        """Figures of a step by name, from its sums over all ranks; none for a dense model."""
        if not self.table_GC.sum():
            return {}
        even_G1 = self.chosen_GE.mean(1, keepdim=True)
        return {
            "router_entropy": float((self.table_GC[:, -2:-1] / self.tokens_G1).mean()),
            "router_max_load": float((self.chosen_GE / even_G1).max()),
            "router_dead_experts": float((self.chosen_GE == 0).sum()),
            "load_balancing_loss": float(load_balancing_loss(self, self)),
        }


def sums_of_layer(probabilities_NE: Tensor, experts_Nk: Tensor, is_trained_N: Tensor) -> Tensor:
    """[C] the row of one layer in a table; sums of the probabilities have their gradient."""
    trained_NE = probabilities_NE.masked_fill(~is_trained_N.unsqueeze(1), 0.0)
    ones_N = is_trained_N.to(trained_NE.dtype)
    with torch.no_grad():
        zeros_E = trained_NE.new_zeros(trained_NE.shape[1])
        ones_Nk = ones_N.unsqueeze(1).expand(experts_Nk.shape)
        chosen_E = zeros_E.index_add(0, experts_Nk.flatten(), ones_Nk.flatten())
        entropy = torch.special.entr(trained_NE).sum()
    return torch.cat([chosen_E, trained_NE.sum(0), torch.stack([entropy, ones_N.sum()])])


def load_balancing_loss(sums: RouterSums, of_update: RouterSums) -> Tensor:
    """The part of a loss of an update that the tokens of `sums` have, from the sums of all tokens
    of the update, on all ranks:

        mean over layers of E x sum over experts of f x P

    f: the fraction of the update's tokens that chose the expert, a constant; over all experts it
    sums to k. P: its mean probability. Even load gives k. (Switch Transformer, arXiv 2101.03961,
    eq. 4 to 6, for k experts as transformers' `load_balancing_loss_func` computes it of one layer.
    That function, given several layers, joins their tokens first: experts of one number in
    different layers would make up for each other.)

    f is that of the whole update ("global-batch", Qiu et al. 2025, Demons in the Detail, arXiv
    2501.11873) and not of a micro-batch, which would force every few sequences to use all experts,
    and whose sum would depend on the split. P is a sum over tokens, so the parts of micro-batches
    add up to the loss, and their gradients to its gradient.
    """
    fractions_GE = of_update.chosen_GE / of_update.tokens_G1
    means_GE = sums.probabilities_GE / of_update.tokens_G1
    return sums.num_experts * (fractions_GE * means_GE).sum(1).mean()
