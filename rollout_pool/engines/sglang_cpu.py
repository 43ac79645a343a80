"""Lets the stock sglang wheel import on a machine without CUDA; only `sglang_server` loads it.

Two of the packages that sglang imports at start-up exist only as CUDA builds: `sgl_kernel` (its
functions are never called on the CPU path used here) and `torchvision` (image models only). A
finder at the end of `sys.meta_path` provides empty modules for them whose every attribute raises
when it is called: code that needs a kernel fails with its name, never with a wrong result.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence

STUBBED = ("sgl_kernel", "torchvision")


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
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Else a crashing server waits more than a minute for GPU core dumps.
    os.environ.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")
    if not any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        sys.meta_path.append(_StubFinder())
