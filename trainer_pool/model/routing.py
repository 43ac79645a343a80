"""Routing replay: a token of a mixture of experts goes to the experts that the engine has chosen.

    gate ─► logits ─► top k ─► own experts ──┐ where the engine's are unknown
                                             ├─► their softmax(logits), or sigmoid, normalized and
    the engine's experts of each token ──────┘   scaled as the model does

Only the choice is replayed; the weights of the experts are the trainer's, with their gradient. An
engine and a trainer choose otherwise where two experts are nearly equal, and more often after the
weights have changed: then the ratio of their probabilities is that of two other functions
(Ma et al. 2025, arXiv 2510.11370).

Letters: L tokens of a packed row, M layers, K experts of a token in a layer, C = M * K, E experts
of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.types import ROUTES_COLUMN, TrajectoryGroup
from trainer_pool.model.routers import Form, Gate, gates

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Experts and their weights, [L, K] each, of the logits [L, E] of a gate (`Form.sigmoid`)."""


class RoutingReplay:
    """Hooks on the gates of a model.

    Example:

        replay = RoutingReplay(model)
        with replay.of(routes_LC):
            logits = model(tokens)      # and its backward pass, before the next block
        replay.take()                   # {"route_drift": [3, 200], ...}
    """

    def __init__(self, module: Any) -> None:
        self._routes_LMK: Tensor | None = None
        self._is_known_L1: Tensor | None = None
        self._is_counting = False
        self._drift: Tensor | None = None
        self._chosen_LK = dict[int, Tensor]()
        """Experts by layer, of gates whose block chooses (`Form.sigmoid`)."""
        self._num_layers = int(module.config.get_text_config().num_hidden_layers)
        for gate in gates(module):
            hook: Callable[..., Any] = partial(self._route, gate)
            if gate.form is Form.sigmoid:
                choose = gate.block.route_tokens_to_experts
                hook = partial(self._note, gate, choose)
                gate.block.route_tokens_to_experts = partial(self._choose, gate, choose)
            # Before hooks that look at what is chosen.
            gate.module.register_forward_hook(hook, prepend=True)

    @contextmanager
    def of(self, routes_LC: Tensor | None) -> Iterator[None]:
        """Inside this block passes take `PackedRow.routes_LC`, and after it their backward pass,
        which may compute layers again; None: the model chooses all experts."""
        self._routes_LMK = self._is_known_L1 = None
        if routes_LC is not None:
            self._routes_LMK = routes_LC.view(len(routes_LC), self._num_layers, -1).long()
            self._is_known_L1 = routes_LC.any(1, keepdim=True)
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def take(self) -> dict[str, Tensor]:
        """A sum and a count, float64 [2], of all passes since the last call: `route_drift`, the
        share of the model's own choices, by token and layer, that are not the engine's."""
        drift, self._drift = self._drift, None
        return {} if drift is None else {"route_drift": drift}

    def _route(
        self, gate: Gate, module: Any, _: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Replaces the output of a gate (`Form.softmax`) by one of the same form."""
        if self._routes_LMK is None:
            return None
        logits_LE, weights_LK, own_LK = output
        chosen_LK = self._sent_to(gate, own_LK)
        found_LK = gate.probabilities(logits_LE).gather(1, chosen_LK)
        if getattr(module, "norm_topk_prob", True):  # Mixtral has no such setting
            found_LK = found_LK / found_LK.sum(-1, keepdim=True)
        return logits_LE, found_LK.to(weights_LK.dtype), chosen_LK

    def _note(self, gate: Gate, choose: Choose, _module: Any, _: object, logits_LE: Tensor) -> None:
        """Notes where the tokens of a pass go, once: the block, and what counts its choices
        (`Gate.experts`), each ask `_choose`."""
        if self._routes_LMK is not None:
            with torch.no_grad():
                own_LK, _ = choose(logits_LE)
            self._chosen_LK[gate.layer] = self._sent_to(gate, own_LK)

    def _choose(self, gate: Gate, choose: Choose, logits_LE: Tensor) -> tuple[Tensor, Tensor]:
        """In the place of the block's method: a correction moves its choice, and not the weights.
        The same operations as there, so that its own choices get the same weights, bit by bit."""
        if self._routes_LMK is None:
            return choose(logits_LE)
        chosen_LK = self._chosen_LK[gate.layer]
        found_LK = logits_LE.sigmoid().gather(1, chosen_LK)
        if gate.block.norm_topk_prob:
            found_LK = found_LK / (found_LK.sum(-1, keepdim=True) + 1e-20)
        return chosen_LK, found_LK * gate.block.routed_scaling_factor

    def _sent_to(self, gate: Gate, own_LK: Tensor) -> Tensor:
        """The engine's experts of the tokens of a pass where they are known, else the gate's."""
        assert self._routes_LMK is not None and self._is_known_L1 is not None
        chosen_LK = torch.where(self._is_known_L1, self._routes_LMK[:, gate.layer], own_LK)
        if self._is_counting:
            differs_L = (chosen_LK.sort().values != own_LK.sort().values).any(1)
            pair = torch.stack([differs_L.sum(), self._is_known_L1.sum()]).double()
            self._drift = pair if self._drift is None else self._drift + pair
        return chosen_LK


def check_routes(model_path: str, module: Any, groups: Sequence[TrajectoryGroup]) -> None:
    """Raises ValueError naming a group with a column of experts that another model has chosen."""
    for group in groups:
        for trajectory in group.trajectories:
            column = trajectory.columns.get(ROUTES_COLUMN)
            if column is not None and (problem := _problem(column, module)):
                raise ValueError(
                    f"group {group.group_id}: its column {ROUTES_COLUMN} {problem} of "
                    f"model.path={model_path!r}, so another model has sampled it; start a new run"
                )


def _problem(column: NDArray[Any], module: Any) -> str:
    found = gates(module)
    if not found:
        return "names experts, and there are none that it could name in the layers"
    layers = int(module.config.get_text_config().num_hidden_layers)
    per_token, num_experts = found[0].num_chosen, found[0].num_experts
    width = column.shape[1] if column.ndim == 2 else 0
    if column.dtype.kind != "u" or width != layers * per_token:
        return (
            f"is {column.dtype}{list(column.shape)} and not uint8 or uint16 of [tokens, "
            f"{layers * per_token}], {per_token} experts in each of the {layers} layers"
        )
    if len(column) and column.max() >= num_experts:
        return f"names expert {column.max()}, and there are {num_experts} in the layers"
    return ""
