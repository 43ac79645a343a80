"""The tiled output head on a GPU: against full logits, its tiles compiled, and Liger's head.

    python -m benchmarks.gpu.head [--rows 16384] [--vocab 151936] [--hidden 1536]

In bfloat16, for each of them: peak memory and time of a forward and backward pass, and how far the
loss and its gradients by hidden states and weight are from those of float32 full logits, with and
without the entropy in the loss. `compiled` has torch.compile make one Triton kernel each of the two
functions that pass over a tile (`fold`, `slope`): the trainer should use them so where they are
faster. `liger`, which wants the package liger-kernel, gives neither a loss of each token nor an
entropy, so it has no error with entropy, and is a bound for time only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.gpu.device import require_gpu
from benchmarks.report import Report
from trainer_pool.model import head

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""The loss of hidden states [N, H], weight [V, H] and targets [N]: the mean of -log p(target), less
the mean entropy times a weight."""
ERROR_ROWS = 1024
ERROR_BOUND = 1e-2


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Problem:
    """The tokens to score, and the weight of the head."""

    hidden_NH: Tensor
    weight_VH: Tensor
    targets_N: Tensor

    @classmethod
    def random(cls, num_rows: int, vocab: int, hidden: int, device: str) -> Problem:
        torch.manual_seed(0)
        weight = torch.randn(vocab, hidden, device=device) / hidden**0.5
        return cls(
            hidden_NH=torch.randn(num_rows, hidden, device=device, dtype=torch.bfloat16),
            weight_VH=weight.bfloat16(),
            targets_N=torch.randint(0, vocab, (num_rows,), device=device),
        )

    def first(self, num_rows: int) -> Problem:
        hidden_NH, targets_N = self.hidden_NH[:num_rows], self.targets_N[:num_rows]
        return Problem(hidden_NH=hidden_NH, weight_VH=self.weight_VH, targets_N=targets_N)

    def exact(self) -> Problem:
        """The same numbers in float32."""
        return Problem(
            hidden_NH=self.hidden_NH.float(),
            weight_VH=self.weight_VH.float(),
            targets_N=self.targets_N,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1536)
    sizes = parser.parse_args()
    require_gpu("benchmarks.gpu.head")
    problem = Problem.random(sizes.rows, sizes.vocab, sizes.hidden, "cuda")
    few = problem.first(ERROR_ROWS)
    report = Report("output head on a GPU")
    report_errors(report, "full", full, few)
    full_s, full_mb = cost(full, problem)
    for name, loss in {"tiled": tiled, "compiled": tiled, "liger": liger()}.items():
        if loss is None:
            report.row(name, "liger-kernel is not installed")
            continue
        with compiled_tiles() if name == "compiled" else nullcontext():
            report_errors(report, name, loss, few, has_entropy=name != "liger")
            seconds, megabytes = cost(loss, problem)
        report.figure(f"memory_ratio_{name}", full_mb / megabytes, f"{megabytes:.0f} MB")
        report.target(f"time_ratio_{name}", seconds / full_s, "<=", 1.5, f"{seconds * 1e3:.1f} ms")
    report.close()


# The heads ----------------------------------------------------------------------------------------


def full(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_weight: float) -> Tensor:
    every = (hidden @ weight.t()).float().log_softmax(-1)
    loss = -every.gather(1, targets.unsqueeze(1)).mean()
    if not entropy_weight:
        return loss
    return loss + entropy_weight * (every.exp() * every).sum(-1).mean()


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_weight: float) -> Tensor:
    ones = torch.ones(len(targets), device=targets.device)
    scores = head.score_tokens(hidden, weight, None, targets, ones)
    loss = -scores[0].mean()
    return loss - entropy_weight * scores[1].mean() if entropy_weight else loss


@contextmanager
def compiled_tiles() -> Iterator[None]:
    fold, slope = head.fold, head.slope
    head.fold = torch.compile(fold, dynamic=True)
    head.slope = torch.compile(slope, dynamic=True)
    try:
        yield
    finally:
        head.fold, head.slope = fold, slope


def liger() -> Loss | None:
    try:
        module = import_module("liger_kernel.transformers")
    except ImportError:
        return None
    fused = module.LigerFusedLinearCrossEntropyLoss()

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_weight: float) -> Tensor:
        assert not entropy_weight, "it has no entropy"
        found: Tensor = fused(weight, hidden, targets)
        return found

    return loss


# What is measured ---------------------------------------------------------------------------------


def report_errors(
    report: Report, name: str, loss: Loss, problem: Problem, *, has_entropy: bool = True
) -> None:
    """One row a figure. The bound is for the tiles: the others are what they are compared with."""
    vocab = len(problem.weight_VH)
    # Where thousands of ids are as likely, an entropy has a gradient about sqrt(vocab) times
    # smaller than that of log p(target), which would hide its error.
    weights = {"": 0.0, "_with_entropy": vocab**0.5}
    for suffix, entropy_weight in weights.items():
        if entropy_weight and not has_entropy:
            report.row(f"error_{name}{suffix}", "it has no entropy")
            continue
        for part, error in errors(loss, problem, entropy_weight).items():
            figure, how = f"error_{part}_{name}{suffix}", "relative, to float32 full logits"
            if loss is tiled:
                report.target(figure, error, "<=", ERROR_BOUND, how)
            else:
                report.figure(figure, error, how)


def errors(loss: Loss, problem: Problem, entropy_weight: float) -> dict[str, float]:
    """Relative errors of the loss and of its gradients by hidden states and by weight."""
    found = gradients(loss, problem, entropy_weight)
    exact = gradients(full, problem.exact(), entropy_weight)
    return {
        name: float((one.double() - other.double()).norm() / other.double().norm())
        for name, one, other in zip(("loss", "hidden", "weight"), found, exact, strict=True)
    }


def gradients(
    loss: Loss, problem: Problem, entropy_weight: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (
        values.detach().requires_grad_() for values in (problem.hidden_NH, problem.weight_VH)
    )
    value = loss(hidden, weight, problem.targets_N, entropy_weight)
    grad_hidden, grad_weight = torch.autograd.grad(value, (hidden, weight))
    return value.detach(), grad_hidden, grad_weight


def cost(loss: Loss, problem: Problem) -> tuple[float, float]:
    """Median seconds of ten passes after two, and the peak of what they allocate in MB."""
    for _ in range(2):
        gradients(loss, problem)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        gradients(loss, problem)
        mark.record()
    torch.cuda.synchronize()
    took = sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
    return took[len(took) // 2], (torch.cuda.max_memory_allocated() - before) / 1e6


if __name__ == "__main__":
    main()
