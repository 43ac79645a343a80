"""Initial fields of a shard's `settings` hash."""

from __future__ import annotations

from configs.schema import BufferConfig


def quota(limit: int, shard: int, num_shards: int) -> int:
    """One shard's part of a limit; the parts of all shards add up to it."""
    whole, rest = divmod(limit, num_shards)
    return whole + (shard < rest)


def initial_settings(
    config: BufferConfig,
    groups_per_step: int,
    shard: int = 0,
    num_shards: int = 1,
    oversampling: float = 1.0,
) -> dict[str, str]:
    """Settings of one shard; limits are split into quotas, '' for no limit."""

    def part(limit: int | None) -> str:
        return "" if limit is None else str(quota(limit, shard, num_shards))

    return {
        "max_staleness": str(config.max_staleness),
        "on_stale": config.on_stale.value,
        "max_retries": str(config.max_retries),
        "selector": config.selector.value,
        "capacity_groups": part(config.capacity_groups),
        "capacity_bytes": part(config.capacity_bytes),
        "on_full": config.on_full.value,
        "max_attempts": str(config.max_attempts),
        "remember_s": repr(config.remember_s),
        "audit_length": str(config.audit_length),
        "groups_per_step": str(groups_per_step),
        "oversampling": repr(float(oversampling)),
        "shard": str(shard),
        "num_shards": str(num_shards),
        "trainer_version": "0",
        "acked_step": "-1",
        "wanted": "0",
        "lineage": "",
        "gaps": "",
        "num_gaps": "0",
    }
