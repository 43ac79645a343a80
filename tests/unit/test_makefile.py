"""What `make` would run, for what its command line and the shell's variables say."""

from __future__ import annotations

import os
import subprocess

from tests.support.repository import ROOT


def would_run(target: str, *words: str, **variables: str) -> str:
    """The last line of what `make` would do."""
    environment = {**os.environ, **variables}
    command = ["make", "--dry-run", "--no-print-directory", target, *words]
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip().splitlines()[-1]


def test_variables_of_the_shell_do_not_choose_the_run_or_the_address() -> None:
    """Compilers' set-ups export HOST, notebooks PORT, CI systems URL."""
    of_others = ("RUN", "DIR", "URL", "HOST", "PORT", "MODEL", "TASK", "EXPERIMENT", "ARGS", "TO")
    variables = dict.fromkeys(of_others, "others")
    for target in ("stop", "depth", "sandbox", "launch", "resume", "try", "export"):
        assert "others" not in would_run(target, **variables), target
    assert would_run("stop", "RUN=mine", **variables).split()[-2:] == ["--run", "mine"]
    line = would_run("depth", "URL=redis://h:1/0", "DIR=runs", **variables)
    assert line.split()[-4:] == ["--dir", "runs", "--url", "'redis://h:1/0'"]


def test_address_of_the_ray_cluster_may_be_a_variable_of_the_shell() -> None:
    assert "cluster.ray_address=auto" in would_run("launch", RAY_ADDRESS="auto")


def test_what_a_target_needs_is_asked_for() -> None:
    for target, name in (("trace", "GROUP"), ("scale", "ROLLOUT")):
        command = ["make", "--dry-run", target]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert told.returncode != 0 and f"{name} is missing" in told.stderr
