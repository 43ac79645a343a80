"""Rules that join settings of several sections; `Config` holds itself to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.choices import (
    Backend,
    CommitStrategy,
    OnStale,
    PauseMode,
    RewardKind,
    TailPolicy,
    TaskKind,
)
from configs.rules import require

if TYPE_CHECKING:
    from configs.schema import Config


def check_joint_rules(config: Config) -> None:
    """Raises ValueError naming the setting, its value and the fix."""
    _check_model(config)
    _check_lengths(config)
    _check_weights(config)
    _check_tail(config)
    _check_rewards(config)
    _check_tools(config)
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


def _check_tail(config: Config) -> None:
    rollout, buffer = config.rollout, config.buffer
    is_synchronous = buffer.max_staleness == 0
    require(
        not (rollout.tail is TailPolicy.postpone and buffer.on_stale is OnStale.wait),
        "rollout.tail",
        rollout.tail.name,
        "with buffer.on_stale=wait the trainer waits for the very groups that are put off; choose "
        "another buffer.on_stale, or rollout.tail=continue_across_versions",
    )
    require(
        not is_synchronous or rollout.tail is TailPolicy.continue_across_versions,
        "rollout.tail",
        rollout.tail.name,
        "with buffer.max_staleness=0 no group outlives a version, so none can be put off to a "
        "later one; raise buffer.max_staleness, or set rollout.tail=continue_across_versions",
    )
    require(
        not is_synchronous
        or rollout.oversampling <= 1
        or buffer.on_stale not in (OnStale.requeue, OnStale.drop),
        "rollout.oversampling",
        rollout.oversampling,
        "with buffer.max_staleness=0 each publish throws the surplus away, which are the groups "
        "with the longest answers: what is trained would be biased to short ones; set 1, or raise "
        "buffer.max_staleness",
    )


def _check_rewards(config: Config) -> None:
    task = config.task
    kinds = [reward.kind for reward in task.rewards.values()]
    parts = [r for r in task.rewards.values() if r.kind is not RewardKind.teacher]
    require(
        not task.rewards or bool(parts),
        "task.rewards",
        [kind.name for kind in kinds],
        "a teacher gives no reward, so all of a group would be 0 and teach nothing; add another "
        "part, as in task.rewards.right.kind=task",
    )
    require(
        not parts or any(reward.weight for reward in parts),
        "task.rewards.*.weight",
        [reward.weight for reward in parts],
        "every reward would be 0 and teach nothing; give one part another weight",
    )
    require(
        task.kind is not TaskKind.code
        or RewardKind.code_tests in kinds
        or task.env is not None
        or task.agent is not None,
        "task.rewards",
        [kind.name for kind in kinds],
        "an answer of task.kind=code is scored by running its tests; set "
        "task.rewards={tests: {kind: code_tests}}, or name who gives the reward in task.env or "
        "task.agent",
    )


def _check_tools(config: Config) -> None:
    task = config.task
    require(
        not task.tools or task.chat_template,
        "task.tools",
        task.tools,
        "it is the chat template that tells the model of its tools: set task.chat_template=true",
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
