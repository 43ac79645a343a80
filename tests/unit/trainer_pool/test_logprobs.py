"""Selected log-probabilities against torch's own log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from trainer_pool.model import logprobs as module
from trainer_pool.model.logprobs import selected_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(3, 7, 11, dtype=torch.float64)).float().requires_grad_()
    tokens = torch.randint(0, 11, (3, 7))
    weights = torch.randn(3, 7)

    mine, entropy = selected_logprobs(logits, tokens, torch.tensor(temperature))
    (gradient,) = torch.autograd.grad((mine * weights).sum(), logits)

    every = (logits / temperature).log_softmax(-1)
    theirs = every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    (expected,) = torch.autograd.grad((theirs * weights).sum(), logits)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-6)
    assert not entropy.requires_grad


def test_each_row_has_its_own_temperature_bit_for_bit() -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(3, 7, 11)).bfloat16().requires_grad_()
    tokens, weights = torch.randint(0, 11, (3, 7)), torch.randn(3, 7)
    temperatures = [0.7, 1.0, 1.3]
    mine, entropy = selected_logprobs(logits, tokens, torch.tensor(temperatures).unsqueeze(1))
    (gradient,) = torch.autograd.grad((mine * weights).sum(), logits)
    for row, temperature in enumerate(temperatures):
        scaled = logits[row].float() / temperature
        normalizer = scaled.logsumexp(-1, keepdim=True)
        chosen = scaled.gather(-1, tokens[row].unsqueeze(-1))
        assert torch.equal(mine[row], (chosen - normalizer).squeeze(-1))
        every = scaled - normalizer
        assert torch.equal(entropy[row], -(every.exp() * every).sum(-1))
        alone = logits[row].detach().requires_grad_()
        logprobs, _ = selected_logprobs(alone, tokens[row], torch.tensor(temperature))
        (expected,) = torch.autograd.grad((logprobs * weights[row]).sum(), alone)
        assert torch.equal(gradient[row], expected)


def test_rows_beyond_one_chunk_are_covered() -> None:
    vocab = 2**14
    num_rows = module._CHUNK_ELEMENTS // vocab + 3
    logits = torch.zeros(num_rows, vocab, dtype=torch.bfloat16)
    logits[:, 5] = 2.0
    mine, _ = selected_logprobs(logits, torch.full((num_rows,), 5))
    expected = torch.tensor(2.0) - torch.logsumexp(logits[0].float(), -1)
    torch.testing.assert_close(mine, expected.expand(num_rows))


def test_half_precision_logits_are_reduced_in_float32() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 3, 5000).bfloat16().requires_grad_()
    tokens = torch.randint(0, 5000, (2, 3))
    mine, _ = selected_logprobs(logits, tokens)
    theirs = logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-5)
    (gradient,) = torch.autograd.grad(mine.sum(), logits)
    assert gradient.dtype == torch.bfloat16
