"""Rules that join settings of several sections; `Config` holds itself to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.choices import Backend, CommitStrategy, PauseMode
from configs.rules import require

if TYPE_CHECKING:
    from configs.schema import Config


def check_joint_rules(config: Config) -> None:
    """Raises ValueError naming the setting, its value and the fix."""
    _check_model(config)
    _check_lengths(config)
    _check_weights(config)
    if config.cluster.gpus_per_rank == 0:
        check_weights_without_gpus(config, "cluster.gpus_per_rank=0")


def _check_model(config: Config) -> None:
    model = config.model
    require(
        model.path is not None or model.scratch is not None,
        "model.path",
        model.path,
        "name a Hugging Face model or a folder, or choose model=tiny (which builds one)",
    )
    require(
        model.path is None or model.scratch is None,
        "model.path",
        model.path,
        "model.scratch would build another model; add model=pretrained to leave that out",
    )


def _check_lengths(config: Config) -> None:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    require(
        longest <= config.trainer.micro_batch_tokens,
        "trainer.micro_batch_tokens",
        config.trainer.micro_batch_tokens,
        "a trajectory of rollout.max_prompt_tokens + rollout.max_response_tokens = "
        f"{longest} tokens must fit in one forward pass",
    )
    if config.model.scratch is not None:
        require(
            longest <= config.model.scratch.max_position_embeddings,
            "rollout.max_prompt_tokens + rollout.max_response_tokens",
            longest,
            "must fit in model.scratch.max_position_embeddings="
            f"{config.model.scratch.max_position_embeddings}",
        )


def _check_weights(config: Config) -> None:
    engine, sync = config.rollout.engine, config.weight_sync
    require(
        not (engine.radix_cache and sync.pause_mode is PauseMode.retract),
        "rollout.engine.radix_cache",
        True,
        "a retracted request would find its old prefix in the cache; "
        "set weight_sync.pause_mode=in_place or rollout.engine.radix_cache=false",
    )
    require(
        sync.commit_timeout_s < engine.request_timeout_s,
        "weight_sync.commit_timeout_s",
        sync.commit_timeout_s,
        "a request that waits for a commit must not be given up before it: set less than "
        f"rollout.engine.request_timeout_s={engine.request_timeout_s:g}",
    )


def check_weights_without_gpus(config: Config, why: str) -> None:
    """Refuses what needs a GPU in a run that has none, or was told to use none."""
    require(
        config.weight_sync.commit is not CommitStrategy.ipc,
        "weight_sync.commit",
        CommitStrategy.ipc.name,
        f"it shares GPU memory, and {why}: choose staged_disk",
    )
    for section, backend in (
        ("weight_sync", config.weight_sync.backend),
        ("trainer", config.trainer.backend),
    ):
        require(
            backend is not Backend.nccl,
            f"{section}.backend",
            Backend.nccl.name,
            f"it needs GPUs, and {why}: choose auto or gloo",
        )
