"""Where the repository lies: tests read its pages and start programs from it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
