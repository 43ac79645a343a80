"""Lets the tests of real servers share the model that those serve."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for sglang_model
