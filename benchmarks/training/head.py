"""The tiled output head against full logits: peak memory and seconds of a pass, there and back.

python -m benchmarks.training.head            # about two minutes on two cores
python -m benchmarks.training.head --short    # small shapes; the figures mean little

Memory: rows, vocabulary and hidden size of Qwen2.5 1.5B at 32k and 131k tokens, each divided by the
same number, and the tile of a GPU by its square, so that the ratios are those of the real shapes.
Each pass has a process of its own; the peak is the growth of its resident memory, and so contains
the gradients and all that torch allocates.

Time: CPU seconds of one thread in float32, with a CPU's tile; the two heads take turns in one
process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from benchmarks.report import Report
from trainer_pool.model.head import score_tokens

VOCAB, HIDDEN, GPU_TILE = 151_936, 1536, (8192, 2**26)
MEMORY = {"32k": (32_768, 5.0), "131k": (131_072, 14.0)}
"""Rows, and how many times less memory is the target."""
TIMES = {"h1024": (2048, 16_384, 1024), "h256": (2048, 16_384, 256)}
TIME_TARGET = 1.3

Pass = Callable[[], None]


@dataclass(kw_only=True, slots=True, frozen=True)
class Shape:
    num_rows: int
    vocab: int
    hidden: int
    tile: tuple[int, int] | None = None
    """None: the head's own choice."""


def passes(shape: Shape, *, has_entropy: bool) -> tuple[Pass, Pass]:
    """A forward and backward pass with full logits, and one of the head."""
    torch.manual_seed(0)
    hidden = torch.randn(shape.num_rows, shape.hidden, requires_grad=True)
    weight = (torch.randn(shape.vocab, shape.hidden) / shape.hidden**0.5).requires_grad_()
    targets = torch.randint(0, shape.vocab, (shape.num_rows,))
    temperatures = torch.full((shape.num_rows,), 0.8)

    def full() -> None:
        every = (hidden @ weight.t() / temperatures.unsqueeze(1)).log_softmax(-1)
        loss = -every.gather(1, targets.unsqueeze(1)).mean()
        if has_entropy:
            loss = loss + (every.exp() * every).sum(-1).mean()
        torch.autograd.grad(loss, (hidden, weight))

    def tiled() -> None:
        scores = score_tokens(hidden, weight, None, targets, temperatures, tile=shape.tile)
        loss = -scores[0].mean()
        if has_entropy:
            loss = loss - scores[1].mean()
        torch.autograd.grad(loss, (hidden, weight))

    return full, tiled


def peak_mb(shape: Shape, context: Any, *, is_tiled: bool, has_entropy: bool) -> float:
    """In a process of its own, which has done a small pass before."""
    here, there = multiprocessing.Pipe()
    child = context.Process(target=_report_peak, args=(there, shape, is_tiled, has_entropy))
    child.start()
    there.close()
    peak = float(here.recv_bytes().decode())
    child.join()
    return peak


def _report_peak(there: Connection, shape: Shape, is_tiled: bool, has_entropy: bool) -> None:
    small = Shape(num_rows=64, vocab=256, hidden=shape.hidden, tile=shape.tile)
    passes(small, has_entropy=has_entropy)[is_tiled]()
    run = passes(shape, has_entropy=has_entropy)[is_tiled]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    there.send_bytes(str(max(peak, 1) / 1024).encode())


def seconds(full: Pass, tiled: Pass, rounds: int) -> tuple[float, float]:
    """Medians; the first round of each is a warm-up."""
    took: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for times, run in zip(took, (full, tiled), strict=True):
            began = time.process_time()
            run()
            times.append(time.process_time() - began)
    return median(took[0][1:]), median(took[1][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small shapes, few rounds")
    is_short = parser.parse_args().short
    torch.set_num_threads(1)
    report = Report("output head: tiles against full logits")
    scale = 64 if is_short else 16
    # A fork does not import torch again, but begins with memory that is free.
    context = multiprocessing.get_context("forkserver" if is_short else "spawn")
    for name, (rows, target) in MEMORY.items():
        shape = Shape(
            num_rows=rows // scale,
            vocab=VOCAB // scale,
            hidden=HIDDEN // scale,
            tile=(GPU_TILE[0] // scale, GPU_TILE[1] // scale**2),
        )
        for has_entropy in (False, True):
            measure = partial(peak_mb, shape, context, has_entropy=has_entropy)
            full, tiled = measure(is_tiled=False), measure(is_tiled=True)
            entropy = "_with_entropy" if has_entropy else ""
            how = f"peak of full logits / of tiles at {rows // scale} x {shape.vocab} "
            how += f"x {shape.hidden} ({full:.0f} / {tiled:.1f} MB)"
            report.target(f"memory_ratio_{name}{entropy}", full / tiled, ">=", target, how)
    for name, (rows, vocab, hidden) in TIMES.items():
        shape = Shape(num_rows=rows // 16 if is_short else rows, vocab=vocab, hidden=hidden)
        for has_entropy in (False, True):
            full_s, tiled_s = seconds(*passes(shape, has_entropy=has_entropy), 1 if is_short else 3)
            entropy = "_with_entropy" if has_entropy else ""
            how = f"time of tiles / of full logits at {shape.num_rows} x {vocab} x {hidden} "
            how += f"({tiled_s:.2f} / {full_s:.2f} s)"
            report.target(f"time_ratio_{name}{entropy}", tiled_s / full_s, "<=", TIME_TARGET, how)
    report.close()


if __name__ == "__main__":
    main()
