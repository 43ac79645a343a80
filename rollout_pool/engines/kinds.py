"""The one place that knows which kinds of engines there are: today SGLang's.

Another kind is a folder beside `sglang/` with its Engine and EngineClient, chosen here.
"""

from __future__ import annotations

from collections.abc import Collection

from configs.choices import PauseMode
from rollout_pool.engines.engine import Engine, EngineSpec
from rollout_pool.engines.sglang.arguments import shared_memory_bytes
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.engines.sglang.models import (
    check_adapters,
    check_routes,
    check_served,
    context_length,
)
from rollout_pool.sampling.engine_client import EngineClient
from rollout_pool.types import RolloutSpec
from tensors.pictures import PictureTokens

__all__ = [
    "check_adapters",
    "check_routes",
    "check_served",
    "context_length",
    "make_client",
    "make_engine",
    "shared_memory_bytes",
]


def make_engine(spec: EngineSpec) -> Engine:
    return SGLangEngine(spec)


def make_client(
    name: str,
    url: str,
    spec: RolloutSpec,
    *,
    vocab_size: int,
    end_tokens: Collection[int],
    pictures: PictureTokens | None = None,
) -> EngineClient:
    """A worker's connection to the engine `name` of its run; its settings are BatchingClient's."""
    config = spec.config.engine
    return SGLangClient(
        name,
        url,
        key=spec.engine_key,
        request_timeout_s=config.request_timeout_s,
        has_prefix_cache=config.radix_cache,
        keys_prefix_by_version=spec.weight_sync.pause_mode is PauseMode.in_place,
        needs_seeds=config.deterministic,
        is_only_client=spec.config.num_workers == 1,
        returns_routes=config.routing_replay,
        keeps_versions=spec.adapter is not None,
        vocab_size=vocab_size,
        end_tokens=end_tokens,
        pictures=pictures,
    )
