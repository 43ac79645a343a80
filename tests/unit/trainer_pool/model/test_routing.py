"""Experts that an engine has chosen, in a model by itself; under ZeRO-3: test_zero3_training.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from buffer.types import ROUTES_COLUMN, PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from tests.support.experts import (
    SCALE,
    ScoredBlock,
    Weigh,
    build_experts,
    random_routes,
    scored_model,
    scored_weights,
    send_to,
)
from trainer_pool.model.routers import gates
from trainer_pool.model.routing import RoutingReplay, check_routes

TOKENS = torch.arange(40, 52)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    build_experts(folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def logits_and_gradients(
    model: Any, routes: NDArray[np.uint8] | None, *, replay: RoutingReplay | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """With the replay, or else as the model is."""
    if replay is None:
        logits = model(TOKENS).logits
    else:
        with replay.of(None if routes is None else torch.from_numpy(routes.astype(np.int32))):
            logits = model(TOKENS).logits
    logits.log_softmax(-1)[..., 7].sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(one: Any, two: Any) -> None:
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("with_checkpointing", [False, True])
def test_tokens_go_to_the_given_experts_with_gradients_of_the_routers(
    folder: Path, is_normalized: bool, with_checkpointing: bool
) -> None:
    routes = random_routes(12)
    routes[4] = 0
    by_hand, model = load(folder), load(folder).train()
    for layer in (*by_hand.model.layers, *model.model.layers):
        layer.mlp.gate.norm_topk_prob = is_normalized
    send_to(by_hand, routes)
    expected = logits_and_gradients(by_hand, routes)
    if with_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    replay = RoutingReplay(model)
    found = logits_and_gradients(model, routes, replay=replay)
    assert_close(found, expected)
    assert all(found[1][f"model.layers.{n}.mlp.gate.weight"].any() for n in range(2))
    assert replay.take()["route_drift"][1] == 2 * 10  # two layers, ten tokens with known experts


def test_own_choices_change_nothing_and_are_no_drift(folder: Path) -> None:
    plain, model = load(folder), load(folder)
    chosen: list[torch.Tensor] = []
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _a, output: chosen.append(output[2]))
    expected = logits_and_gradients(plain, None)
    # In the other order of the two experts.
    own = torch.stack([of.flip(1) for of in chosen], 1).reshape(12, 4).numpy().astype(np.uint8)
    replay = RoutingReplay(model)
    assert_close(logits_and_gradients(model, own, replay=replay), expected)
    assert replay.take()["route_drift"].tolist() == [0, 24]
    model.zero_grad()
    assert_close(logits_and_gradients(model, None, replay=replay), expected)
    assert replay.take() == {}
    own[3, :2] = [n for n in range(4) if n not in own[3, :2]]
    model.zero_grad()
    found, _ = logits_and_gradients(model, own, replay=replay)
    assert (found[0, :3] - expected[0][0, :3]).abs().max() < 1e-5
    assert (found[0, 3] - expected[0][0, 3]).abs().max() > 1e-3
    drift, of = replay.take()["route_drift"].tolist()
    assert 1 <= drift < 24 and of == 24


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("with_checkpointing", [False, True])
def test_choices_of_a_block_by_corrected_scores_are_replayed_bit_by_bit(
    is_normalized: bool, with_checkpointing: bool
) -> None:
    """Its own, in outputs and gradients; and they are no drift."""
    plain, model = (scored_model(is_normalized=is_normalized) for _ in range(2))
    chosen = [torch.zeros(12, 2, dtype=torch.int64)]  # the first layer is dense
    for layer in plain.model.layers[1:]:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    expected = logits_and_gradients(plain, None)
    own = torch.stack(chosen, 1).reshape(12, 6).numpy().astype(np.uint8)
    if with_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    replay = RoutingReplay(model)
    for routes in (own, None):
        logits, gradients = logits_and_gradients(model, routes, replay=replay)
        assert torch.equal(logits, expected[0])
        assert gradients.keys() == expected[1].keys()
        assert all(torch.equal(g, expected[1][name]) for name, g in gradients.items())
        drift = replay.take()
        assert routes is None or drift["route_drift"].tolist() == [0, 24]
        model.zero_grad()


def corrected(
    logits_E: torch.Tensor, corrections_E: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    scores_K = (logits_E.sigmoid() + corrections_E)[chosen]
    return SCALE * scores_K / scores_K.sum()


MISTAKES: dict[str, Weigh] = {
    "corrected": corrected,
    "not scaled": lambda *row: scored_weights(*row) / SCALE,
    "not normalized": lambda logits_E, _, chosen: SCALE * logits_E[chosen].sigmoid(),
    "of a softmax": lambda logits_E, _, chosen: SCALE * logits_E[chosen].softmax(-1),
    "of all experts": lambda logits_E, _, chosen: (
        SCALE * logits_E[chosen].sigmoid() / logits_E.sigmoid().sum()
    ),
}


@pytest.mark.parametrize("with_checkpointing", [False, True])
def test_other_experts_of_such_a_block_get_the_weights_of_its_own_router(
    with_checkpointing: bool,
) -> None:
    """Against token by token, which each planted mistake leaves; what counts the choices is given
    those that are replayed."""
    model = scored_model(is_normalized=True)
    routes = np.pad(random_routes(12), ((0, 0), (2, 0)))
    routes[4] = 0  # not known, as those of the last
    if with_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    replay, counted = RoutingReplay(model), list[NDArray[np.int64]]()
    for gate in gates(model):
        gate.module.register_forward_hook(
            lambda _, __, output, gate=gate: counted.append(gate.experts(output).numpy())
        )
    found = logits_and_gradients(model, routes, replay=replay)
    for weigh in (scored_weights, *MISTAKES.values()):
        by_hand = scored_model(is_normalized=True)
        for number, layer in enumerate(by_hand.model.layers[1:], 1):
            block = ScoredBlock(layer.mlp, routes[:, 2 * number : 2 * number + 2], weigh)
            layer.mlp.forward = block
        expected = logits_and_gradients(by_hand, None)
        if weigh is scored_weights:
            assert_close(found, expected)
        else:
            assert (found[0] - expected[0]).abs().max() > 1e-3
    assert all(found[1][f"model.layers.{n}.mlp.gate.weight"].any() for n in (1, 2))
    is_known = routes.any(1)
    for number, of_layer in enumerate(counted[:2], 1):  # layers are computed again
        sent_to = routes[:, 2 * number : 2 * number + 2]
        assert np.array_equal(of_layer[is_known], sent_to[is_known])
    drift, of = replay.take()["route_drift"].tolist()
    assert of == 2 * 10 and 10 < drift < 20


def group_with(routes: NDArray[Any]) -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=np.arange(len(routes), dtype=np.int32),
        loss_mask=np.ones(len(routes), np.uint8),
        rollout_logprobs=np.zeros(len(routes), np.float32),
        version_spans=(VersionSpan(version=0, start=0, end=len(routes)),),
        prompt_length=0,
        reward=0.0,
        finish_reason="stop",
        columns={ROUTES_COLUMN: routes},
    )
    return TrajectoryGroup(
        group_id="g-7", prompt=PromptRef(task="t", index=0), trajectories=(trajectory,)
    )


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.ones((3, 6), np.uint8), r"is uint8\[3, 6\] and not .*\[tokens, 4\], 2 experts in each"),
        (np.ones((3, 4), np.int32), r"is int32\[3, 4\] and not uint8 or uint16"),
        (np.full((3, 4), 4, np.uint8), "names expert 4, and there are 4 in the layers"),
    ],
)
def test_column_of_another_model_is_refused(
    folder: Path, routes: NDArray[Any], message: str
) -> None:
    model = load(folder)
    with pytest.raises(ValueError, match=rf"group g-7: its column routes {message}.*new run"):
        check_routes("m", model, [group_with(routes)])
    check_routes("m", model, [group_with(random_routes(5))])


def test_column_is_refused_where_there_are_no_experts() -> None:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=9,
        pad_token_id=0,
    )
    dense = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match=r"names experts, and there are none .* of model\.path='m'"
    ):
        check_routes("m", dense, [group_with(random_routes(3))])
    group = group_with(random_routes(3))
    bare = replace(group, trajectories=(replace(group.trajectories[0], columns={}),))
    check_routes("m", dense, [bare])
