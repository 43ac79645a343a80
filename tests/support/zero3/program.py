"""The ranks of the ZeRO-3 tests: processes that take part in a scene and write what they saw.

    python -m tests.support.zero3.program FOLDER

For each line "SCENE NUM_RANKS" of its input it forks that many ranks and prints their exit codes;
torch, DeepSpeed and what these load at first use are imported before.
SCENE+FIELD+... is a scene with these settings of the trainer on. `FOLDER` holds the model, the
batches of all ranks and, in `receivers.json`, the receiver of two ranks; results go to
`FOLDER/SCENE-NUM_RANKS`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peft  # noqa: F401  (loaded with an adapter)
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (loaded with the model)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from configs.choices import Backend, Dtype
from configs.schema import TrainerConfig
from tests.support.zero3 import (
    adapter,
    algorithms,
    checkpoints,
    critics,
    killed,
    loop,
    optimizing,
    passes,
    seeing,
    split_rows,
    whole_runs,
)
from tests.support.zero3.scene import NotingPolicy, Scene, config_for
from trainer_pool.collectives import RankAddress, join_ranks, leave_ranks
from trainer_pool.critic import Critic

SCENES: dict[str, Callable[[Scene], None]] = {
    "adapter": adapter.train,
    "adapter_again": adapter.resume,
    "whole_run": whole_runs.whole_run,
    "experts": whole_runs.experts,
    "resume": whole_runs.resume,
    "offloaded": whole_runs.offloaded,
    "offloaded_again": whole_runs.offloaded_again,
    "reshard": checkpoints.reshard,
    "frozen": checkpoints.frozen,
    "noise": checkpoints.noise,
    "full_disk": checkpoints.full_disk,
    "copies": checkpoints.copies,
    "critic": critics.train,
    "critic_again": critics.resume,
    "chain": killed.chain,
    "optimizer": optimizing.optimizer,
    "masters": optimizing.masters,
    "accumulation": optimizing.accumulation,
    "packings": passes.packings,
    "head": passes.head,
    "reference": passes.reference,
    "seeing": seeing.train,
    "seeing_again": seeing.resume,
    "algorithms": algorithms.algorithms,
    "grpo": lambda scene: algorithms.synchronous(scene, algorithms.GRPO, 1),
    "grpo_twice": lambda scene: algorithms.synchronous(scene, algorithms.GRPO, 2),
    "gspo": lambda scene: algorithms.synchronous(scene, algorithms.GSPO, 1),
    "gspo_twice": lambda scene: algorithms.synchronous(scene, algorithms.GSPO, 2),
}
"""Beside "loop", "loop_again" and "split_rows", which make their own policies."""


OTHER_MODELS = {
    "accumulation": "model_of_one_layer",  # more layers would show no more of sums
    "algorithms": "model_of_one_layer",
    "experts": "experts",
    "seeing": "seeing",
    "seeing_again": "seeing",
}
"""Models of scenes that do not train the small dense one."""


def main() -> None:
    if os.getpgrp() != os.getpid():  # executed, not forked
        os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # with its ranks
    get_checkpoint_conversion_mapping("")  # compiles a thousand patterns once
    # DeepSpeed collects garbage at its start: that would write to each object of the imports, and
    # so copy it into every rank.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        name, num_ranks = line.split()[0], int(line.split()[1])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pids = [
                fork_rank(Path(sys.argv[1]), listener, name, rank, num_ranks)
                for rank in range(num_ranks)
            ]
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


def fork_rank(folder: Path, listener: socket.socket, name: str, rank: int, num_ranks: int) -> int:
    """Its process id."""
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{name}-{num_ranks}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run_rank(folder, listener, name, rank, num_ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_rank(folder: Path, listener: socket.socket, name: str, rank: int, num_ranks: int) -> None:
    host, port = listener.getsockname()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    address = RankAddress(rank=rank, num_ranks=num_ranks, host=host, port=port, uses_gpu=False)
    if rank != 0:
        listener.close()
    own = listener if rank == 0 else None
    if name in ("loop", "loop_again"):
        loop.run_loop(folder, own, address, is_resumed=name == "loop_again")
    elif name == "split_rows":
        split_rows.run(folder, own, address)
    else:
        play(folder, own, name, address)


def play(folder: Path, listener: socket.socket | None, name: str, address: RankAddress) -> None:
    """The scene of this name, after which rank 0 writes its results."""
    ranks = join_ranks(address, Backend.gloo, 60.0, listener)
    with checkpoints.frozen_layers() if name == "frozen" else contextlib.nullcontext():
        policy = NotingPolicy(
            str(folder / OTHER_MODELS.get(name, "model")),
            settings_of(name, ranks.num_ranks),
            address,
            lora=adapter.LORA if name.startswith("adapter") else None,
        )
    critic = None
    if name in ("critic", "critic_again", "algorithms"):
        critic = Critic(
            policy._model_path, settings_of(name, ranks.num_ranks), address, policy.config
        )
    output = folder / f"{name}-{ranks.num_ranks}"
    scene = Scene(folder, output, policy, ranks, critic)
    SCENES[name.split("+")[0]](scene)
    if ranks.rank == 0:
        output.mkdir(exist_ok=True)
        (output / "results.json").write_text(json.dumps(scene.results))
    ranks.barrier()
    if critic is not None:
        critic.close()
    policy.close()
    leave_ranks()


def settings_of(name: str, num_ranks: int) -> TrainerConfig:
    """The settings of the trainer in a scene."""
    scene, *offloads = name.split("+")
    config = optimizing.OPTIMIZER if scene == "optimizer" else config_for(num_ranks)
    config = replace(config, **dict.fromkeys(offloads, True))
    if scene == "experts":  # their layers are computed again in the backward pass
        config = replace(config, gradient_checkpointing=True)
    return replace(config, dtype=Dtype.bfloat16) if scene == "masters" else config


if __name__ == "__main__":
    main()
