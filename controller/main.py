"""The command line: `leash launch | dry-run | status | stop | tune | timeline`, and a run's buffer:
`leash depth | trace | show | quarantine | buffer-dump | buffer-load`.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from configs.load import load_config
from configs.schema import Config
from controller.buffer_commands import add_buffer_verbs, add_run_verb, on_buffer
from controller.ray_environment import prepare_environment
from controller.run_dir import RunDir

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="leash", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, what in (("launch", "train"), ("dry-run", "print config and plan, start nothing")):
        sub = verbs.add_parser(verb, help=what)
        sub.add_argument(
            "--experiment",
            default="quickstart",
            help="a file of configs/experiment (default: %(default)s)",
        )
        sub.add_argument("overrides", nargs="*", help="settings, as buffer.max_staleness=4")
    for verb, what in (
        ("status", "what a run does now and what holds it back"),
        ("stop", "end a run and whatever is left of it"),
    ):
        add_run_verb(verbs, verb, what)
    tune = add_run_verb(verbs, "tune", "change a setting of a running job")
    tune.add_argument("--max-staleness", type=int, required=True)
    timeline = add_run_verb(verbs, "timeline", "draw one version's way to the engines")
    timeline.add_argument("--version", type=int, help="default: the newest that all engines took")
    add_buffer_verbs(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; every expected error is one message on stderr and an exit code."""
    arguments = _parse(argv)
    # SIGINT, too: a shell's background job would ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        print("leash: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ValueError as error:  # bad input of any kind, named by whoever looked at it
        print(f"leash: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (RuntimeError, TimeoutError, OSError) as error:
        print(f"leash: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Settings may stand before and after options, which argparse alone would not take."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not rest:
        return arguments
    arguments.overrides += rest
    return arguments


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.verb in ("launch", "dry-run"):
        config = load_config(arguments.overrides, arguments.experiment)
        return _launch(config) if arguments.verb == "launch" else _dry_run(config)
    return _on_existing_run(arguments)


def _launch(config: Config) -> int:
    prepare_environment(config.cluster)
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed warns that it found nothing else
    from controller.run import launch

    launch(config)
    return 0


def _dry_run(config: Config) -> int:
    from rich.console import Console

    from configs.load import to_yaml
    from controller.preflight import plan_here

    console = Console()
    console.print(to_yaml(config), highlight=False, markup=False)
    console.print(plan_here(config).render())
    return 0


def _on_existing_run(arguments: argparse.Namespace) -> int:
    run_dir = RunDir.find(arguments.dir, arguments.run)
    match arguments.verb:
        case "status":
            from controller.status import print_status

            print_status(run_dir)
        case "stop":
            from controller.stop import stop_run

            stop_run(run_dir)
        case "tune":
            from controller.tune import set_max_staleness

            set_max_staleness(run_dir, arguments.max_staleness)
        case "timeline":
            from controller.timeline import draw_timeline

            os.umask(run_dir.umask)
            print(draw_timeline(run_dir, arguments.version))
        case _:
            on_buffer(run_dir, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
