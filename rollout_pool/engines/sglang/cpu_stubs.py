"""Lets the stock sglang wheel import on a machine without CUDA; only `server` loads it.

Two of the packages that sglang imports at start-up exist only as CUDA builds: `sgl_kernel` (its
functions are never called on the CPU path used here) and `torchvision` (image models only). A
finder at the end of `sys.meta_path` provides empty modules for them whose every attribute raises
when it is called: code that needs a kernel fails with its name, never with a wrong result.

One kernel of Triton, which needs a GPU, has a replacement: that of Qwen2-MoE's shared expert.
Attention, which SGLang computes request by request here, is computed for many at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence

import torch

from rollout_pool.engines.sglang import cpu_attention

STUBBED = ("sgl_kernel", "torchvision")
KERNELS_OF_QWEN_3_5 = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""SGLang looks them up when it imports Qwen 3.5, and so the image processor of all Qwen models."""


class _Missing:
    """Stands for a function or class of a missing package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> _Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self._name}.{attribute}")

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        raise RuntimeError(
            f"{self._name} is not available on a CPU-only machine; this model or option of SGLang "
            "needs a CUDA build (install with `make install` on a machine with a GPU)"
        )


class _StubModule(types.ModuleType):
    __version__ = "0.0.0"  # transformers compares versions

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install() -> None:
    """Install the stubs. Call it before the first import of sglang in each of its processes."""
    # /weights_checker waits for the device before and after it reads.
    torch.cuda.synchronize = lambda device=None: None
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        sys.meta_path.append(_StubFinder())
    for name in KERNELS_OF_QWEN_3_5:
        setattr(torch.ops.sgl_kernel, name, _Missing(f"torch.ops.sgl_kernel.{name}"))


def replace_kernels() -> None:
    """Compute on the CPU what SGLang computes in Triton alone. Call it after `install`."""
    from sglang.kernels.ops.elementwise import elementwise

    cpu_attention.install()
    # Its callers look it up here, whenever their modules were imported.
    elementwise._launch_fused_gate_sigmoid_mul = gate_shared_expert


def gate_shared_expert(
    hidden_LH: torch.Tensor,
    gate_H: torch.Tensor,
    shared_LH: torch.Tensor,
    output_LH: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """Write sigmoid(hidden gate) shared to `output`, or add it; in float32, as the kernel."""
    gated_LH = (hidden_LH.float() @ gate_H.float()).sigmoid().unsqueeze(1) * shared_LH.float()
    output_LH.copy_(gated_LH + output_LH.float() if do_add else gated_LH)
