"""Runs the scripts of this folder in the order of worth, and ends with one RESULT.

    python -m benchmarks.gpu.all [--limit-s 900] [--only weights_commit mfu]

Each is a process of its own, so that one that fails or hangs costs only its own figures. The last
line has the figures of each under its name, and in `not_run` why there are none; the exit code is 2
then. Without a GPU only packing runs, in its short form on the CPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.gpu.device import NOT_RUN

CLEAR_UP_S = 30.0
"""Time for a script to end its processes and to remove what it has in /dev/shm."""
SCRIPTS: dict[str, Sequence[str]] = {
    # It also compiles SGLang's kernels, which every later engine finds.
    "weights_commit": ["benchmarks.gpu.weights_commit"],
    "weights_nccl": ["benchmarks.gpu.weights_nccl"],
    "launch": ["benchmarks.gpu.launch"],
    "mfu": ["benchmarks.gpu.mfu"],
    "packing": ["benchmarks.training.packing"],
    "head": ["benchmarks.gpu.head"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--limit-s", type=float, default=900.0, help="of each script")
    given = parser.parse_args(arguments)
    on_cpu = [] if torch.cuda.is_available() else ["--short"]
    results: dict[str, object] = {}
    not_run: dict[str, str] = {}
    for name in given.only:
        print(f"== {name}", flush=True)
        form = on_cpu if name == "packing" else []
        outcome = run([sys.executable, "-m", *SCRIPTS[name], *form], given.limit_s)
        if isinstance(outcome, str):
            not_run[name] = outcome
            print(f"{name}: {outcome}", flush=True)
        else:
            results[name] = outcome
    print("RESULT " + json.dumps({**results, "not_run": not_run}))
    return NOT_RUN if not_run else 0


def run(command: Sequence[str], limit_s: float) -> dict[str, object] | str:
    """The figures of a script, whose output is shown; or why there are none."""
    began = time.monotonic()
    script = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        output, errors = script.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(*_interrupt(script), sep="\n", flush=True)
        return f"was not done within --limit-s={limit_s:g}"
    *shown, last = output.splitlines() or [""]
    print("\n".join(shown), flush=True)
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if script.returncode == 0 and last.startswith("RESULT "):
        figures: dict[str, object] = json.loads(last.removeprefix("RESULT "))
        return figures
    print(errors, file=sys.stderr, flush=True)
    words = errors.strip().splitlines() or [last]
    return f"exit code {script.returncode}: {words[-1]}"


def _interrupt(script: subprocess.Popen[str]) -> tuple[str, str]:
    """As Ctrl-C does; returns its output and errors."""
    script.send_signal(signal.SIGINT)
    try:
        return script.communicate(timeout=CLEAR_UP_S)
    except subprocess.TimeoutExpired:
        script.kill()
        return script.communicate()


if __name__ == "__main__":
    sys.exit(main())
