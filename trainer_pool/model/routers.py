"""The routers of a mixture of experts: which modules of a model they are, and what they answer.

    hidden [L, H] ─► gate ─► logits [L, E] ─► k experts of each token ─► experts of the block

transformers calls the router of a layer its gate. A type of model is added in `_FORMS`.

Letters: L tokens of a pass, E experts, k experts of a token, C columns of `RouterSums`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainer_pool.algorithms.load_balancing import sums_of_layer
from trainer_pool.data.packing import MicroBatch
from trainer_pool.model.sequence import RowPart


class Form(Enum):
    """The output of a gate, and its distribution over experts."""

    softmax = "softmax"
    """(logits [L, E], weights [L, k], experts int64 [L, k]); softmax of the logits."""
    sigmoid = "sigmoid"
    """Logits [L, E] alone, for the block's `route_tokens_to_experts`, whose choice a correction of
    the scores moves; sigmoid of the logits, divided by their sum."""


_FORMS: Mapping[str, Form] = {
    "MixtralTopKRouter": Form.softmax,
    "OlmoeTopKRouter": Form.softmax,
    "Qwen2MoeTopKRouter": Form.softmax,
    "Qwen3MoeTopKRouter": Form.softmax,
    "Glm4MoeTopkRouter": Form.sigmoid,
}
"""By the class of the gate."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Gate:
    """The router of one layer."""

    name: str
    """As "model.layers.0.mlp.gate"."""
    layer: int
    """Among all layers of the model: some types begin with layers without experts."""
    num_experts: int
    num_chosen: int
    """Experts of a token: k."""
    form: Form
    module: nn.Module
    """A forward hook on it sees, and may replace, what it answers."""
    block: Any
    """The module of gate and experts."""

    def logits(self, output: Any) -> Tensor:
        """[L, E] of the module's output."""
        logits: Tensor = output[0] if self.form is Form.softmax else output
        return logits

    def experts(self, output: Any) -> Tensor:
        """int64 [L, k]: the experts that the layer uses after this output of the module."""
        if self.form is Form.softmax:
            experts: Tensor = output[2]
        else:
            experts, _ = self.block.route_tokens_to_experts(output)
        return experts

    def probabilities(self, logits: Tensor) -> Tensor:
        """[L, E] in float32, with a gradient."""
        if self.form is Form.softmax:
            return logits.float().softmax(-1)
        scores = logits.float().sigmoid()
        return scores / scores.sum(-1, keepdim=True)


def gates(model: nn.Module) -> list[Gate]:
    """The routers of a transformers model in the order of its layers; none of a dense model, nor of
    a type that is not listed here."""
    found = []
    for name, module in model.named_modules():
        form = _FORMS.get(type(module).__name__)
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if form is None or layer is None:
            continue
        settings: Any = module
        num_experts = settings.num_experts if form is Form.softmax else settings.n_routed_experts
        found.append(
            Gate(
                name=name,
                layer=int(layer[1]),
                num_experts=int(num_experts),
                num_chosen=int(settings.top_k),
                form=form,
                module=module,
                block=model.get_submodule(name.rpartition(".")[0]),
            )
        )
    return sorted(found, key=lambda gate: gate.layer)


def check_gates(model: str, found: Sequence[Gate], weight: float) -> None:
    """Raises ValueError if `algorithm.load_balancing_weight` has no router to act on; `model`: its
    setting and value."""
    if weight and not found:
        raise ValueError(
            f"algorithm.load_balancing_weight={weight:g}: {model} has no router of experts, or one "
            "of a type that is not known here; set 0, or choose a mixture that "
            "docs/models.md#mixtures-of-experts names"
        )


@contextmanager
def watching(
    found: Sequence[Gate],
    batch: MicroBatch,
    part_of_pass: Callable[[], RowPart | None] = lambda: None,
    *,
    has_gradient: bool = False,
) -> Iterator[list[Tensor]]:
    """After this block, in which the model makes a pass over the row of `batch`, the list has [C]
    sums over its trained tokens for each of the gates.

    `part_of_pass`: this rank's part of the row, if ranks split it; all of them get the sums of the
    whole. `has_gradient`: the sums have one with respect to the weights.
    """
    layers, all_trained_N = list[Tensor](), batch.is_trained_N

    def note(gate: Gate, _module: nn.Module, _inputs: object, output: Any) -> None:
        # Saved here and not by the checkpoint of a layer, which would miss these tensors when it
        # computes the layer again: then there is no hook.
        with torch.set_grad_enabled(has_gradient), saved_tensors_hooks(_as_it_is, _as_it_is):
            places_N, is_trained_N = batch.places_N, all_trained_N
            if (part := part_of_pass()) is not None:
                places_N, is_trained_N = part.places, all_trained_N[part.own_places]
            logits_NE = gate.logits(output)[places_N]
            experts_Nk = gate.experts(output)[places_N]
            probabilities_NE = gate.probabilities(logits_NE)
            layers.append(sums_of_layer(probabilities_NE, experts_Nk, is_trained_N))

    with ExitStack() as hooks:
        for gate in found:
            # Behind all other hooks, one of which may have replaced the choice.
            hooks.enter_context(gate.module.register_forward_hook(partial(note, gate)))
        yield layers
    if layers and (part := part_of_pass()) is not None:
        layers[:] = part.add_up(torch.stack(layers)).unbind()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
