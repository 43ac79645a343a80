"""The command line: `leash launch | resume | attach | dry-run | doctor | simulate | try | sandbox |
status | page | stop | report | export | groups | tune | timeline | stacks`, for all runs of a
folder `leash runs | compare`, for a run's buffer `leash depth | trace | show | quarantine |
buffer-dump | buffer-load`, and `leash completion` for the shell.

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
from controller.examples import examples_of
from controller.signals import (
    EXIT_FAILED,
    EXIT_RAY_LOST,
    EXIT_STOPPED,
    Run,
    Stopped,
    StopRequest,
    run_guarded,
)
from host.printable import printable

if TYPE_CHECKING:
    from configs.schema import Config
    from controller.run_dir import RunDir

EXIT_BAD_INPUT = 2
EXIT_NOT_ATTACHED = 3
"""The controller could not attach: its guard starts another, which resumes the run."""
WRITING = ("stop", "report", "timeline", "export", "stacks")
"""Commands that write into the run's folder."""
LOOKING = ("dry-run", "doctor")
"""Commands that look at the cluster before a launch."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leash", description="Start RL post-training, watch it, change it, and go on with it."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def command(verb: str, what: str, function: str) -> argparse.ArgumentParser:
        """A command that calls `function` with its arguments, by their names."""
        sub = verbs.add_parser(
            verb,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog="\n  ".join(["examples:", *examples_of(verb)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(function=function)
        return sub

    def on_settings(verb: str, what: str, function: str) -> argparse.ArgumentParser:
        sub = command(verb, what, function)
        sub.add_argument(
            "--experiment",
            default="quickstart",
            help="a file of configs/experiment, or the path of your own (default: %(default)s)",
        )
        sub.add_argument("overrides", nargs="*", help="settings, as buffer.max_staleness=4")
        return sub

    def on_run(verb: str, what: str, function: str) -> argparse.ArgumentParser:
        """A command on an existing run, whose folder it gets as `run_dir`."""
        sub = command(verb, what, function)
        sub.add_argument("--run", help="name of the run (default: the newest)")
        sub.add_argument("--dir", default="runs", help=WHERE)
        return sub

    def on_buffer(verb: str, what: str, function: str) -> argparse.ArgumentParser:
        """A command that reads the run's buffer, also after the run's end."""
        sub = on_run(verb, what, function)
        sub.add_argument("--url", help="Redis of the buffer, if the run's folder does not name it")
        return sub

    _add_commands_on_settings(on_settings)
    _add_commands_on_runs(on_run)
    _add_commands_on_buffers(on_buffer)
    _add_commands_on_folders(command)
    return parser


WHERE = "folder that holds the runs (default: %(default)s)"
Add = Callable[[str, str, str], argparse.ArgumentParser]


def _add_commands_on_settings(add: Add) -> None:
    add("launch", "train", "")
    dry = add("dry-run", "print config and plan, start nothing", "cluster.dry_run:dry_run")
    dry.add_argument("--gpu", help="kind of the GPUs, as H100 (default: those found)")
    words = "median and 99th percentile of the answers' tokens, for the seconds of a step"
    dry.add_argument("--lengths", help=words)
    words = "what a launch would find on each machine, and what to repair"
    doctor = add("doctor", words, "cluster.doctor:print_doctor")
    doctor.add_argument("--json", action="store_true", dest="as_json", help="print one object")
    words = "how many GPUs for each pool, and which max_staleness, before any is rented"
    simulating = add("simulate", words, "commands.simulate:simulate_run")
    for name, kind, usual, what in (
        ("gpus", int, 16, "GPUs in all"),
        ("gpu", str, "H100", "their kind: A100, H100, H200, H20, B200 or L40S"),
        ("lengths", str, "1000,8000", "median and 99th percentile of the answers' tokens"),
        ("lengths-of", Path, None, "folder of a run whose recorded answers give the lengths"),
        ("prompt", int, 256, "tokens of a prompt"),
        ("parameters", float, None, "of the model (default: as the settings name it)"),
        ("active", float, None, "parameters of a token, in a mixture of experts"),
        ("kv", float, None, "elements that a token adds to the KV cache"),
        ("mfu", float, 0.4, "share of the GPUs' peak that training reaches"),
        ("wire", float, 10.0, "GB/s at which a machine takes new weights"),
        ("switch-s", float, 10.0, "seconds of a step in which a colocated loop changes phases"),
        ("reward-s", float, 0.0, "seconds of a group's reward"),
        ("mtbf-h", float, 0.0, "hours between two failures of one GPU, 0 for none"),
        ("restart-s", float, 300.0, "seconds until an engine or a rank that failed works again"),
        ("price", float, 0.0, "of a GPU-hour"),
        ("steps", int, 40, "steps to simulate"),
        ("plot", Path, None, "file for a picture"),
    ):
        described = what if usual is None else f"{what} (default: %(default)s)"
        simulating.add_argument(f"--{name}", type=kind, default=usual, help=described)
    words = "run a few episodes of a task with any model, without training"
    trying = add("try", words, "commands.try_task:try_task")
    words = "OpenAI-compatible, as http://host/v1 (default: an SGLang server is started here)"
    trying.add_argument("--url", help=words)
    words = "name of the model there; without a URL a folder to serve (default: the launch's)"
    trying.add_argument("--model", help=words)
    trying.add_argument("--key-env", help="environment variable of the key (OPENAI_API_KEY)")
    trying.add_argument("--episodes", type=int, default=4, help="how many (default: %(default)s)")
    words = "run programs for rewards of runs on other machines"
    sandbox = add("sandbox", words, "commands.sandbox:serve_sandbox")
    words = "to listen at (default: %(default)s)"
    sandbox.add_argument("--host", default="127.0.0.1", help=words)
    sandbox.add_argument("--port", type=int, default=8080, help=words)
    sandbox.add_argument("--key-env", help="environment variable of the key (default: no key)")


def _add_commands_on_runs(add: Add) -> None:
    resume = add("resume", "continue a run that has ended, from its last checkpoint", "")
    resume.add_argument("overrides", nargs="*", help="settings to change, as trainer.num_steps=200")
    add("attach", "take over a run whose controller and guard were killed", "")
    words = "the verdict on a run, and what it is doing"
    status = add("status", words, "commands.status:print_status")
    status.add_argument("--json", action="store_true", dest="as_json", help="print one object")
    status.add_argument("--fix", action="store_true", help="run the verdict's command after a yes")
    status.add_argument("--waits", action="store_true", help="print the shares of all stages, too")
    page = add("page", "serve a page of a run for a browser", "page.app:serve_page")
    words = "to listen at (default: %(default)s)"
    page.add_argument("--host", default="127.0.0.1", help=words)
    page.add_argument("--port", type=int, default=8400, help=words)
    add("stop", "end a run and whatever is left of it", "commands.stop:stop_run")
    add("report", "rewrite summary, plots and result of a run", "report.summary:print_report")
    words = "write the model of a checkpoint for transformers"
    export = add("export", words, "commands.export:export_model")
    words = "of which checkpoint, or best: that of trainer.keep_best (default: the newest)"
    export.add_argument("--step", help=words)
    export.add_argument("--to", type=Path, help="folder (default: in the run's)")
    words = "write the recorded groups to a file, or of the best episodes the conversations"
    groups = add("groups", words, "commands.groups:write_groups")
    groups.add_argument("to", type=Path, help="the file to write, *.parquet or *.jsonl")
    words = "only the conversations of so many episodes of each group, those of the highest reward"
    groups.add_argument("--best", type=int, help=words)
    words = "only the conversations of episodes with at least this reward"
    groups.add_argument("--min-reward", type=float, help=words)
    tune = add("tune", "change settings of a running job", "commands.tune:tune")
    tune.add_argument("overrides", nargs="*", help="settings, as buffer.max_staleness=1")
    words = "draw how a version reached the engines"
    timeline = add("timeline", words, "report.timeline:draw_timeline")
    words = "policy version (default: the newest that all engines took)"
    timeline.add_argument("--version", type=int, help=words)
    words = "write the stacks of a run's processes on this machine into its folder"
    add("stacks", words, "commands.stacks:print_stacks")


def _add_commands_on_buffers(add: Add) -> None:
    depth = add("depth", "what the buffer holds, in one line", "commands.depth:print_depth")
    depth.add_argument("--watch", action="store_true", help="redraw it until Ctrl-C")
    trace = add("trace", "the life of one group", "commands.trace:print_trace")
    trace.add_argument("group_id", metavar="group", help="id of the group")
    for sub in (depth, trace):
        sub.add_argument("--json", action="store_true", dest="as_json", help="print one object")
    show = add("show", "what a group says, token by token", "commands.show:print_group")
    words = "id of the group (default: the last recorded)"
    show.add_argument("group_id", metavar="group", nargs="?", help=words)
    words = "groups that are kept but not trained"
    quarantine = add("quarantine", words, "commands.quarantine:quarantine")
    choice = quarantine.add_mutually_exclusive_group()
    choice.add_argument("--release", metavar="ID", help="let this group be trained again")
    choice.add_argument("--discard", metavar="ID", help="drop this group")
    dump = add("buffer-dump", "write the buffer's groups to a file", "commands.dump:dump_to_file")
    dump.add_argument("file", type=Path, help="the file to write")
    load = add("buffer-load", "push the groups of a dump", "commands.dump:load_from_file")
    load.add_argument("file", type=Path, help="a file that buffer-dump wrote")


def _add_commands_on_folders(add: Add) -> None:
    """Commands on no single run, and `completion`."""
    runs = add("runs", "all runs of a folder, with verdicts and figures", "commands.runs:list_runs")
    words = "what differs between two runs, and their curves over each other"
    compare = add("compare", words, "report.compare:compare_runs")
    for name in ("a", "b"):
        compare.add_argument(name, help="name of a run, or its folder's whole path")
    words = "file for the picture (default: compare-A-B.png in the folder of the runs)"
    compare.add_argument("--plot", type=Path, help=words)
    for sub in (runs, compare):
        sub.add_argument("--dir", default="runs", help=WHERE)
        sub.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    words = "print what completes commands, options, runs and settings in a shell"
    add("completion", words, "").add_argument("shell", choices=("bash", "zsh"), help="which shell")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an expected error prints one message on stderr and sets the exit code."""
    # SIGINT too: a shell's background job would ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no check mark gets a "?"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.update(asked_directly(["127.0.0.1", "::1", "localhost"]))
    words = sys.argv[1:] if argv is None else argv
    return _reporting(lambda: _dispatch(_parse(words), words))


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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Accepts settings before and after options, which argparse alone rejects."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not rest:
        return arguments
    arguments.overrides += rest
    return arguments


def _dispatch(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    if arguments.verb in ("launch", "resume", "attach"):
        from controller.forked import launcher_descriptor, run_forked

        if arguments.verb != "attach":
            code = run_forked(words, lambda: _config_of(arguments))
            if code is not None:
                return code
        return run_guarded(
            lambda stop, tell: _reporting(lambda: _launch(arguments, stop, tell)),
            _Finish(),
            launcher_descriptor(),
        )
    if arguments.verb == "completion":
        from controller.completion import completion

        print(completion(_parser(), arguments.shell))
        return 0
    given = vars(arguments)
    verb, function = given.pop("verb"), given.pop("function")
    if "run" in given:
        from controller.run_dir import RunDir

        given["run_dir"] = run_dir = RunDir.find(given.pop("dir"), given.pop("run"))
        if verb in WRITING:
            os.umask(run_dir.umask)
    if verb in LOOKING:
        from configs.load import load_config
        from controller.ray_environment import prepare_environment

        given["config"] = config = load_config(given.pop("overrides"), given.pop("experiment"))
        if config.cluster.ray_address is not None:
            prepare_environment(config.cluster)
    if verb in ("try", "export"):
        _prepare_deepspeed()
    module, _, name = function.partition(":")
    getattr(import_module(f"controller.{module}"), name)(**given)
    return 0


def _config_of(arguments: argparse.Namespace) -> Config:
    from configs.load import load_config
    from controller.run_dir import RunDir

    if arguments.verb == "launch":
        return load_config(arguments.overrides, arguments.experiment)
    return RunDir.find(arguments.dir, arguments.run).read_config(arguments.overrides)


def _launch(
    arguments: argparse.Namespace, stop: StopRequest, announce_folder: Callable[[str], None]
) -> int:
    with contextlib.ExitStack() as servers:
        with stop.interrupting():  # nothing has been started yet
            from buffer.redis.address import password_of_environment
            from controller.ray_environment import prepare_environment
            from controller.run_dir import RunDir
            from controller.start.fork_servers import fork_servers
            from controller.start.resume import find_resumption

            if arguments.verb == "launch":
                config = _config_of(arguments)
            elif arguments.verb == "attach":
                run_dir = RunDir.find(arguments.dir, arguments.run)
                run_dir.check_alone()
                announce_folder(run_dir.run_id)
                config = run_dir.read_config()
            else:
                run_dir = RunDir.find(arguments.dir, arguments.run)
                # Before anything is ended: a typo must not cost a run whose processes go on. Until
                # those have ended they may complete another checkpoint: `resume` looks again.
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
            attach(run_dir, config, attachment, stop)
        else:
            resume(run_dir, config, arguments.overrides, stop, announce_folder)
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
    """The guard's next action when the controller has ended.

    A controller that died before its run is followed by another, up to run.max_restarts times. The
    next one attaches to what goes on; if it cannot, or if Ray has died, one resumes the run.

    finish = _Finish()
    finish("runs/night", False, -9)     # killed: returns the function of the next controller
    finish("runs/night", False, 0)      # the run has ended: returns 0, the exit code
    """

    _num_restarts = 0
    _run_dir: RunDir | None = None

    def __call__(self, folder: str | None, was_asked: bool, exit_code: int) -> int | Run:
        from controller.run_dir import RunDir

        if folder is not None:
            self._run_dir = RunDir(path=Path(folder))
        run_dir = self._run_dir
        if run_dir is None or not _is_orphaned(run_dir):
            return exit_code if exit_code >= 0 else EXIT_FAILED
        from controller.commands.stop import clear_up

        os.umask(run_dir.umask)
        was_asked = was_asked or exit_code == EXIT_STOPPED  # by `make stop`
        died = {EXIT_RAY_LOST: "Ray died", EXIT_STOPPED: "the controller stopped early"}.get(
            exit_code, f"the controller died (exit code {exit_code})"
        )
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
        from controller.start.ray_keeper import RayKeeper

        can_resume = run_dir.resume_command is not None
        if exit_code == EXIT_NOT_ATTACHED:
            return "resume" if can_resume else None
        if self._num_restarts >= run_dir.read_config().run.max_restarts:
            return None
        if exit_code != EXIT_RAY_LOST and RayKeeper.find(run_dir) is not None:
            return "attach"
        return "resume" if can_resume else None


def _is_orphaned(run_dir: RunDir) -> bool:
    """Returns whether the run goes on without any controller."""
    with run_dir.ending():  # `make stop` may be killing the controller
        record = run_dir.read_record()
        has_controller = record.is_alive and record.pid != os.getpid()
        return record.state == "running" and not has_controller


if __name__ == "__main__":
    sys.exit(main())
