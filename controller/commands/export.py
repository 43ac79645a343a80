"""`make export`: the model of a checkpoint in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from controller.metrics.history import read_metrics
from controller.report.card import CARD, model_card, result_at
from controller.run_dir import RunDir, RunDirError
from controller.units import format_count
from trainer_pool.state.checkpoint import CheckpointStore, read_state
from trainer_pool.state.export import export_checkpoint


def export_model(run_dir: RunDir, step: str | None, to: Path | None) -> None:
    """`step`: a number, or "best". Raises RunDirError if there is no such checkpoint, or the folder
    exists."""
    config = run_dir.read_config()
    checkpoint = _checkpoint(run_dir, step)
    state = read_state(checkpoint)
    folder = to or run_dir.path / f"model-{checkpoint.name}"
    if folder.exists():
        raise RunDirError(f"TO={folder}: exists already; choose another folder, or remove it")
    # Before the model is written: after a failure the next try would find its folder.
    result = result_at(run_dir, config, read_metrics(run_dir.metrics), state)
    card = model_card(config, result, run_dir.read_data())
    num_parameters = export_checkpoint(
        checkpoint,
        config.model.path or str(run_dir.model),
        folder,
        trust_remote_code=config.model.trust_remote_code,
        lora=config.model.lora,
    )
    (folder / CARD).write_text(card, encoding="utf-8")
    size = format_count(num_parameters)
    print(f"{run_dir.name}: {size} parameters of step {state.step} in {folder}")


def _checkpoint(run_dir: RunDir, step: str | None) -> Path:
    """By default the one that a resume goes on from: a restart may have undone later ones."""
    store = CheckpointStore(run_dir.path / "checkpoints")
    if (found := store.latest()) is None:
        raise RunDirError(f"RUN={run_dir.name!r}: it has no checkpoint yet")
    if step is None:
        return found[0]
    there = {str(number): number for number in store.steps()}
    if step == "best" and (best := store.best()) is not None:
        step = str(best.step)
    if step not in there:
        hint = " (a launch with trainer.keep_best keeps the best one)" * (step == "best")
        raise RunDirError(
            f"STEP={step}: {run_dir.name} has no checkpoint of it{hint}; there are "
            f"{', '.join(there)}"
        )
    return store.folder / f"step-{there[step]:06d}"
