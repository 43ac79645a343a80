"""Redis keys of a run. All keys of one shard share a hash tag, so they are in one slot.

{leash:RUN}:settings         HASH    max_staleness, trainer_version and the other live settings
{leash:RUN}:running          ZSET    groups being generated, by the oldest version of their tokens
{leash:RUN}:credits          ZSET    the same, by the deadline of their credit (ms)
{leash:RUN}:ready            ZSET    groups to be trained, by gate version * 2^32 + sequence number
{leash:RUN}:order            ZSET    the same in the selector's order; only with fifo and shortest
{leash:RUN}:leased           ZSET    groups being trained, by the deadline of their lease (ms)
{leash:RUN}:consumed         ZSET    groups whose step is done, by step
{leash:RUN}:quarantined      ZSET    quarantined groups, by the time they were put there (ms)
{leash:RUN}:retries          LIST    prompts to run again: 'attempt index task', or 'attempt+reruns
                                     index task' if a worker died while running it
{leash:RUN}:prompts          HASH    prompt of each running group, by its id, written the same way
{leash:RUN}:failures         HASH    how often the groups of a prompt failed, by 'index task'
{leash:RUN}:quarantined_prompts  HASH  prompts that are no longer run: 'ms times reason'
{leash:RUN}:group:ID         HASH    a group's metadata; its state outlives the payload for a while
{leash:RUN}:payload:ID       STRING  the encoded group, or the index of its chunks
{leash:RUN}:payload:ID:N     STRING  its chunks, above 64 MB
{leash:RUN}:lease:STEP       HASH    the global batch of one step
{leash:RUN}:batches          ZSET    the steps that have a batch
{leash:RUN}:forming          STRING  lock of the process that forms a batch from several shards
{leash:RUN}:lineages         ZSET    every lineage that ever owned the buffer, in order
{leash:RUN}:reconcile        HASH    progress of the last reconcile
{leash:RUN}:stats            HASH    counters
{leash:RUN}:events           STREAM  what happened to which group; bounded
{leash:RUN}:wake:NAME        STREAM  wakes waiters: room, batch, version, settings, engines, ...
{leash:RUN}:engine_versions  HASH    version that each live engine serves
{leash:RUN}:engine_urls      HASH    URL of each engine, also of one that serves nothing yet
{leash:RUN}:draining         HASH    live engines that get no new requests before a commit
{leash:RUN}:commit_gate      ZSET    engines paused for a commit, by the end of their pause (ms)
{leash:RUN}:receivers        HASH    URL of each receiver of weights
{leash:RUN}:staged           HASH    version that each receiver staged last
{leash:RUN}:weights          HASH    available: the newest version that a receiver has whole
{leash:RUN}:probes           HASH    by version: what the trainer computed, see probes.py
{leash:RUN}:tasks            HASH    each worker's position in its tasks; the highest of all shards
{leash:RUN}:waits, :counters, :metrics, :phase   see run_state.py

These are the names of shard 0, the home of a run. Shard 1 begins with {leash:RUN:1}, and so on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True, frozen=True)
class Keys:
    """Keys of one shard of a run. Raises ValueError if the run's name cannot be part of a key."""

    run: str
    shard: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.run):
            raise ValueError(
                f"run.name={self.run!r}: use 1 to 128 letters, digits, '.', '_' and '-' "
                "(it is part of every Redis key)"
            )

    @property
    def prefix(self) -> str:
        return f"{{leash:{self.run}:{self.shard}}}" if self.shard else f"{{leash:{self.run}}}"

    def __call__(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    def group(self, group_id: str) -> str:
        return self(f"group:{group_id}")

    def payload(self, group_id: str) -> str:
        return self(f"payload:{group_id}")

    def wake(self, name: str) -> str:
        return self(f"wake:{name}")


def check_group_id(group_id: str) -> str:
    """Returns the id. Raises ValueError if it cannot be part of a key or of a list of ids."""
    # With a ':' the payload of 'a:1' would have the key of the first chunk of 'a'.
    # Printable because terminals show ids.
    is_name = group_id.isprintable() and " " not in group_id and ":" not in group_id
    if not 0 < len(group_id) <= 256 or not is_name:
        raise ValueError(
            f"group_id={group_id!r}: must have 1 to 256 printable characters, no white space and "
            "no ':'"
        )
    return group_id
