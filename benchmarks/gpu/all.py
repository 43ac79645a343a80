"""Runs the scripts of this folder in the order of worth, and ends with one RESULT.

    python -m benchmarks.gpu.all [--limit-s 600] [--only weights_commit mfu]

Each is a process of its own, so that one that fails or hangs costs only its own figures. The last
line has the figures of each under its name, and in `not_run` why there are none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.gpu.device import NOT_RUN, require_gpu

SCRIPTS: dict[str, Sequence[str]] = {
    # It also compiles SGLang's kernels, which every later engine finds.
    "weights_commit": ["benchmarks.gpu.weights_commit"],
    "weights_nccl": ["benchmarks.gpu.weights_nccl"],
    "mfu": ["benchmarks.gpu.mfu"],
    "packing": ["benchmarks.packing"],
    "head": ["benchmarks.gpu.head"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--limit-s", type=float, default=600.0, help="of each script")
    given = parser.parse_args(arguments)
    require_gpu("benchmarks.gpu.all")
    results: dict[str, object] = {}
    not_run: dict[str, str] = {}
    for name in given.only:
        print(f"== {name}", flush=True)
        outcome = run([sys.executable, "-m", *SCRIPTS[name]], given.limit_s)
        if isinstance(outcome, str):
            not_run[name] = outcome
            print(f"{name}: {outcome}", flush=True)
        else:
            results[name] = outcome
    print("RESULT " + json.dumps({**results, "not_run": not_run}))
    return 0 if results else NOT_RUN


def run(command: Sequence[str], limit_s: float) -> dict[str, object] | str:
    """The figures of a script, whose output is shown; or why there are none."""
    began = time.monotonic()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        for so_far in (error.stdout, error.stderr):
            print(so_far.decode() if isinstance(so_far, bytes) else so_far or "", flush=True)
        return f"was not done within --limit-s={limit_s:g}"
    *shown, last = ended.stdout.splitlines() or [""]
    print("\n".join(shown), flush=True)
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if ended.returncode == 0 and last.startswith("RESULT "):
        figures: dict[str, object] = json.loads(last.removeprefix("RESULT "))
        return figures
    print(ended.stderr, file=sys.stderr, flush=True)
    words = ended.stderr.strip().splitlines() or [last]
    return f"exit code {ended.returncode}: {words[-1]}"


if __name__ == "__main__":
    sys.exit(main())
