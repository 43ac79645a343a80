"""Finds the last checkpoint of a run and its settings with legal changes, to go on from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from configs.checks import live_text
from configs.introspection import live_settings
from configs.load import ConfigError, differences
from configs.run_files import Scalar
from configs.schema import Config
from controller.metrics.history import TUNED, Record, of_kind, read_metrics
from controller.run_dir import RunDir, RunDirError
from trainer_pool.state.checkpoint import CheckpointStore, TrainState
from trainer_pool.types import KEPT_REFERENCE

FIXED = {
    "experiment": "it is the set of settings that the run began with; change single ones in ARGS",
    "run.name": "it names the run's folder and its keys in Redis",
    "run.dir": "the run stays where it is",
    "run.seed": "it orders the prompts, of which some are trained already",
    "model": "the checkpoint holds the weights of this model",
    "task": "the run's prompts, and groups that wait in its buffer, are of this task",
    "rollout.num_workers": "each worker has a share of the prompts of its own",
    "buffer.url": "the run's groups are in that server",
    "buffer.on_stale": "the groups that the buffer holds are stored by it",
    "buffer.selector": "the groups that the buffer holds are stored by it",
    "buffer.shards": "each group is in one of the shards that the run began with",
    "trainer.warm_start": "it comes before the first step",
}
"""Settings and sections that a run keeps, with the reason."""
FIX = "launch a new run to change it"


@dataclass(kw_only=True, slots=True, frozen=True)
class Resumption:
    config: Config
    checkpoint: Path
    state: TrainState
    newest_version: int
    """The newest that the run's history names."""
    overridden: frozenset[str]
    """Settings given on the command line."""
    tuned: Sequence[Record]
    """The changes of live settings in the run's history."""


def find_resumption(run_dir: RunDir, overrides: Sequence[str]) -> Resumption:
    """Raises RunDirError if the run cannot go on, and ConfigError for an illegal change."""
    before = run_dir.read_config()
    config = run_dir.read_config(overrides)
    for name, (old, _) in differences(before, config).items():
        fixed = [part for part in FIXED if name == part or name.startswith(f"{part}.")]
        if fixed:
            tuned = [r.values for r in read_metrics(run_dir.metrics, TUNED)]
            now = [str(one["after"]) for one in tuned if one["setting"] == name] or [str(old)]
            is_live = name in live_settings().values()
            fix = f"once it goes on, `{run_dir.command('tune')}` may change it" if is_live else FIX
            raise ConfigError(
                f"{name}: a run keeps its {fixed[0]}, here {now[-1]}: {FIXED[fixed[0]]}; {fix}"
            )
    if config.keeps_first_policy and not (run_dir.path / KEPT_REFERENCE).is_dir():
        raise ConfigError(
            f"algorithm.kl.weight={config.algorithm.kl.weight:g}: the run began without a "
            "reference, and the policy that it began with was not kept; set algorithm.kl.reference "
            "to a model, or algorithm.kl.weight=0"
        )
    if config.algorithm.critic is not None and before.algorithm.critic is None:
        raise ConfigError(
            "algorithm.critic: the run has none, whose values would have to be learnt first; set "
            "null, or launch a new run with it"
        )
    found = CheckpointStore(run_dir.path / "checkpoints").latest()
    record = run_dir.read_record()
    if found is None:
        every = f"(trainer.checkpoint_every={config.trainer.checkpoint_every})"
        fix = f"it ended before its first checkpoint {every}; launch it again"
        if record.state == "running":
            fix = f"it has not ended, and has no checkpoint yet {every}; "
            fix += f"`{run_dir.command('stop')}` ends it" if record.is_alive else run_dir.gone_words
        raise RunDirError(f"RUN={run_dir.name!r}: {fix}")
    folder, state = found
    overridden = frozenset(override.partition("=")[0] for override in overrides)
    if "trainer.num_steps" in overridden and config.trainer.num_steps < state.step:
        raise ConfigError(
            f"trainer.num_steps={config.trainer.num_steps}: the run has done {state.step} steps; "
            "give the number at which it is to end"
        )
    history = read_metrics(run_dir.metrics)
    if record.state == "finished" and state.step >= config.trainer.num_steps:
        raise RunDirError(
            f"RUN={run_dir.name!r}: it has finished its {state.step} steps; "
            f'ARGS="trainer.num_steps={2 * state.step}" trains on'
        )
    return Resumption(
        config=config,
        checkpoint=folder,
        state=state,
        newest_version=max((r.count("version") + (r.kind == "step") for r in history), default=0),
        overridden=overridden,
        tuned=of_kind(history, TUNED),
    )


def changes_by_resume(
    config: Config, held: Mapping[str, str], before: Sequence[Record]
) -> Iterator[dict[str, Scalar]]:
    """Fields of a `tuned` record for each setting that is not as the last one `before` says: the
    command line has replaced it, or its Redis is lost. `held`: the live settings that Redis has.
    """
    tuned = {str(r.values.get("setting")): str(r.values.get("after")) for r in before}
    for name in set(live_settings().values()) & tuned.keys():
        now = held.get(name.rpartition(".")[2], live_text(attrgetter(name)(config)))
        if now != tuned[name]:
            yield {"setting": name, "before": tuned[name], "after": now, "who": "the resume"}
