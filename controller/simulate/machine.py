"""Service times of the parts of a run on GPUs: what the simulation takes for given.

    decoding step   max(weights / bandwidth, flops / rate) + keys and values / bandwidth + overhead
    prefill         flops / rate
    training step   6 flops a parameter and token of the rank that has the most
    version         its bytes over the wire, then from host memory into each engine

A roofline: the share of the peaks that kernels reach is REACHED and `utilisation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from trainer_pool.speed import PEAK_TFLOPS

# The H20 has no public data sheet: 4.0 TB/s and 96 GB (and 148 TFLOP/s) are as vendors list them.
BANDWIDTH = {
    "A100": 2.04e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
    "H20": 4.0e12,
    "B200": 8.0e12,
    "L40S": 0.86e12,
}
"""Bytes/s of the memory of NVIDIA's GPUs, from their data sheets."""
MEMORY = {"A100": 80e9, "H100": 80e9, "H200": 141e9, "H20": 96e9, "B200": 180e9, "L40S": 48e9}
REACHED = 0.8, 0.6
"""Share of the bandwidth, and of the peak of dense bfloat16, that decoding and prefill reach."""
OVERHEAD_S = 0.8e-3
"""Launch, sampling and scheduling of a decoding step."""
FLOPS = 6
"""Operations of training, for each parameter and token; as in MFU, without what is computed again.
"""
_BYTES = 2
"""Bytes of a weight, and of an element of the KV cache: bfloat16."""


@dataclass(kw_only=True, frozen=True)
class Machine:
    """An engine of `tp_size` GPUs and trainer ranks of the same kind."""

    gpu: str
    num_params: float
    active_params: float
    """Parameters that a token is multiplied by; fewer than all in a mixture of experts."""
    kv_elements: float
    """Elements that a token adds to the KV cache, over all layers."""
    tp_size: int
    max_running: int
    """Requests that an engine decodes at once, as the settings limit it."""
    utilisation: float = 0.4
    """Share of the peak that training reaches, as a run reports it: `mfu`."""
    wire_bytes_per_s: float = 10e9
    """At which one machine takes a version."""
    host_bytes_per_s: float = 25e9
    """From the memory of a host to one GPU."""

    @cached_property
    def _bandwidth(self) -> float:
        return self.tp_size * BANDWIDTH[self.gpu] * REACHED[0]

    @cached_property
    def _flops_per_s(self) -> float:
        return self.tp_size * PEAK_TFLOPS[self.gpu] * 1e12 * REACHED[1]

    def prefill_s(self, num_tokens: float) -> float:
        return 2 * self.active_params * num_tokens / self._flops_per_s

    @property
    def places(self) -> float:
        """Tokens of KV cache that an engine has room for, in 85% of its memory."""
        free = 0.85 * self.tp_size * MEMORY[self.gpu] - _BYTES * self.num_params
        return free / (_BYTES * self.kv_elements)

    def token_s(self, num_running: float, num_tokens: float) -> float:
        """Seconds of a decoding step of `num_running` requests that hold `num_tokens` in all."""
        return self._batch_s(num_running) + self._kv_s * num_tokens

    @cached_property
    def _kv_s(self) -> float:
        return _BYTES * self.kv_elements / self._bandwidth

    @cached_property
    def _batch_s(self) -> Callable[[float], float]:
        """Seconds of a decoding step by its requests, without their keys and values."""

        @cache
        def batch_s(num_running: float) -> float:
            # A large batch reaches all experts of a mixture, a single request its own.
            reached = min(self.num_params, self.active_params * max(1.0, num_running))
            weights = _BYTES * reached / self._bandwidth
            return max(weights, self.prefill_s(num_running)) + OVERHEAD_S

        return batch_s

    def train_s(self, num_tokens: float) -> float:
        """Seconds that one rank takes for its tokens of a step."""
        rate = PEAK_TFLOPS[self.gpu] * 1e12 * self.utilisation
        return FLOPS * self.active_params * num_tokens / rate

    @property
    def load_s(self) -> float:
        """Seconds to load a version from its host's memory into one engine."""
        return _BYTES * self.num_params / (self.tp_size * self.host_bytes_per_s)

    @property
    def wire_s(self) -> float:
        return _BYTES * self.num_params / self.wire_bytes_per_s
