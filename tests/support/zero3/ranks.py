"""Ranks of ZeRO-3 in processes of their own, as a test sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support import forked
from tests.support.repository import ROOT


@dataclass(kw_only=True, slots=True)
class Outcome:
    results: dict[str, Any]
    weights: dict[str, NDArray[np.float32]]
    export: Path
    staged: tuple[int, dict[str, torch.Tensor]] = (-1, {})


class Ranks:
    """The process that forks the ranks of each scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        with (folder / "ranks.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, forked.__file__, "tests.support.zero3.program", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
                cwd=ROOT,
            )

    def exit_codes(self, scenario: str, num_ranks: int) -> list[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(scenario, num_ranks, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().split()

    def run(self, scenario: str, num_ranks: int) -> Path:
        """The folder of its results."""
        codes = self.exit_codes(scenario, num_ranks)
        output = self.folder / f"{scenario}-{num_ranks}"
        logs = [*self.folder.glob(f"{output.name}-*.log"), self.folder / "ranks.log"]
        assert codes == ["0"] * num_ranks, "\n".join(log.read_text()[-3000:] for log in logs)
        return output

    def outcome(self, scenario: str, num_ranks: int) -> Outcome:
        output = self.run(scenario, num_ranks)
        return Outcome(
            results=json.loads((output / "results.json").read_text()),
            weights=dict(np.load(output / "weights.npz")),
            export=output / "export",
        )

    def close(self) -> None:
        """It ends with its input; a rank that hangs is an error, and ends as well."""
        try:
            self._process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.communicate()
            raise
