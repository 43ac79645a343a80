"""The child side of the sandbox: locks itself in, layer by layer, then runs the program.

    keeper      own namespaces, own root          told by the parent what to run; waits, and says
      │ fork                                      how the program ended (a pipe that it alone has)
    program     own user, no capabilities, limits, Landlock, filter of system calls ──► exec(code)
    statements  the same again, a process of their own, if a program is tested by any

Started by `rollout_pool.sandbox.run` with no environment and nothing but the standard library. Each
layer is used where the kernel allows; without the filter, or without a layer that keeps files
away, nothing is run.
"""

from __future__ import annotations

import _thread
import os
import resource
import sys

from rollout_pool.sandbox import kernel, landlock, seccomp, view
from rollout_pool.sandbox.program import Notes, run, run_tests
from rollout_pool.sandbox.request import Request
from rollout_pool.sandbox.statements import GONE, Pipes

_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
_LARGEST_STACK, _SMALLEST_STACK = 8 * 2**20, 256 * 2**10
_FIRST_USER = 0x60000000
"""User ids from here on belong to nobody; a program's is this plus its keeper's process id."""


class Unsafe(Exception):
    """The layers that this kernel allows are too few; the message says which is missing."""


def main() -> None:
    """`argv[2:]`: descriptors of the request, of the notes, of the ending, and of statements if
    the program is tested by any."""
    request_fd, notes_fd, ending_fd, *statements_fds = (int(text) for text in sys.argv[2:])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)
    with open(request_fd, "rb") as file:
        request = Request.decode(file.read())
    os.umask(0o022)
    notes = Notes(notes_fd)
    was_root = os.geteuid() == 0
    layers = _separate(request)
    if os.getppid() != request.parent_pid:
        return  # it died before its death could reach us
    alive_read, alive_write = os.pipe()
    os.set_blocking(alive_read, False)
    pipes = Pipes() if statements_fds else None
    if not (program := os.fork()):
        for descriptor in (alive_write, ending_fd, *statements_fds):
            os.close(descriptor)
        channel = pipes.of("program") if pipes else None
        try:
            layers += _lock_in(request, layers, was_root=was_root, alive=alive_read)
        except (Unsafe, OSError) as error:
            notes.write("unsafe", str(error))
            os._exit(1)
        notes.write("layers", ",".join(layers))
        run(request.code, notes, channel)
        return
    tests = None
    if pipes:
        tests = _fork()
        if tests == 0:
            for descriptor in (alive_write, ending_fd, notes_fd):
                os.close(descriptor)
            channel = pipes.of("statements")
            with open(statements_fds[0], "rb") as file:
                text = file.read().decode()
            _read_nothing()
            try:
                _lock_in(request, layers, was_root=was_root, alive=alive_read)
            except (Unsafe, OSError):  # which the program says for both
                os._exit(1)
            run_tests(text, channel)
            return
        pipes.close()
    _keep(program, tests, ending_fd, request.limits["cpu_time_s"])


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError:  # the program has ended already, and its namespace with it
        return None


def _read_nothing() -> None:
    """Standard input is the program's."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _keep(program: int, tests: int | None, ending_fd: int, cpu_time_s: int) -> None:
    """Wait for the program, and for its statements if there are any, and say how they ended; does
    not return. SIGTERM ends both."""
    for standard in (0, 1, 2):
        os.close(standard)
    import signal  # while the program goes its own way already

    running = {program} if tests is None else {program, tests}

    def end(*_given: object) -> None:
        for child in running:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    endings = {}
    while running:
        # The first to end is collected first: the program, which is the first process of its
        # namespace, does not end before the other one has been.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "without WNOHANG it waits"
        running = running - {ended.si_pid}  # its number will be another's
        _, status, usage = os.wait4(ended.si_pid, 0)
        seconds = usage.ru_utime + usage.ru_stime
        endings[ended.si_pid] = os.waitstatus_to_exitcode(status), seconds
    exit_code, cpu_s = endings[program]
    tested, tested_cpu_s = endings[tests] if tests else (GONE, 0.0)
    if tested == -signal.SIGKILL and tested_cpu_s < cpu_time_s / 2:
        tested = GONE  # with the program, as all of its namespace
    if exit_code == 0 and tests and tested != GONE:
        exit_code, cpu_s = tested, tested_cpu_s
    os.write(ending_fd, f"{exit_code} {cpu_s} {int(tested == 0)}".encode())
    os._exit(0)


# Layers of the keeper, which the program inherits -------------------------------------------------


def _separate(request: Request) -> list[str]:
    """Namespaces, and in them a root that shows little; the names of what could be had."""
    layers: list[str] = []
    if "namespaces" not in request.without and _unshare(layers):
        layers.append("namespaces")
        try:
            view.enter(request.limits["max_folder_bytes"])
            layers.append("own root")
        except OSError:
            # Half of it may be there. Landlock then has to keep files away, and nothing is
            # writable.
            pass
    # The keeper has seen what it does as long as it lives; its death must still reach it.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)
    return layers


def _unshare(layers: list[str]) -> bool:
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        try:
            kernel.unshare(_NAMESPACES)
            return True
        except OSError:
            pass  # root without the rights of root, as in most containers
    try:
        kernel.unshare(_NAMESPACES | kernel.CLONE_NEWUSER)
    except OSError:
        return False
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        layers.append("user namespace")
    except OSError:
        pass  # root that may not even be mapped; what needs a user will not be had
    return True


# Layers of the program ----------------------------------------------------------------------------


def _lock_in(request: Request, inherited: list[str], *, was_root: bool, alive: int) -> list[str]:
    """Give up everything that is not needed; the names of the further layers.

    Raises Unsafe if what is left is too much.
    """
    layers = _become_nobody("own root" in inherited)
    if "user namespace" not in inherited and "namespaces" not in request.without:
        try:
            kernel.unshare(kernel.CLONE_NEWUSER)
            layers.append("user namespace")
        except OSError:
            pass
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)
    _end_if_orphaned(alive)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    # Threads are counted by user and namespace, but root's are not: then there can be none.
    has_own_user = "own user" in layers or (
        not was_root and "user namespace" in (*inherited, *layers)
    )
    _limit(request.limits, has_own_user)
    layers.append("limits")
    _keep_files_away(request, inherited, layers)
    if not seccomp.is_supported() or "seccomp" in request.without:
        raise Unsafe(
            "no filter of system calls (seccomp) on this machine: it needs Linux with "
            "CONFIG_SECCOMP_FILTER on x86_64 or aarch64"
        )
    seccomp.apply(with_threads=has_own_user, with_attributes="own root" in inherited)
    return [*layers, "seccomp"]


def _become_nobody(has_own_root: bool) -> list[str]:
    """Root becomes a user whom nothing belongs to, if that one could still read the library."""
    if os.geteuid() != 0 or not view.is_readable_by_all(through=not has_own_root):
        return []
    user = _FIRST_USER + os.getppid() if os.getppid() else _FIRST_USER + os.getpid()
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container whose root may not
        return []
    return ["own user"]


def _keep_files_away(request: Request, inherited: list[str], layers: list[str]) -> None:
    has_own_root = "own root" in inherited
    if "landlock" not in request.without and landlock.version():
        writable = [view.SCRATCH] if has_own_root else []
        landlock.apply(
            readable=view.readable(),
            listable=view.python_folders(),
            writable=writable,
            fillable=view.SINKS,
        )
        layers.append("landlock")
    elif not has_own_root:
        raise Unsafe(
            "nothing keeps the machine's files from the program: this kernel offers neither "
            "Landlock (Linux 5.13 or newer, with landlock in its lsm= list) nor user and mount "
            "namespaces (kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, "
            "and in a container a seccomp profile that allows landlock_* or unshare)"
        )


def _limit(limits: dict[str, int], has_own_user: bool) -> None:
    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: limits["cpu_time_s"],
        resource.RLIMIT_FSIZE: limits["max_file_bytes"],
        resource.RLIMIT_NOFILE: limits["max_open_files"],
        resource.RLIMIT_STACK: min(64 * 2**20, limits["memory_bytes"] // 4),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if has_own_user:
        wanted[resource.RLIMIT_NPROC] = limits["max_threads"]
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    # Else a thread takes as much address space as the machine's settings say, and 64 MiB for its
    # share of malloc: the memory would be full before the threads are as many as they may.
    share = limits["memory_bytes"] // (4 * limits["max_threads"])
    _thread.stack_size(max(_SMALLEST_STACK, min(share // 4096 * 4096, _LARGEST_STACK)))
    kernel.share_malloc()


def _end_if_orphaned(alive: int) -> None:
    """If the keeper died before its death could reach us, its end of the pipe is closed."""
    try:
        if os.read(alive, 1) == b"":
            os._exit(1)
    except BlockingIOError:
        os.close(alive)
