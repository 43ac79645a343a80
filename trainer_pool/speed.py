"""The speed of a step: seconds by part, tokens, and floating-point operations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from trainer_pool.collectives import RankWaits

FLOPS_PER_MULTIPLY_ADD = 2
MAX_LANES = 32
"""Ranks of one record: 512 of them would be hundreds of megabytes in a long run."""
PASSES = 3
"""A backward pass computes as much as two forward passes: the gradients of weights and of inputs.
The passes that gradient checkpointing repeats are not counted, as is usual for MFU (PaLM, arXiv
2204.02311, appendix B)."""
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H20": 148.0,  # after the H200, whose name contains it
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
}
"""Dense bfloat16 TFLOP/s of NVIDIA's data sheets, by a part of the device's name; those of the SXM
form where there are several."""


def peak_tflops(device: torch.device) -> float | None:
    """The device's peak in dense bfloat16, in TFLOP/s; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def shown_ranks(waits: Sequence[float]) -> list[int]:
    """The ranks whose times are recorded, by how long each waited for others in a step: above
    MAX_LANES the slowest, the fastest, and an even choice."""
    if (number := len(waits)) <= MAX_LANES:
        return [*range(number)]
    ends = {waits.index(min(waits)), waits.index(max(waits))}
    return sorted({*ends, *(i * number // (MAX_LANES - 2) for i in range(MAX_LANES - 2))})


@dataclass(kw_only=True, slots=True)
class StepSpeed:
    """The seconds and the work of one rank's step."""

    device: torch.device
    multiply_adds: float = 0.0
    """Multiply-adds, as `PassCost` counts them, of the forward passes that a backward pass
    follows."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part, without the waits for other ranks."""
    waited_before_s: float = field(default_factory=lambda: RankWaits.seconds)

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Adds the seconds of a block to `part`'s, until the device has done all its work."""
        start = time.perf_counter() - RankWaits.seconds
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            own_s = time.perf_counter() - RankWaits.seconds - start
            self.seconds[part] = self.seconds.get(part, 0.0) + own_s

    def record(self, num_tokens: int, peak: float | None) -> dict[str, float]:
        """For the metrics log. `num_tokens` counts all ranks' trajectories with their prompts,
        `peak` is in TFLOP/s.

        model_tflops = 2 x 3 x this rank's multiply-adds / seconds of the step / 10^12
        mfu = model_tflops / peak
        """
        ranks_s = RankWaits.seconds - self.waited_before_s
        seconds = {**self.seconds, "ranks": ranks_s}
        total = sum(seconds.values())
        flops = FLOPS_PER_MULTIPLY_ADD * PASSES * self.multiply_adds
        tflops = flops / total / 1e12 if total else math.nan
        found = {f"step_{part}_s": of_part for part, of_part in seconds.items()}
        found["train_tokens_per_s"] = num_tokens / total if total else math.nan
        found["model_tflops"] = tflops
        if peak is not None:
            found["mfu"] = tflops / peak
        return found
