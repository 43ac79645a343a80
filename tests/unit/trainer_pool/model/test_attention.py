"""Packed rows through real models: each sequence as by itself, or the model is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.algorithm_schema import AlgorithmConfig
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.types import BatchStatistics
from trainer_pool.data.packing import MicroBatch, PackedRow, Row, fill_up, pack, packed_row
from trainer_pool.model import attention
from trainer_pool.model.checkpoint_names import model_without_weights
from trainer_pool.model.loading import load_model
from trainer_pool.step import loss_inputs

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LENGTHS = (7, 3, 12, 5)


def config_of(kind: str) -> hf.PreTrainedConfig:
    match kind:
        case "qwen3":
            return hf.Qwen3Config(**SIZES)
        case "sliding window":
            return hf.MistralConfig(**SIZES, sliding_window=4)
        case "learned positions":
            return hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        case "experts":
            return hf.Qwen3MoeConfig(
                **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
            )
        case "convolution":
            return hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
        case "softcap":
            return hf.Gemma2Config(**SIZES)
        case "sinks":
            return hf.GptOssConfig(**SIZES, num_local_experts=4)
        case "own attention":
            return hf.FalconConfig(
                vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
            )
        case "own attention by one class":
            return hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    raise AssertionError(kind)


def build(kind: str, implementation: str = attention.PACKED) -> Any:
    """The same weights for either attention, far enough from 0 that a leak is seen."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    # transformers multiplies experts in float32 at most.
    return (model if kind == "experts" else model.double()).eval()


def sequences() -> list[Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=dice) for length in LENGTHS]


def logits_of(model: Any, row: PackedRow, places: Tensor) -> Tensor:
    output = model(
        input_ids=row.tokens_L[None],
        position_ids=row.position_ids_L[None],
        use_cache=False,
        logits_to_keep=places,
        **attention.arguments(row),
    )
    logits: Tensor = output.logits[0]
    return logits


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 0, 1)])
@pytest.mark.parametrize("kind", ["qwen3", "sliding window", "learned positions", "experts"])
def test_packed_sequences_have_the_logits_and_gradients_that_each_has_alone(
    kind: str, order: Sequence[int]
) -> None:
    """Against transformers' own SDPA, one sequence at a time; its norms round to float32."""
    packed, alone = build(kind), build(kind, "sdpa")
    parts = [sequences()[i] for i in order]
    row = packed_row(parts)
    logits = logits_of(packed, row, torch.arange(len(row.tokens_L)))
    expected = torch.cat([alone(input_ids=part[None]).logits[0] for part in parts])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    pull = torch.randn_like(logits)
    (logits * pull).sum().backward()
    (expected * pull).sum().backward()
    theirs = gradients(alone)
    for name, gradient in gradients(packed).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-4, msg=name)


def rows() -> list[Row]:
    """Two prompts: one has three answers, of which two have a first turn in common."""
    dice = np.random.default_rng(2)

    def some(length: int) -> NDArray[np.int32]:
        return dice.integers(0, 64, length).astype(np.int32)

    first, second, turn = some(20), some(18), some(17)
    sequences = [
        (first, turn, some(6)),
        (first, some(9)),
        (first, turn, some(4)),
        (second, some(5)),
    ]
    found = []
    for number, parts in enumerate(sequences):
        tokens = np.concatenate(parts)
        found.append(
            Row(
                tokens=tokens,
                loss_mask=(np.arange(len(tokens)) >= len(parts[0])).astype(np.uint8),
                rollout_logprobs=dice.normal(-4, 1, len(tokens)).astype(np.float32),
                advantages=np.full(len(tokens), (1.0, -0.5, 0.7, -1.2)[number], np.float32),
                weight=1 / (1 + number % 2),
                temperatures=np.full(len(tokens), 0.8, np.float32),
            )
        )
    return found


def loss_and_gradients(
    model: Any, batches: Sequence[MicroBatch]
) -> tuple[float, dict[str, Tensor]]:
    """Summed over the passes."""
    total = 0.0
    for batch in batches:
        logits_NV = logits_of(model, batch.row, batch.places_N)
        logprobs_N = (logits_NV / batch.temperatures_N[:, None]).log_softmax(-1)
        trainer_N = logprobs_N.gather(-1, batch.targets_N[:, None]).squeeze(-1)
        algorithm = Algorithm.load(AlgorithmConfig())
        start_N = trainer_N.detach()
        inputs = loss_inputs(batch, trainer_N, start_N, None, algorithm, BatchStatistics())
        loss = algorithm.objective(inputs, 40.0).loss
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, gradients(model)


@pytest.mark.parametrize("should_share_prefixes", [False, True])
@pytest.mark.parametrize(("budget", "num_passes"), [(43, (4, 4)), (60, (3, 2)), (80, (2, 1))])
@pytest.mark.parametrize("kind", ["qwen3", "sliding window", "learned positions", "experts"])
def test_loss_and_gradient_are_those_of_one_trajectory_at_a_time(
    kind: str, budget: int, num_passes: tuple[int, int], should_share_prefixes: bool
) -> None:
    alone = loss_and_gradients(build(kind, "sdpa"), [pack([row], 100)[0] for row in rows()])
    batches = pack(rows(), budget, should_share_prefixes=should_share_prefixes)
    assert len(batches) == num_passes[should_share_prefixes]
    loss, found = loss_and_gradients(build(kind), fill_up(batches, 5))
    assert loss == pytest.approx(alone[0], rel=1e-6)
    for name, gradient in found.items():
        difference = (gradient - alone[1][name]).norm() / alone[1][name].norm()
        assert difference < 1e-5, name


def test_gradient_checkpointing_hands_the_borders_on() -> None:
    model, parts = build("qwen3").train(), sequences()
    row = packed_row(parts)
    places = torch.tensor([2, 8, 20])
    logits_of(model, row, places).square().sum().backward()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logits_of(model, row, places).square().sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain[name], msg=name)


@pytest.mark.parametrize("kind", ["qwen3", "sliding window", "learned positions", "experts"])
def test_model_whose_sequences_do_not_mix_passes_the_check(kind: str) -> None:
    model = build(kind).float()
    attention.check_model("m", lambda row, places: logits_of(model, row, places), model.device)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("convolution", r"model\.path='m': a sequence has other logits behind another one"),
        ("softcap", r"model\.path: Gemma2Attention has attention with softcap"),
        ("sinks", r"model\.path: GptOssAttention has attention with sinks"),
    ],
)
def test_model_that_cannot_be_packed_is_refused(kind: str, reason: str) -> None:
    model = build(kind).float()
    with pytest.raises(ValueError, match=reason):
        attention.check_model("m", lambda row, places: logits_of(model, row, places), model.device)


@pytest.mark.parametrize("kind", ["softcap", "sinks"])
def test_model_that_cannot_be_packed_is_refused_without_its_weights(
    kind: str, tmp_path: Path
) -> None:
    config_of(kind).save_pretrained(tmp_path)
    model = model_without_weights(str(tmp_path), trust_remote_code=False)
    with pytest.raises(ValueError, match=rf"attention with {kind}, which the trainer does not"):
        attention.sliding_windows(model)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (hf.Qwen3Config(**SIZES), {None}),
        (hf.Qwen3Config(**SIZES, sliding_window=4), {None}),  # use_sliding_window is off
        (hf.MistralConfig(**SIZES, sliding_window=4), {4}),
        (
            hf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
            {None, 4},
        ),
        (
            # A pass without weights cannot run it.
            hf.Phi3Config(
                **SIZES,
                pad_token_id=0,
                sliding_window=4,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                },
            ),
            {4},
        ),
    ],
)
def test_windows_are_those_of_the_layers(
    config: hf.PreTrainedConfig, windows: set[int | None], tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    model = model_without_weights(str(tmp_path), trust_remote_code=False)
    assert attention.sliding_windows(model) == windows


@pytest.mark.parametrize("kind", ["own attention", "own attention by one class"])
def test_model_with_its_own_attention_is_refused_before_the_launch_and_when_it_is_loaded(
    kind: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.path=.* computes its attention by itself"):
        model_without_weights(str(tmp_path), trust_remote_code=False)
    with pytest.raises(ValueError, match=r"model\.path=.* computes its attention by itself"):
        load_model(str(tmp_path), torch.float32, trust_remote_code=False)


def test_model_that_does_not_hand_the_borders_on_is_refused() -> None:
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="did not receive the borders"):
        attention.packed_attention(torch.nn.Identity(), heads, heads, heads, None)


def test_flash_attention_of_half_precision_takes_the_spans_and_gives_each_query_its_output() -> (
    None
):
    """Shapes alone, forward and backward: the kernel itself needs a GPU."""

    row = pack(rows(), 1000, should_share_prefixes=True)[0].row.to(torch.device("meta"))
    length = len(row.tokens_L)
    assert row.key_places is not None and len(row.key_places) > length

    def heads(number: int) -> Tensor:
        shape = (1, number, length, 32)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").requires_grad_()

    query, key, value = heads(8), heads(4), heads(4)
    output, _ = attention.packed_attention(
        torch.nn.Identity(), query, key, value, None, **attention.arguments(row)
    )
    assert output.shape == (1, length, 8, 32)
    output.sum().backward()
    assert query.grad is not None and key.grad is not None
    assert (query.grad.shape, key.grad.shape) == (query.shape, key.shape)
