"""Makes a server keep each version of an adapter for the requests that began under it; only
`server` loads this.

    POST /load_lora_adapter 8 ──► requests from now on: 8      those before end under 7 and 6
                                  5, which none uses any more, is unloaded first

A version's name is its number. A request that names no adapter gets the newest, and keeps it until
it ends; its response has that number as weight_version, for each of its tokens.

SGLang counts an adapter's requests, too, but never counts down for one that is aborted in its
queue: an unload of that adapter would wait for ever, and every later load with it. Its table of
requests is right, so users are counted there, and nothing is unloaded that has one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial, partialmethod
from typing import Any

import torch

MAKE_ROOM_S = 20.0
"""Longest wait until requests that were taken back have ended."""
LOOK_AGAIN_S = 0.02
"""Time between two looks at the requests: SGLang signals the end of each to its caller alone."""


def install() -> None:
    """Patch SGLang in this process. Call it before it starts its manager and forks its children."""
    from sglang.srt.lora.lora_registry import LoRARegistry
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    LoRARegistry.release = _release
    LoRARegistry.wait_for_unload = _wait_for_unload
    TokenizerManager.newest_adapter = None
    for name, patched in (
        ("generate_request", _generate_request),
        ("_stream_one_response", _stream_one_response),
        ("load_lora_adapter", _load_lora_adapter),
    ):
        stock: Callable[..., Any] = getattr(TokenizerManager, name)
        setattr(TokenizerManager, name, partialmethod(patched, stock))
    if not torch.cuda.is_available():
        _install_on_cpu()


async def _release(registry: Any, lora_id: object) -> None:
    """In the place of SGLang's, which counts down."""


async def _wait_for_unload(registry: Any, lora_id: str) -> None:
    """In the place of SGLang's, which waits for its own count."""
    registry._counters.pop(lora_id, None)


# Requests -----------------------------------------------------------------------------------------


async def _generate_request(
    manager: Any, stock: Callable[..., Any], obj: Any, request: Any = None
) -> AsyncGenerator[Any]:
    # Between here and its place in the table of requests SGLang awaits nothing, so that the
    # adapter has a user from the moment on at which it is named.
    if obj.lora_path is None:
        obj.lora_path = manager.newest_adapter
    async with aclosing(stock(manager, obj, request)) as parts:
        async for part in parts:
            yield part


async def _stream_one_response(
    manager: Any, stock: Callable[..., Any], obj: Any, state: Any, request: Any = None
) -> AsyncGenerator[Any]:
    async with aclosing(stock(manager, obj, state, request)) as parts:
        async for part in parts:
            if obj.lora_path is not None:
                stamp(part["meta_info"], obj.lora_path)
            yield part


def stamp(meta: dict[str, Any], version: str) -> None:
    """Writes the version of a request into its response, whose own fields know the base alone."""
    meta["weight_version"] = version
    if meta["finish_reason"] is not None:
        meta["weight_versions"] = [
            {"version": version, "start": 0, "end": meta["completion_tokens"]}
        ]


# Versions -----------------------------------------------------------------------------------------


async def _load_lora_adapter(
    manager: Any, stock: Callable[..., Any], obj: Any, request: Any = None
) -> Any:
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput

    if obj.lora_name == manager.newest_adapter:  # the reply to an earlier call was lost
        return LoadLoRAAdapterReqOutput(success=True)
    try:
        await _make_room(manager)
    except TimeoutError as error:
        return LoadLoRAAdapterReqOutput(success=False, error_message=str(error))
    result = await stock(manager, obj, request)
    if result.success:
        manager.newest_adapter = obj.lora_name
        manager._update_weight_version_if_provided(obj.lora_name)
    return result


async def _make_room(manager: Any) -> None:
    """Unloads what no request uses. If all slots are in use even then, takes the requests of the
    oldest version back: their clients send them again, with their tokens, under the newest."""
    from sglang.srt.runtime_context import get_lora

    num_slots, deadline = get_lora().max_loras_per_batch, time.monotonic() + MAKE_ROOM_S
    while True:
        users = Counter(state.obj.lora_path for state in manager.rid_to_state.values())
        loaded = manager.lora_registry.get_all_adapters()
        for name in [n for n in loaded if n != manager.newest_adapter and not users[n]]:
            await _unload(manager, name)
            del loaded[name]
        if len(loaded) < num_slots:
            return
        oldest = min(loaded.keys() - {manager.newest_adapter}, key=int)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{users[oldest]} requests of version {oldest} do not end")
        for rid, state in list(manager.rid_to_state.items()):
            if state.obj.lora_path == oldest and state.dispatched:
                manager.abort_request(rid)
        await asyncio.sleep(LOOK_AGAIN_S)


async def _unload(manager: Any, name: str) -> None:
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    result = await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
    if not result.success:
        raise RuntimeError(f"version {name} was not unloaded: {result.error_message}")
    # Or a request that names it would load it again, from a folder that is gone.
    manager.lora_ref_cache.pop(name, None)


# Without a GPU ------------------------------------------------------------------------------------


class _TorchWithoutPinnedMemory:
    """Stands for `torch` in one module, whose constructors would pin memory for a GPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name in ("tensor", "zeros", "ones", "empty", "arange"):
            return partial(_unpinned, found)
        return found


def _unpinned(make: Callable[..., Any], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
    return make(*args, **kwargs)


def _as_it_is(tensor: Any, device: object = None) -> Any:
    return tensor


def _install_on_cpu() -> None:
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment]
    layers.torch = torch_backend.torch = _TorchWithoutPinnedMemory()
