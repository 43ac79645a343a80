"""`make export`: the model of a checkpoint in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from configs.load import read_config
from controller.run_dir import RunDir, RunDirError
from controller.units import format_count
from trainer_pool.state.export import export_checkpoint


def export_model(run_dir: RunDir, step: int | None, to: Path | None) -> None:
    """Raises RunDirError if there is no such checkpoint, or the folder exists."""
    config = read_config(run_dir.path / "config.yaml")
    checkpoint = _checkpoint(run_dir, step)
    number = int(checkpoint.name.removeprefix("step-"))
    folder = to or run_dir.path / f"model-{checkpoint.name}"
    if folder.exists():
        raise RunDirError(f"TO={folder}: exists already; choose another folder, or remove it")
    num_parameters = export_checkpoint(
        checkpoint,
        config.model.path or str(run_dir.model),
        folder,
        trust_remote_code=config.model.trust_remote_code,
    )
    print(f"{run_dir.name}: {format_count(num_parameters)} parameters of step {number} in {folder}")


def _checkpoint(run_dir: RunDir, step: int | None) -> Path:
    folder = run_dir.path / "checkpoints"
    there = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    if not there:
        raise RunDirError(f"RUN={run_dir.name!r}: it has no checkpoint yet")
    if step is not None and step not in there:
        raise RunDirError(
            f"STEP={step}: {run_dir.name} has no checkpoint of it; there are "
            f"{', '.join(map(str, there))}"
        )
    return folder / f"step-{there[-1] if step is None else step:06d}"
