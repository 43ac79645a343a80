"""Checks the commands that `make` would run, by its command line and the shell's variables."""

from __future__ import annotations

import os
import re
import shlex
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


def test_cluster_leads_to_its_launcher_and_installs_nothing_here() -> None:
    """The shell's CLUSTER is of something else, and a machine that submits jobs may have no GPU."""
    of_others = {"CLUSTER": "slurm", "HOSTS": "others", "SBATCH": "others"}
    assert "-m controller.main launch" in would_run("launch", **of_others)
    for target in ("launch", "resume", "doctor", "dry-run"):
        words = (target, "CLUSTER=ssh", "HOSTS=a b", "DRY=1", "ARGS=run.dir=/r", "RUN=night")
        line = shlex.split(would_run(*words, **of_others))
        assert {"HOSTS=a b", "DRY=1", "SBATCH="} <= {*line}
        script = line.index("deploy/cluster/ssh.sh")
        assert line[script + 1] == target and line[-1] == "run.dir=/r"
    command = ["make", "--dry-run", "launch", "CLUSTER=slurm"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "deploy/install.sh" not in told.stdout
    told = subprocess.run([*command, "CLUSTER=run"], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode != 0 and "choose slurm, ssh or k8s" in told.stderr


def test_what_a_target_needs_is_asked_for() -> None:
    asked = {"trace": "GROUP", "scale": "ROLLOUT", "buffer-dump": "FILE", "buffer-load": "FILE"}
    for target, name in asked.items():
        command = ["make", "--dry-run", target]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert told.returncode != 0 and f"{name} is missing: say " in told.stderr
        assert f"as make {target} {name}=" in told.stderr


def test_experiment_may_be_the_path_of_a_file_with_blanks() -> None:
    for target in ("launch", "dry-run", "try"):
        words = shlex.split(would_run(target, "EXPERIMENT=~/my runs/mine.yaml"))
        assert words[words.index("--experiment") + 1] == "~/my runs/mine.yaml"
    assert "experiment=my runs/mine.yaml" in shlex.split(
        would_run("resume", "EXPERIMENT=my runs/mine.yaml")
    )


def test_every_target_has_a_line_in_the_help_that_ends() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    targets = " ".join(phony).replace("\\", " ").split()
    command = ["make", "--no-print-directory", "help"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split(maxsplit=1)[1].split(maxsplit=1) for line in told.splitlines())
    assert lines.keys() == set(targets)
    for target, words in lines.items():
        assert words.count("(") == words.count(")") and words.count("[") == words.count("]"), target
        assert words[-1] not in ",;:", target
