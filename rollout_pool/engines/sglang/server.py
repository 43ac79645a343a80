"""The SGLang server process: `python -m rollout_pool.engines.sglang.server <folder> <arguments>`.

Standard input carries one line, the API key, and nothing more. The server lives exactly as long as
that pipe: its parent holds the other end, so a killed parent never leaves a server behind. SIGTERM
does nothing: a machine that is taken away sends it to all processes, and the parent, which gets it
too, lets the requests end first. (SGLang's scheduler would die at once, and the server would wait
for requests that it never ends while it is paused.)

With CUDA, which does not survive a fork, SGLang spawns its scheduler and detokenizer: each imports
this module and sglang again. Without CUDA they are forked from this process after the imports.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.util import register_after_fork
from typing import Any

if __name__ == "__main__":
    # Before any import starts a thread: threads and children inherit it. Not ignored but blocked,
    # since SGLang installs handlers of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

import psutil
import torch

if not torch.cuda.is_available():
    from rollout_pool.engines.sglang import cpu_stubs

    cpu_stubs.install()

from processes import tree
from processes.die_with_parent import die_with_parent
from processes.stacks import dump_on_signal
from rollout_pool.engines.sglang import adapter_versions, generate_route

ENABLE_LORA = "--enable-lora"
KILL_TIMEOUT_S = 5.0
NEW_CHILDREN_S = 0.5
"""Interval at which new child processes are looked for."""

if __name__ in ("__main__", "__mp_main__"):  # also in what SGLang spawns
    dump_on_signal()

_ready = list[tuple[BaseProcess, str]]()
"""Children whose server has just become ready, by SGLang's names."""
_ending = threading.Lock()
"""Held for good by the thread that ends this process."""


def main(argv: list[str]) -> None:
    """Run the server until standard input ends or the server fails."""
    if not torch.cuda.is_available():
        _fork_children()
        cpu_stubs.replace_kernels()
    if ENABLE_LORA in argv:
        adapter_versions.install()
    generate_route.install()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import watchdog

    socket_folder, arguments = argv[0], argv[1:]
    # SGLang makes its sockets with `tempfile` and never removes them. Only this process makes them,
    # so TMPDIR, under which compilers keep their caches, stays as it is for the children.
    tempfile.tempdir = socket_folder
    key = _read_line(sys.stdin.fileno())
    threading.Thread(target=_end_with_parent, args=(socket_folder,), daemon=True).start()
    threading.Thread(target=_end_with_child, args=(socket_folder,), daemon=True).start()
    # SGLang's own watcher would kill this process before it has cleaned up and logged which died.
    watchdog.SubprocessWatchdog.start = lambda own: _ready.extend(
        zip(own._processes, own._names, strict=True)
    )
    try:
        server_args = prepare_server_args(arguments)
        server_args.api_key = key
        if server_args.dist_init_addr is None:
            # A TCPStore, where the ranks would meet, listens on every interface and answers every
            # connection.
            place = f"file://{socket_folder}/rendezvous"
            os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", place)
        _keep_out_of_logs(key)  # SGLang logs all its settings
        run_server(server_args)
    finally:
        _ending.acquire()
        _leave_nothing(socket_folder)


def _fork_children() -> None:
    """Fork scheduler and detokenizer, which saves each 15 s of CPU and 200 MB for its imports."""
    import sglang.srt.managers.detokenizer_manager  # noqa: F401  (imported for the children)
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.pool_host import common as pools
    from sglang.srt.utils import common

    # It would run lscpu at each load, and wait for it longer than a small model's load takes.
    common.parse_lscpu_topology = cache(common.parse_lscpu_topology)
    # Where the experts of tokens are kept: it would be registered with CUDA.
    pools.ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, *, dtype, **_: torch.empty(shape, dtype=dtype)
    _sleep_when_idle(Scheduler)
    _compute_for_inference(Scheduler)
    multiprocessing.set_start_method("fork", force=True)
    # SGLang sets spawn when it starts.
    multiprocessing.set_start_method = lambda *_args, **_kwargs: None
    register_after_fork(_begin_child, _begin_child)


def _sleep_when_idle(of: Any) -> None:
    """`of`: SGLang's class of schedulers."""
    sleep, record = of.maybe_sleep_on_idle, of._record_scheduler_state_for_paused_engine

    def sleep_unless_asked(scheduler: Any) -> None:
        # A flush that waits for the last request's end (`SGLangClient.drain`) is answered in the
        # next step: SGLang would first sleep for a second, or until something else arrives.
        if scheduler.flush_wrapper._pending is None:
            sleep(scheduler)

    def record_and_sleep(scheduler: Any) -> None:
        record(scheduler)
        sleep_unless_asked(scheduler)

    of.maybe_sleep_on_idle = sleep_unless_asked
    # Called in each turn of a paused scheduler, which would otherwise keep a core busy looking for
    # the pause's end.
    of._record_scheduler_state_for_paused_engine = record_and_sleep


def _compute_for_inference(of: Any) -> None:
    """`of`: SGLang's class of schedulers. Its own switch is a variable that its import reads, and
    fork servers import it before a run's variables are known."""
    of.event_loop_normal = torch.inference_mode()(of.event_loop_normal)


def _begin_child(_: object) -> None:
    """Runs first in a forked child."""
    tempfile.tempdir = None
    # SGLang does so too, but later, and without checking that the parent is still alive.
    die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)


def _read_line(descriptor: int) -> str:
    """Reads byte by byte: a buffered reader would swallow what follows the line."""
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"\n", b""):
        line += byte
    return line.decode()


def _keep_out_of_logs(secret: str) -> None:
    make_record = logging.getLogRecordFactory()

    def make_clean_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if secret in (message := record.getMessage()):
            record.msg, record.args = message.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(make_clean_record)


def _end_with_parent(socket_folder: str) -> None:
    while os.read(sys.stdin.fileno(), 4096):  # nothing is ever sent
        continue
    _end(socket_folder)


def _end_with_child(socket_folder: str) -> None:
    """Ends this process when a scheduler or detokenizer has died, after logging which."""
    children: dict[BaseProcess, str] = {}
    while True:
        while _ready:  # one that has died since the last look is no active child any more
            child, name = _ready.pop()
            children.setdefault(child, f"sglang::{name} (process {child.pid})")
        for child in multiprocessing.active_children():
            children[child] = _title(child, children.get(child))
        sentinels = [child.sentinel for child in children]
        over = multiprocessing.connection.wait(sentinels, NEW_CHILDREN_S)
        for child in [child for child in children if child.sentinel in over]:
            child.join(KILL_TIMEOUT_S)
            title = children.pop(child)
            if child.exitcode != 0:  # 0: it is done, or has reported its error
                _end(socket_folder, f"{title} died (exit code {child.exitcode})")


def _title(child: BaseProcess, known: str | None) -> str:
    """How the process calls itself now: SGLang changes it in the running process."""
    try:
        process = psutil.Process(child.pid)
        name = process.name()
        # The kernel keeps 15 characters of a name; the rest is lost with the process.
        is_dead = process.status() == psutil.STATUS_ZOMBIE or not process.cmdline()
        if not (is_dead and known):
            return f"{name} (process {child.pid})"
    except psutil.NoSuchProcess:
        pass
    return known or f"process {child.pid}"


def _end(socket_folder: str, failure: str | None = None) -> None:
    _ending.acquire()  # never released: the first thread ends this process
    if failure is not None:
        print(failure, file=sys.stderr, flush=True)
    _leave_nothing(socket_folder)
    os._exit(0 if failure is None else 1)


def _leave_nothing(socket_folder: str) -> None:
    pid = os.getpid()
    # Files first: SGLang kills this process as soon as one of its children has ended.
    for path in tree.shared_memory_files(tree.family(pid)):
        if not tree.is_semaphore(path):  # Python's resource tracker removes them
            path.unlink(missing_ok=True)
    shutil.rmtree(socket_folder, ignore_errors=True)
    tree.kill(tree.descendants(pid), KILL_TIMEOUT_S)


if __name__ == "__main__":
    main(sys.argv[1:])
