"""The command line: `leash launch | resume | attach | dry-run | try | sandbox | status | stop |
report | export | tune | timeline`, and for a run's buffer `leash depth | trace | show |
quarantine | buffer-dump | buffer-load`.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 stopped by a signal.

Imports little before `main` installs signal handlers, so that an early Ctrl-C prints no traceback.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # during the imports: Python's own handler prints a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from configs.environment import asked_directly
from configs.printable import printable
from controller.signals import (
    EXIT_FAILED,
    EXIT_RAY_LOST,
    EXIT_STOPPED,
    Run,
    Stopped,
    StopRequest,
    run_guarded,
)

if TYPE_CHECKING:
    from configs.schema import Config
    from controller.run_dir import RunDir

EXIT_BAD_INPUT = 2
EXIT_NOT_ATTACHED = 3
"""Of a controller whose guard then starts another, which resumes the run."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leash", description="Start RL post-training, watch it, change it, and go on with it."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, what in (
        ("launch", "train"),
        ("dry-run", "print config and plan, start nothing"),
        ("try", "run a few episodes of a task with any model, without training"),
        ("sandbox", "run programs for rewards of runs on other machines"),
    ):
        sub = verbs.add_parser(verb, help=what)
        sub.add_argument(
            "--experiment",
            default="quickstart",
            help="a file of configs/experiment (default: %(default)s)",
        )
        sub.add_argument("overrides", nargs="*", help="settings, as buffer.max_staleness=4")

    _add_options_of_try(verbs.choices["try"])
    _add_options_of_sandbox(verbs.choices["sandbox"])

    def on_run(verb: str, what: str, function: str) -> argparse.ArgumentParser:
        """A command on an existing run; `function` gets its folder and the other arguments."""
        sub = verbs.add_parser(verb, help=what)
        sub.add_argument("--run", help="name of the run (default: the newest)")
        sub.add_argument("--dir", default="runs", help="folder that holds the runs")
        sub.set_defaults(function=function)
        return sub

    def on_buffer(verb: str, what: str, function: str) -> argparse.ArgumentParser:
        """A command that reads the run's buffer, also after the run's end."""
        sub = on_run(verb, what, function)
        sub.add_argument("--url", help="Redis of the buffer, if the run's folder does not name it")
        return sub

    resume = on_run("resume", "continue a run that has ended, from its last checkpoint", "")
    resume.add_argument("overrides", nargs="*", help="settings to change, as trainer.num_steps=200")
    on_run("attach", "be the controller of a run whose own one was killed", "")
    on_run("status", "what a run is doing, and its bottleneck", "commands.status:print_status")
    on_run("stop", "end a run and whatever is left of it", "commands.stop:stop_run")
    on_run("report", "rewrite summary, plots and result of a run", "report.summary:print_report")
    export = on_run(
        "export", "write the model of a checkpoint for transformers", "commands.export:export_model"
    )
    export.add_argument("--step", type=int, help="default: the newest checkpoint's")
    export.add_argument("--to", type=Path, help="folder (default: in the run's)")
    tune = on_run("tune", "change settings of a running job", "commands.tune:tune")
    tune.add_argument("overrides", nargs="*", help="settings, as buffer.max_staleness=1")
    timeline = on_run(
        "timeline", "draw how a version reached the engines", "report.timeline:draw_timeline"
    )
    timeline.add_argument("--version", type=int, help="default: the newest that all engines took")
    depth = on_buffer("depth", "what the buffer holds, in one line", "commands.depth:print_depth")
    depth.add_argument("--watch", action="store_true", help="redraw it until Ctrl-C")
    trace = on_buffer("trace", "the life of one group", "commands.trace:print_trace")
    trace.add_argument("group_id", metavar="group", help="id of the group")
    show = on_buffer("show", "what a group says, token by token", "commands.show:print_group")
    show.add_argument(
        "group_id", metavar="group", nargs="?", help="id of the group (default: the last recorded)"
    )
    quarantine = on_buffer(
        "quarantine", "groups that are kept but not trained", "commands.quarantine:quarantine"
    )
    choice = quarantine.add_mutually_exclusive_group()
    choice.add_argument("--release", metavar="ID", help="let this group be trained again")
    choice.add_argument("--discard", metavar="ID", help="drop this group")
    dump = on_buffer(
        "buffer-dump", "write the buffer's groups to a file", "commands.dump:dump_to_file"
    )
    dump.add_argument("file", type=Path, help="the file to write")
    load = on_buffer("buffer-load", "push the groups of a dump", "commands.dump:load_from_file")
    load.add_argument("file", type=Path, help="a file that buffer-dump wrote")
    return parser


def _add_options_of_try(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="OpenAI-compatible, as http://host/v1 (default: an SGLang server is started here)",
    )
    parser.add_argument(
        "--model",
        help="name of the model there; without a URL a folder to serve (default: the launch's)",
    )
    parser.add_argument("--key-env", help="environment variable of the key (OPENAI_API_KEY)")
    parser.add_argument("--episodes", type=int, default=4, help="how many (default: %(default)s)")


def _add_options_of_sandbox(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="(default: %(default)s)")
    parser.add_argument("--key-env", help="environment variable of the key (default: no key)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an expected error prints one message on stderr and sets the exit code."""
    # SIGINT too: a shell's background job would ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no check mark gets a "?"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.update(asked_directly(["127.0.0.1", "::1", "localhost"]))
    return _reporting(lambda: _dispatch(_parse(argv)))


def _reporting(what: Callable[[], int]) -> int:
    try:
        return what()
    except (KeyboardInterrupt, Stopped):
        print("leash: stopped", file=sys.stderr)
        return EXIT_STOPPED
    except (ValueError, RuntimeError, OSError) as error:
        # It may quote a worker's log, and that the output of a model.
        print(f"leash: {printable(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ValueError) else EXIT_FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Accepts settings before and after options, which argparse alone rejects."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not rest:
        return arguments
    arguments.overrides += rest
    return arguments


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.verb in ("launch", "resume", "attach"):
        return run_guarded(
            lambda stop, tell: _reporting(lambda: _launch(arguments, stop, tell)), _Finish()
        )
    if arguments.verb == "dry-run":
        from configs.load import load_config

        return _dry_run(load_config(arguments.overrides, arguments.experiment))
    if arguments.verb == "try":
        _prepare_deepspeed()
        from controller.commands.try_task import try_task

        try_task(
            arguments.overrides,
            arguments.experiment,
            url=arguments.url,
            model=arguments.model,
            key_env=arguments.key_env,
            num_episodes=arguments.episodes,
        )
        return 0
    if arguments.verb == "sandbox":
        from controller.commands.sandbox import serve_sandbox

        serve_sandbox(
            arguments.overrides,
            arguments.experiment,
            host=arguments.host,
            port=arguments.port,
            key_env=arguments.key_env,
        )
        return 0
    return _on_existing_run(arguments)


def _launch(
    arguments: argparse.Namespace, stop: StopRequest, announce_folder: Callable[[str], None]
) -> int:
    with contextlib.ExitStack() as servers:
        return _launch_with(servers, arguments, stop, announce_folder)


def _launch_with(
    servers: contextlib.ExitStack,
    arguments: argparse.Namespace,
    stop: StopRequest,
    announce_folder: Callable[[str], None],
) -> int:
    with stop.interrupting():  # nothing has been started yet
        from buffer.redis.address import password_of_environment
        from configs.load import load_config, read_config
        from controller.ray_environment import prepare_environment
        from controller.run_dir import RunDir
        from controller.start.fork_servers import fork_servers
        from controller.start.resume import find_resumption

        if arguments.verb == "launch":
            config = load_config(arguments.overrides, arguments.experiment)
        elif arguments.verb == "attach":
            run_dir = RunDir.find(arguments.dir, arguments.run)
            run_dir.check_alone()
            announce_folder(run_dir.run_id)
            config = read_config(run_dir.path / "config.yaml")
        else:
            run_dir = RunDir.find(arguments.dir, arguments.run)
            # Before anything is ended: a typo must not cost a run whose processes go on. The ranks
            # may complete another checkpoint until they have ended.
            config = find_resumption(run_dir, arguments.overrides).config
            run_dir.check_ended()
            _end_dead(run_dir)
        password_of_environment()  # removes it: no child process may inherit it
        prepare_environment(config.cluster)
        if arguments.verb != "attach" and config.cluster.ray_address is None:
            servers.enter_context(fork_servers())
        _prepare_deepspeed()
        from controller.run import attach, launch, resume
        from controller.start.attach import NotAttachableError, find_attachment

        if arguments.verb == "attach":
            try:
                attachment = find_attachment(run_dir, config)
            except NotAttachableError as error:
                print(f"leash: {printable(str(error))}", file=sys.stderr)
                return EXIT_NOT_ATTACHED
    if arguments.verb == "launch":
        launch(config, stop, announce_folder)
    elif arguments.verb == "attach":
        attach(run_dir, attachment, stop)
    else:
        resume(run_dir, arguments.overrides, stop, announce_folder)
    return 0


def _prepare_deepspeed() -> None:
    """Call it before DeepSpeed is imported, by whatever library."""
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # or it warns that it found nothing else


def _end_dead(run_dir: RunDir) -> None:
    """End what is left of a run whose controller was killed, alone or together with its guard."""
    from controller.commands.stop import clear_up, end_left_processes

    record = run_dir.read_record()
    if record.state == "running" and record.is_of_parent:
        end_left_processes(run_dir)
    elif record.state == "running" and not record.is_alive:
        clear_up(run_dir, "failed", "its controller was killed")


class _Finish:
    """What the guard does when the controller has ended.

    One that died before its run had ended, killed by a signal or by a library that exits the
    process, is followed by another, up to run.max_restarts times. That attaches to what goes on;
    if it cannot, a further one resumes the run. So does one that follows the death of Ray.
    """

    def __init__(self) -> None:
        self._num_restarts = 0
        self._run_dir: RunDir | None = None
        """Of the controllers that have ended so far."""

    def __call__(self, folder: str | None, was_asked: bool, exit_code: int) -> int | Run:
        from controller.run_dir import RunDir

        if folder is not None:
            self._run_dir = RunDir(path=Path(folder))
        run_dir = self._run_dir
        if run_dir is None or not _is_orphaned(run_dir):
            return exit_code if exit_code >= 0 else EXIT_FAILED
        from controller.commands.stop import clear_up

        os.umask(run_dir.umask)
        is_ray = exit_code == EXIT_RAY_LOST
        died = "Ray died" if is_ray else f"the controller died (exit code {exit_code})"
        verb = None if was_asked else self._next_verb(run_dir, exit_code)
        if verb is not None:
            run_dir.adopt()
            if exit_code != EXIT_NOT_ATTACHED:
                self._num_restarts += 1
                print(f"leash: {died}; another one goes on", file=sys.stderr, flush=True)
            again = _parse([verb, "--run", run_dir.name, "--dir", str(run_dir.path.parent)])
            return lambda stop, tell: _reporting(lambda: _launch(again, stop, tell))
        print(f"leash: {died}; ending what it left", file=sys.stderr)
        clear_up(run_dir, "stopped" if was_asked else "failed", died)
        return EXIT_STOPPED if was_asked else EXIT_FAILED

    def _next_verb(self, run_dir: RunDir, exit_code: int) -> str | None:
        from configs.load import read_config
        from controller.start.ray_keeper import RayKeeper

        can_resume = run_dir.resume_command is not None
        if exit_code == EXIT_NOT_ATTACHED:
            return "resume" if can_resume else None
        if self._num_restarts >= read_config(run_dir.path / "config.yaml").run.max_restarts:
            return None
        if exit_code != EXIT_RAY_LOST and RayKeeper.find(run_dir) is not None:
            return "attach"
        return "resume" if can_resume else None


def _is_orphaned(run_dir: RunDir) -> bool:
    """Whether the run has not ended, and nobody has resumed it since its controller died."""
    with run_dir.ending():  # `make stop` may be killing the controller
        record = run_dir.read_record()
        has_controller = record.is_alive and record.pid != os.getpid()
        return record.state == "running" and not has_controller


def _dry_run(config: Config) -> int:
    from rich.console import Console

    from configs.load import to_yaml
    from controller.start.preflight import check_plan, plan_here

    skipped = check_plan(config)
    console = Console()
    console.print(to_yaml(config), highlight=False, markup=False)
    console.print(plan_here(config).render())
    if skipped:
        note = f"Not checked before a launch: {', '.join(skipped)}"
        console.print(note, highlight=False, markup=False)
    return 0


def _on_existing_run(arguments: argparse.Namespace) -> int:
    from controller.run_dir import RunDir

    run_dir = RunDir.find(arguments.dir, arguments.run)
    if arguments.verb in (
        "stop",
        "report",
        "timeline",
        "export",
    ):  # they write into the run's folder
        os.umask(run_dir.umask)
    module, _, function = arguments.function.partition(":")
    common = ("verb", "run", "dir", "function")
    further = {name: value for name, value in vars(arguments).items() if name not in common}
    getattr(import_module(f"controller.{module}"), function)(run_dir, **further)
    return 0


if __name__ == "__main__":
    sys.exit(main())
