"""What a setting may be chosen from, where that is a fixed set of names."""

from __future__ import annotations

from enum import Enum


class Backend(Enum):
    """Transport of a process group. `auto` is nccl where the process has a GPU, gloo elsewhere."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class Dtype(Enum):
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class OnStale(Enum):
    """What happens to a group that became older than `max_staleness`; each is counted by reason."""

    requeue = "requeue"  # run its prompt again, at most `max_retries` times, then drop it
    drop = "drop"
    mask_tokens = (
        "mask_tokens"  # leave its over-age tokens out of the loss; drop it if none is left
    )
    wait = "wait"  # the trainer waits for the oldest running group, so that none becomes too old


class OnFull(Enum):
    """What a push does when the buffer holds as much as it may; each is counted."""

    block = "block"  # wait until there is room
    drop_stalest = "drop_stalest"
    error = "error"


class Selector(Enum):
    """Which of the ready groups the trainer takes first."""

    stalest = "stalest"
    freshest = "freshest"
    fifo = "fifo"


class AppendFsync(Enum):
    """When the embedded server's append-only file reaches the disk."""

    everysec = "everysec"
    always = "always"


class PauseMode(Enum):
    """What the engine does with running requests while weights change.

    `retract` computes their KV cache anew under the new weights; `in_place` goes on over the old.
    """

    retract = "retract"
    in_place = "in_place"


class CommitStrategy(Enum):
    """How an engine takes a staged version; each is probed before it is used."""

    staged_disk = "staged_disk"  # reads the staged file through its own loader; works everywhere
    ipc = "ipc"  # from GPU memory that the receiver shares: needs a GPU and checkpoint-engine
    direct = "direct"  # its own broadcast endpoint, fed by the receiver; the baseline


class OnLongPrompt(Enum):
    """A prompt longer than `max_prompt_tokens`: end the run with an error, or skip and count it."""

    refuse = "refuse"
    skip = "skip"


class TaskKind(Enum):
    reasoning_gym = "reasoning_gym"
    gsm8k = "gsm8k"
