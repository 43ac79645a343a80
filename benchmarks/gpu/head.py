"""The tiled output head on a GPU: against full logits, its tiles compiled, and Liger's head.

    python benchmarks/gpu/head.py [--rows 16384] [--vocab 151936] [--hidden 1536]

Peak memory and time of a forward and backward pass in bfloat16, and how far values and gradients
are from those of float32 full logits. `compiled` has torch.compile make one Triton kernel each of
the two functions that pass over a tile (`fold`, `slope`): the trainer should use them so where they
are faster. `liger`, which wants the package liger-kernel, gives neither a loss of each token nor an
entropy, so it is a bound for time only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.gpu.device import require_gpu
from benchmarks.report import Report
from trainer_pool.model import head

Pass = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1536)
    sizes = parser.parse_args()
    require_gpu("benchmarks/gpu/head.py")
    torch.manual_seed(0)
    hidden = torch.randn(sizes.rows, sizes.hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(sizes.vocab, sizes.hidden, device="cuda") / sizes.hidden**0.5
    weight = weight.bfloat16()
    targets = torch.randint(0, sizes.vocab, (sizes.rows,), device="cuda")
    ones = torch.ones(sizes.rows, device="cuda")

    def full(hidden: Tensor, weight: Tensor) -> Tensor:
        every = (hidden @ weight.t()).float().log_softmax(-1)
        return -every.gather(1, targets.unsqueeze(1)).mean()

    def tiled(hidden: Tensor, weight: Tensor) -> Tensor:
        return -head.score_tokens(hidden, weight, None, targets, ones)[0].mean()

    report = Report("output head on a GPU")
    few = min(sizes.rows, 1024)
    targets_of_all, targets, ones_of_all, ones = targets, targets[:few], ones, ones[:few]
    exact = gradients(full, hidden[:few].float(), weight.float())
    mine = gradients(tiled, hidden[:few], weight)
    for name, one, other in zip(("value", "hidden", "weight"), mine, exact, strict=True):
        error = float((one.double() - other.double()).norm() / other.double().norm())
        report.target(f"error_{name}", error, "<=", 1e-2, "relative, against float32 full logits")
    targets, ones = targets_of_all, ones_of_all
    full_s, full_mb = cost(full, hidden, weight)
    for name, run in {"tiled": tiled, "compiled": tiled, "liger": liger_pass(targets)}.items():
        if run is None:
            report.row(name, "liger-kernel is not installed")
            continue
        if name == "compiled":
            head.fold = torch.compile(head.fold, dynamic=True)
            head.slope = torch.compile(head.slope, dynamic=True)
        seconds, megabytes = cost(run, hidden, weight)
        report.figure(f"memory_ratio_{name}", full_mb / megabytes, f"{megabytes:.0f} MB")
        report.target(f"time_ratio_{name}", seconds / full_s, "<=", 1.5, f"{seconds * 1e3:.1f} ms")
    report.close()


def gradients(run: Pass, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
    loss = run(hidden, weight)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), grad_hidden, grad_weight


def cost(run: Pass, hidden: Tensor, weight: Tensor) -> tuple[float, float]:
    """Median seconds of ten passes after two, and the peak of what they allocate in MB."""
    for _ in range(2):
        gradients(run, hidden, weight)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        gradients(run, hidden, weight)
        mark.record()
    torch.cuda.synchronize()
    took = sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
    return took[len(took) // 2], (torch.cuda.max_memory_allocated() - before) / 1e6


def liger_pass(targets: Tensor) -> Pass | None:
    try:
        module = import_module("liger_kernel.transformers")
    except ImportError:
        return None
    loss = module.LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight: loss(weight, hidden, targets)


if __name__ == "__main__":
    main()
