"""Puts the groups of a dump into a buffer: of another run, or of a run that lost its server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from buffer.dump.file import (
    DumpedGroup,
    DumpedTokens,
    check_dump,
    read_dump,
    read_groups,
    read_header,
)
from buffer.errors import BufferFullError
from buffer.redis.client import BufferRedis
from buffer.redis.keys import Keys
from buffer.redis.replies import number
from buffer.redis.scripts import Scripts
from buffer.replay_buffer import ReplayBuffer, split_parts
from buffer.results import PushResult, TaskProgress
from buffer.staleness import renumber
from buffer.types import TrajectoryGroup
from buffer.wire.codec import decode_group


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadReport:
    """The fate of each group of a dump; every group is counted once."""

    pushed: Mapping[str, int]
    """By result of the push: stored, duplicate, stale, ..."""
    skipped: Mapping[str, int]
    """Not requested, by state."""
    unreadable: Mapping[str, str]
    """The payload's error, by group id."""


async def load_buffer(buffer: ReplayBuffer, path: Path) -> LoadReport:
    """Pushes the ready and leased groups of a dump into an open run; all become ready.

    May be repeated: a group that is in the buffer already is a duplicate. Raises ValueError, with
    nothing pushed, if the file is damaged, and what `push` raises.
    """
    check_dump(path)
    pushed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unreadable: dict[str, str] = {}
    for dumped in read_groups(path):
        if dumped.state not in ("ready", "leased"):
            skipped[dumped.state] += 1
            continue
        try:
            group = _renumbered(dumped)
        except ValueError as error:
            unreadable[dumped.group_id] = str(error)
            continue
        pushed[(await buffer.push(group)).value] += 1
    return LoadReport(pushed=dict(pushed), skipped=dict(skipped), unreadable=unreadable)


async def restore_buffer(
    redis: BufferRedis,
    buffer: ReplayBuffer,
    run: str,
    path: Path,
    progress: TaskProgress,
    trained: Collection[str],
) -> int:
    """Fills the open, empty buffer of a run with what a checkpoint's dump holds; returns how many
    groups that are.

    Groups of prompts that are untrained in the checkpoint's `progress` become ready, unless they
    are among the `trained`; the other prompts run again, with the tokens that they have. Rollbacks
    and what is known of prompts that failed are as they were. Call it before `reconcile`, which
    sorts out groups of versions after the checkpoint's; after a crash, call it again. Raises
    ValueError, with nothing changed, if the file is damaged.
    """
    check_dump(path)
    shards = read_header(path).shards
    for place, shard in enumerate(shards):
        await Scripts(redis, Keys(run, place)).run(
            "run_state/restore_shard",
            int,
            rollbacks=shard.settings["rollbacks"],
            num_rollbacks=shard.settings["num_rollbacks"],
            failures=shard.failures,
            quarantined_prompts=shard.quarantined_prompts,
        )
    # By place in the stream: a prompt may have gone stale and run again since the checkpoint
    # listed it. Prompts that it does not list had not begun, and come from their worker's stream.
    untrained = {(prompt.task, prompt.index): prompt for prompt in progress.untrained}
    kept: dict[tuple[str, int], Mapping[str, bytes]] = {}
    num_groups, has_room = 0, True
    for item in read_dump(path):
        if isinstance(item, DumpedTokens):
            index, _, task = item.prompt.partition(" ")
            kept[task, number(index)] = item.parts
        elif has_room and item.state != "quarantined" and item.group_id not in trained:
            with suppress(ValueError):  # it is damaged, and sampled again
                group = _decoded(item)
                if (prompt := (group.prompt.task, group.prompt.index)) not in untrained:
                    continue
                try:
                    result = await buffer.push(group, timeout_s=0)  # nothing frees room yet
                except (BufferFullError, TimeoutError):
                    has_room = False  # a smaller capacity than before: the rest is sampled again
                    continue
                num_groups += result in (PushResult.stored, PushResult.duplicate)
                del untrained[prompt]
    rest = tuple(untrained.values())
    await buffer.restore_progress(replace(progress, untrained=rest))
    for place, ref in enumerate(rest):
        if parts := kept.get((ref.task, ref.index)):
            # On the shard where `restore_progress` queues the prompt: nothing else looks there.
            scripts = Scripts(redis, Keys(run, place % len(shards)))
            for some in split_parts(parts):
                raw = [argument for part in some for argument in part]
                name = f"{ref.index} {ref.task}"
                await scripts.run("run_state/restore_kept", int, *raw, prompt=name)
    return num_groups


def _decoded(dumped: DumpedGroup) -> TrajectoryGroup:
    """The group with the versions that it was pushed with."""
    if not dumped.payload:
        raise ValueError("its payload was gone when the dump was made")
    group = decode_group(dumped.payload)
    if group.group_id != dumped.group_id:
        raise ValueError(f"its payload is that of group {group.group_id!r}")
    return group


def _renumbered(dumped: DumpedGroup) -> TrajectoryGroup:
    """The group with its versions as renumbered by the run's last rollback."""
    group = _decoded(dumped)
    if "renumbered" in dumped.fields:
        entries = dumped.fields.get("versions", "").split()
        group = renumber(group, [int(entry.split(":")[0]) for entry in entries])
    return group
