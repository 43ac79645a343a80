"""Rotary embeddings by SGLang and by transformers, in a process with SGLang's imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.repository import ROOT

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.5] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
}


@pytest.mark.slow
def test_rotary_embeddings_that_pass_are_the_same_in_both_libraries() -> None:
    """Embeddings that are refused differ."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    yarn = {**YARN, "original_max_position_embeddings": 64, "beta_fast": 16, "truncate": False}
    same = [
        (64, {"rope_type": "default"}, 64),
        (64, {"rope_type": "linear", "factor": 4.0}, 256),
        (256, LLAMA3, 256),
        (64, YARN, 256),
        (64, yarn, 256),
        (256, {**yarn, "mscale": 0.7, "mscale_all_dim": 0.9}, 256),
        (64, LONGROPE, 16),
    ]
    other = [(64, {**YARN, "attention_factor": 1.3}, 256), (64, dynamic, 64)]
    program = [sys.executable, forked.__file__, "tests.support.sglang_rope"]
    done = subprocess.run(
        [*program, json.dumps(same + other)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert max(differences[: len(same)]) < 1e-5
    assert min(differences[len(same) :]) > 0.1
