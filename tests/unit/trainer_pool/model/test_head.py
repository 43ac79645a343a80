"""The tiled head against full logits and torch's own autograd, values and gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer_pool.model.head import (
    Candidates,
    LogitShape,
    ScoringHead,
    TokensToScore,
    score_tokens,
)

N, V, H = 37, 101, 24


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Inputs:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperatures: Tensor
    candidates: Candidates | None = None
    shape: LogitShape = field(default_factory=LogitShape)

    def to(self, dtype: torch.dtype) -> Inputs:
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def trained(self) -> list[Tensor]:
        tensors = [self.hidden, self.weight, *([] if self.bias is None else [self.bias])]
        return [tensor.requires_grad_() for tensor in tensors]

    def in_tiles(self, tile: tuple[int, int] | None = None) -> Tensor:
        return score_tokens(
            self.hidden,
            self.weight,
            self.bias,
            self.targets,
            self.temperatures,
            candidates=self.candidates,
            shape=self.shape,
            tile=tile,
        )

    def in_full(self) -> Tensor:
        logits = self.hidden @ self.weight.t()
        if self.bias is not None:
            logits = logits + self.bias
        if self.shape.cap is not None:
            logits = self.shape.cap * torch.tanh(self.shape.scale * logits / self.shape.cap)
        else:
            logits = self.shape.scale * logits
        logits = logits / self.temperatures.to(logits.dtype).unsqueeze(1)
        if self.candidates is not None:
            logits = logits.masked_fill(~is_candidate(self.candidates), -math.inf)
        every = logits.log_softmax(-1)
        p = every.exp()
        entropy = -(p * every.masked_fill(p == 0, 0.0)).sum(-1)
        chosen = every.gather(1, self.targets.unsqueeze(1)).squeeze(1)
        return torch.stack([chosen, entropy, p.detach().square().sum(-1)])


def is_candidate(candidates: Candidates) -> Tensor:
    """By hand: [N, V] from the ragged lists."""
    flags = torch.zeros(N, V, dtype=torch.bool)
    begin = 0
    for row, end in enumerate(candidates.ends_N.tolist()):
        flags[row, candidates.ids_K[begin:end] if end > begin else slice(None)] = True
        begin = end
    return flags


def make_inputs(*, has_bias: bool = False, spread: float = 3.0) -> Inputs:
    torch.manual_seed(0)
    return Inputs(
        hidden=spread * torch.randn(N, H, dtype=torch.float64) / H**0.5,
        weight=torch.randn(V, H, dtype=torch.float64),
        bias=torch.randn(V, dtype=torch.float64) if has_bias else None,
        targets=torch.randint(0, V, (N,)),
        temperatures=torch.tensor([0.7, 1.0, 1.3]).repeat(N)[:N],
    )


def with_candidates(inputs: Inputs) -> Inputs:
    """Each row's target and 0 to 20 other ids; every fifth row keeps the whole vocabulary."""
    sets = []
    for row, target in enumerate(inputs.targets.tolist()):
        others = torch.randperm(V)[: row % 21]
        sets.append(
            torch.zeros(0, dtype=torch.int64)
            if row % 5 == 4
            else torch.cat([others[others != target], torch.tensor([target])])
        )
    ends = torch.tensor([len(ids) for ids in sets]).cumsum(0)
    return replace(inputs, candidates=Candidates(ids_K=torch.cat(sets), ends_N=ends))


CASES = {
    "plain": make_inputs(),
    "bias": make_inputs(has_bias=True),
    "candidates": with_candidates(make_inputs()),
    "scale": replace(make_inputs(), shape=LogitShape(scale=0.125)),
    "cap": replace(make_inputs(), shape=LogitShape(cap=5.0)),
    "all": replace(
        with_candidates(make_inputs(has_bias=True)), shape=LogitShape(scale=1.5, cap=4.0)
    ),
}


def gradients(scores: Tensor, inputs: Inputs, *, with_entropy: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    weights = torch.randn(2, N, dtype=torch.float64).to(scores.dtype)
    weights[1] *= float(with_entropy)
    return torch.autograd.grad((scores[:2] * weights).sum(), inputs.trained())


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("tile", [None, (1, 300), (7, 150), (N, 1)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_full_logits(
    name: str, tile: tuple[int, int] | None, with_entropy: bool
) -> None:
    inputs = CASES[name]
    inputs.trained()
    mine, theirs = inputs.in_tiles(tile), inputs.in_full()
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    for one, other in zip(
        gradients(mine, inputs, with_entropy=with_entropy),
        gradients(theirs, inputs, with_entropy=with_entropy),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_lower_precision_is_rounded_only_at_its_ends(name: str, dtype: torch.dtype) -> None:
    """The inputs are rounded, and the gradients; what is between is float32."""
    inputs = CASES[name].to(dtype)
    exact = inputs.to(torch.float64)
    inputs.trained(), exact.trained()
    mine, theirs = inputs.in_tiles((7, 150)), exact.in_full()
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)
    rounding = 1e-5 if dtype is torch.float32 else 2**-8
    for one, other in zip(gradients(mine, inputs), gradients(theirs, exact), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=1e-5)


def test_extreme_logits_give_exact_limits() -> None:
    hidden = torch.tensor([[1e4], [1e4], [0.0], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5], [-1.0]], requires_grad=True)
    scores = score_tokens(
        hidden, weight, None, torch.tensor([0, 1, 2, 3]), torch.ones(4), tile=(1, 1)
    )
    assert scores[0].tolist() == pytest.approx([0, -2e4, -math.log(4), -math.log(2)])
    assert scores[1].tolist() == pytest.approx([0, 0, math.log(4), math.log(2)])
    assert scores[2].tolist() == pytest.approx([1, 1, 0.25, 0.5])
    scores[:2].sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_logit_of_minus_infinity_is_a_probability_of_zero() -> None:
    """Also where a tile has no other: models mask ids that no token has so."""
    weight, targets = torch.randn(6, 3), torch.tensor([1, 2, 1, 5])
    hidden = torch.randn(4, 3, requires_grad=True)
    bias = torch.tensor([-math.inf, 0.1, 0.2, -math.inf, -math.inf, 0.3])
    is_real = bias.isfinite()
    scores = score_tokens(hidden, weight, bias, targets, torch.ones(4), tile=(2, 2))
    logprobs_NV = torch.log_softmax(hidden @ weight[is_real].t() + bias[is_real], -1)
    places = torch.tensor([0, 1, 0, 2]).unsqueeze(1)
    entropy = -(logprobs_NV * logprobs_NV.exp()).sum(1)
    expected = torch.stack([logprobs_NV.gather(1, places).squeeze(1), entropy])
    torch.testing.assert_close(scores[:2], expected)
    both = torch.ones(2, 4)
    (mine,) = torch.autograd.grad(scores[:2], hidden, both)
    (theirs,) = torch.autograd.grad(expected, hidden, both)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_row_that_is_not_finite_leaves_the_others(bad: float) -> None:
    inputs = CASES["plain"]
    hidden = inputs.hidden.detach().clone()
    hidden[3, 0] = bad
    mine = replace(inputs, hidden=hidden).in_tiles((7, 150))
    assert mine[:, 3].isnan().all()
    others = [row for row in range(N) if row != 3]
    torch.testing.assert_close(mine[:, others], inputs.in_tiles((7, 150))[:, others])


def test_target_that_is_no_candidate_is_impossible() -> None:
    candidates = Candidates(ids_K=torch.tensor([1, 2]), ends_N=torch.tensor([2, 2]))
    hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    scores = score_tokens(
        hidden, weight, None, torch.tensor([0, 0]), torch.ones(2), candidates=candidates
    )
    assert scores[0].tolist() == pytest.approx([-math.inf, -math.log(4)])
    assert scores[1].tolist() == pytest.approx([math.log(2), math.log(4)])
    assert scores[2].tolist() == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize("is_frozen", [True, False])
def test_no_token_has_zero_gradients(is_frozen: bool) -> None:
    hidden = torch.zeros(0, 3, requires_grad=True)
    weight = torch.randn(4, 3).requires_grad_(not is_frozen)
    none = torch.zeros(0, dtype=torch.int64)
    scores = score_tokens(hidden, weight, None, none, torch.ones(0))
    assert scores.shape == (3, 0)
    scores.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and hidden.grad.shape == (0, 3)
    assert weight.grad is None if is_frozen else not weight.grad.any()  # type: ignore[union-attr]


def test_memory_does_not_grow_with_the_logits() -> None:
    """Largest tensor that forward and backward pass allocate."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    hidden, weight = torch.randn(4096, 8, requires_grad=True), torch.randn(5000, 8)
    weight.requires_grad_()
    with Largest() as largest:
        scores = score_tokens(
            hidden, weight, None, torch.zeros(4096, dtype=torch.int64), torch.ones(4096)
        )
        scores.sum().backward()  # type: ignore[no-untyped-call]
    assert largest.elements == 2**20  # one tile, of 20 million logits


# In the place of a model's own head --------------------------------------------------------------

SMALL = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
MODELS = {
    "Qwen3, tied": (Qwen3Config(**SMALL), LogitShape()),
    "Qwen3": (Qwen3Config(**{**SMALL, "tie_word_embeddings": False}), LogitShape()),
    "Gemma 2": (Gemma2Config(**SMALL, final_logit_softcapping=3.0), LogitShape(cap=3.0)),
    "Granite": (GraniteConfig(**SMALL, logits_scaling=8.0), LogitShape(scale=0.125)),
    "Cohere": (CohereConfig(**SMALL, logit_scale=0.3), LogitShape(scale=0.3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_head_in_a_model_gives_what_its_logits_give(name: str) -> None:
    torch.manual_seed(0)
    config, expected_shape = MODELS[name]
    model = AutoModelForCausalLM.from_config(config).double()
    tokens, places = torch.randint(1, V, (1, 12)), torch.tensor([4, 6, 7, 9])
    every = (model(input_ids=tokens).logits[0, places] / 0.7).log_softmax(-1)
    targets = tokens[0, places + 1]
    logprobs = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every).sum(-1)
    (logprobs.sum() - entropy.sum()).backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    head = ScoringHead(model, "folder")
    head.learn_shape(lambda: model(input_ids=tokens, logits_to_keep=1))
    found = head._shape
    assert found.scale == pytest.approx(expected_shape.scale, rel=1e-5)
    assert found.cap == pytest.approx(expected_shape.cap)
    wanted = TokensToScore(
        places_N=places,
        targets_N=targets,
        temperatures_N=torch.full(targets.shape, 0.7, dtype=torch.float64),
        candidates=None,
    )
    scores = model(input_ids=tokens, logits_to_keep=places, wanted=wanted)
    torch.testing.assert_close(scores[0], logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores[1], entropy, rtol=1e-5, atol=1e-6)
    (scores[0].sum() - scores[1].sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6)


def test_model_that_changes_its_logits_otherwise_is_refused() -> None:
    class Masked(Qwen3ForCausalLM):
        def forward(self, **inputs):  # type: ignore[no-untyped-def, override]
            output = super().forward(**inputs)
            output.logits[..., 7] = -1e9  # as models do that may not write image tokens
            return output

    model = Masked(Qwen3Config(**SMALL))
    with pytest.raises(ValueError, match=r"model\.path='folder': this model changes the logits"):
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        ScoringHead(model, "folder").learn_shape(lambda: model(input_ids=tokens, logits_to_keep=1))


def test_model_without_a_linear_head_is_refused() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL))
    model.lm_head = nn.Sequential(nn.Linear(H, V))
    with pytest.raises(ValueError, match="output head of Qwen3ForCausalLM is Sequential"):
        ScoringHead(model, "folder")
