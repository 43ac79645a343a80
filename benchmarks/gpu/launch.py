"""Launches where there are GPUs: do they end, do engine and trainer agree, what takes time?

    python -m benchmarks.gpu.launch [--sizes quickstart 0.6B 1.7B] [--steps 40] [--settings ...]

The quickstart with its model, and with random weights in the shapes of Qwen3, whose answers have up
to 512 tokens. With one GPU rank and engine share it, and versions go over gloo; from two on they go
over NCCL. `--settings` are added to each launch, as `weight_sync.backend=gloo`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.gpu.device import require_gpu, require_packages
from benchmarks.report import Report
from controller.metrics.history import of_kind, read_metrics, series
from processes.child import Child

_LIMIT_S = 900.0
_LONG = ["rollout.max_response_tokens=512", "trainer.gradient_checkpointing=true"]
_LONG += ["trainer.warm_start.num_steps=10", "trainer.learning_rate=1e-6", "rollout.eval_every=0"]
SIZES = {
    "quickstart": [],
    "0.6B": [*_LONG, "model.scratch.hidden_size=1024", "model.scratch.intermediate_size=3072"],
    "1.7B": [*_LONG, "model.scratch.hidden_size=2048", "model.scratch.intermediate_size=6144"],
}
for _size in ("0.6B", "1.7B"):
    SIZES[_size] += ["model.scratch.num_layers=28", "model.scratch.num_heads=16"]
    SIZES[_size] += ["model.scratch.num_kv_heads=8", "model.scratch.head_dim=128"]
FIELDS = (
    ("step", "train_tokens_per_s", "of a training step"),
    ("step", "mfu", "of a training step"),
    ("step", "logprob_diff_mean", "nats, engine and trainer"),
    ("publish", "snapshot_s", "training waits for the copy of a version"),
    ("publish", "wire_s", "a version's bytes, to the last receiver"),
    ("commit", "pause_s", "an engine stands still for a version"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["quickstart", "0.6B"])
    parser.add_argument("--steps", type=int, default=40, help="of the quickstart; a quarter else")
    parser.add_argument("--settings", nargs="*", default=[])
    given = parser.parse_args()
    require_gpu("benchmarks.gpu.launch")
    require_packages("benchmarks.gpu.launch", "ray", "deepspeed", "sglang")
    report = Report("launches on a GPU")
    for size in given.sizes:
        steps = given.steps if size == "quickstart" else max(4, given.steps // 4)
        with tempfile.TemporaryDirectory(prefix="leash-bench-") as folder:
            measure(report, size, Path(folder), [f"trainer.num_steps={steps}", *given.settings])
    report.close()


def measure(report: Report, size: str, folder: Path, settings: list[str]) -> None:
    """Raises RuntimeError, with the end of its output, if the launch fails."""
    command = [sys.executable, "-m", "controller.main", "launch", "experiment=quickstart"]
    command += [f"run.dir={folder}", "run.name=run", "run.panel=false", *SIZES[size], *settings]
    began = time.time()
    child = Child(command, folder / "output")
    try:
        code = child.wait(_LIMIT_S)
    finally:
        child.stop(60)
    output = (folder / "output").read_text()
    if code != 0:  # None: _LIMIT_S was not enough
        raise RuntimeError(f"{size}: {output[-4000:]}")
    report.say(next((line for line in output.splitlines() if "GPU" in line), "no GPU was used"))
    records = read_metrics(folder / "run" / "metrics.jsonl")
    steps = of_kind(records, "step")
    report.figure(f"start_s_{size}", steps[0].t - began, "from the command to the first step's end")
    ends = [step.t for step in steps[2:]]
    between = [after - before for before, after in pairwise(ends)]
    report.figure(f"step_s_{size}", median(between), "between the ends of two steps")
    for kind, field, how in FIELDS:
        if values := series(of_kind(records, kind)[2:], field):
            report.figure(f"{field}_{size}", median(values), how)


if __name__ == "__main__":
    main()
