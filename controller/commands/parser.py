"""The verbs of the command line that look into a run's buffer, also after the run's end."""

from __future__ import annotations

import argparse
from pathlib import Path

from controller.run_dir import RunDir


def add_run_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], verb: str, what: str
) -> argparse.ArgumentParser:
    """A verb on a run that exists."""
    sub = verbs.add_parser(verb, help=what)
    sub.add_argument("--run", help="name of the run (default: the newest)")
    sub.add_argument("--dir", default="runs", help="folder that holds the runs")
    return sub


def add_buffer_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Those of this file."""
    depth = add_run_verb(verbs, "depth", "what the buffer holds, in one line")
    depth.add_argument("--watch", action="store_true", help="draw it again until Ctrl-C")
    trace = add_run_verb(verbs, "trace", "the life of one group")
    trace.add_argument("group", help="id of the group")
    show = add_run_verb(verbs, "show", "what a group says, token by token")
    show.add_argument("group", nargs="?", help="id of the group (default: the last one recorded)")
    quarantine = add_run_verb(verbs, "quarantine", "groups that are kept but not trained")
    choice = quarantine.add_mutually_exclusive_group()
    choice.add_argument("--release", metavar="ID", help="let this group be trained again")
    choice.add_argument("--discard", metavar="ID", help="drop this group")
    dump = add_run_verb(verbs, "buffer-dump", "write the buffer's groups to a file")
    dump.add_argument("file", type=Path, help="the file to write")
    load = add_run_verb(verbs, "buffer-load", "push the groups of such a file")
    load.add_argument("file", type=Path, help="a file that buffer-dump wrote")
    for sub in (depth, trace, show, quarantine, dump, load):
        sub.add_argument("--url", help="Redis of the buffer, where the run's folder does not tell")


def on_buffer(run_dir: RunDir, arguments: argparse.Namespace) -> None:
    """Does what one of them asks for."""
    url: str | None = arguments.url
    match arguments.verb:
        case "depth":
            from controller.commands.depth import print_depth

            print_depth(run_dir, url, arguments.watch)
        case "trace":
            from controller.commands.trace import print_trace

            print_trace(run_dir, arguments.group, url)
        case "show":
            from controller.commands.show import print_group

            print_group(run_dir, arguments.group, url)
        case "quarantine" if arguments.release is not None:
            from controller.commands.quarantine import release_group

            release_group(run_dir, arguments.release, url)
        case "quarantine" if arguments.discard is not None:
            from controller.commands.quarantine import discard_group

            discard_group(run_dir, arguments.discard, url)
        case "quarantine":
            from controller.commands.quarantine import list_quarantine

            list_quarantine(run_dir, url)
        case "buffer-dump":
            from controller.commands.dump import dump_to_file

            dump_to_file(run_dir, arguments.file, url)
        case "buffer-load":
            from controller.commands.dump import load_from_file

            load_from_file(run_dir, arguments.file, url)
