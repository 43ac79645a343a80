"""Benchmarks of the parts of Leash against alternatives; run by `make bench`."""

from __future__ import annotations

import os
from pathlib import Path

KEY = "k3y-of-the-benchmark"
"""Of every receiver and engine."""

# By this the processes that Ray, a fork server or a stub start find the benchmarks.
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
