"""Benchmarks of the parts of Leash against alternatives; run by `make bench`."""

from __future__ import annotations

import os
from pathlib import Path

KEY = "k3y-of-the-benchmark"
"""The API key of every receiver and engine."""

# By this the processes that Ray, a fork server or a stub start find the benchmarks; what the user
# has there, such as packages in a folder, stays.
_ROOT = str(Path(__file__).resolve().parents[1])
_others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *(path for path in _others if path != _ROOT)])
