"""The child side of the sandbox: applies the layers one by one, then runs the program.

    keeper      own namespaces, own root          gets the request from the parent; waits, and
      │ fork                                      reports the program's end (through its own pipe)
    program     own user, no capabilities, limits, Landlock, filter of system calls ──► exec(code)
    statements  the same, in a process of their own, if there are any that test the program

A command of another language replaces the program, and keeps every layer. The filter then allows
it to become another program too: that gives it nothing which native code inside Python lacks. A
compiler may also start processes, and the keeper returns the file that it made.

Started by `rollout_pool.sandbox.run` with an empty environment and only the standard library. Each
layer is used where the kernel allows it; without the filter, or a layer that protects files,
nothing is run.
"""

from __future__ import annotations

import _thread
import os
import resource
import stat
import sys
import time

from rollout_pool.sandbox import kernel, landlock, seccomp, view
from rollout_pool.sandbox.program import Notes, become, put_file, run, run_tests
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
_PATH = {"PATH": "/usr/bin:/bin"}
"""The environment of a compiler."""
_FIRST_USER = 0x60000000
"""First of the unused user ids; a program's is this plus its keeper's process id."""


class Unsafe(Exception):
    """This kernel allows too few layers; the message says which is missing."""


def main() -> None:
    """`argv[2:]`: descriptors of the request, the notes, the ending, and of the statements if there
    are any that test the program, or of what a compiler makes."""
    given = [int(text) for text in sys.argv[2:]]
    _close_all_but(given)
    request_fd, notes_fd, ending_fd, *others = given
    kernel.prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)
    with open(request_fd, "rb") as file:
        request = Request.decode(file.read())
    sys.path += request.packages
    os.umask(0o022)
    notes = Notes(notes_fd)
    was_root = os.geteuid() == 0
    layers = _separate(request)
    if os.getppid() != request.parent_pid:
        return  # the parent died before this took effect
    alive_read, alive_write = os.pipe()
    os.set_blocking(alive_read, False)
    made_fd, statements_fd = (others, []) if request.compiles else ([], others)
    pipes = Pipes() if statements_fd else None
    if not (program := os.fork()):
        for descriptor in (alive_write, ending_fd, *others):
            os.close(descriptor)
        channel = pipes.of("program") if pipes else None
        try:
            layers += _lock_in(request, layers, was_root=was_root, alive=alive_read)
        except (Unsafe, OSError) as error:
            notes.write("unsafe", str(error))
            os._exit(1)
        notes.write("layers", ",".join(layers))
        if request.command:
            become(request.command, _PATH if request.compiles else {}, notes)
        run(request.code.decode(), notes, channel)
        return
    tests = None
    if pipes:
        tests = _fork()
        if tests == 0:
            for descriptor in (alive_write, ending_fd, notes_fd):
                os.close(descriptor)
            channel = pipes.of("statements")
            with open(statements_fd[0], "rb") as file:
                text = file.read().decode()
            _read_nothing()
            try:
                _lock_in(request, layers, was_root=was_root, alive=alive_read)
            except (Unsafe, OSError):  # reported by the program's process
                os._exit(1)
            run_tests(text, channel)
            return
        pipes.close()
    _keep(program, tests, ending_fd, made_fd, request.limits["cpu_time_s"])


def _close_all_but(given: list[int]) -> None:
    """Closes what else the parent has left open: uvloop, unlike subprocess, closes nothing."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in given:
            os.closerange(descriptor, descriptor + 1)  # no error for that of the listing


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError:  # the program and its namespace have ended already
        return None


def _read_nothing() -> None:
    """Leaves standard input to the program."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _keep(
    program: int, tests: int | None, ending_fd: int, made_fd: list[int], cpu_time_s: int
) -> None:
    """Waits for the program and its statements, if any, and reports how they ended, and what a
    compiler made. Never returns. SIGTERM ends both."""
    for standard in (0, 1, 2):
        os.close(standard)
    import signal  # while the program is already running

    running = {program} if tests is None else {program, tests}

    def end(*_given: object) -> None:
        for child in running:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    endings = {}
    while running:
        # Reap in the order of ending: the program is the first process of its namespace and does
        # not end before the other one has been reaped.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "waitid blocks without WNOHANG"
        running = running - {ended.si_pid}  # its pid may be reused
        cpu_s = _cpu_time_of_the_limit(ended.si_pid)
        _, status = os.waitpid(ended.si_pid, 0)
        endings[ended.si_pid] = os.waitstatus_to_exitcode(status), cpu_s
    exit_code, cpu_s = endings[program]
    tested, tested_cpu_s = endings[tests] if tests else (GONE, 0.0)
    if tested == -signal.SIGKILL and tested_cpu_s < cpu_time_s:
        tested = GONE  # ended with the program's namespace
    if exit_code == 0 and tests and tested != GONE:
        exit_code, cpu_s = tested, tested_cpu_s
    if made_fd and exit_code == 0:
        _hand_over(made_fd[0])  # its namespace has ended: nothing can change the file any more
    os.write(ending_fd, f"{exit_code} {cpu_s} {int(tested == 0)}".encode())
    os._exit(0)


def _hand_over(made_fd: int) -> None:
    """Copies what the compiler made."""
    try:
        # The program's text may have made it a link or a pipe.
        made = os.open(view.OUTPUT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    if stat.S_ISREG(os.fstat(made).st_mode):
        while os.sendfile(made_fd, made, None, 2**20):
            pass


def _cpu_time_of_the_limit(pid: int) -> float:
    """The CPU time of a process, ended but not yet reaped, on the clock that RLIMIT_CPU goes by.

    This clock counts whole ticks. What getrusage returns is corrected to the time that the process
    really ran, and on a busy machine that was less than three quarters of its limit when it was
    killed for it.
    """
    return time.clock_gettime(~pid << 3)  # CPUCLOCK_PROF of a process, as in linux/posix-timers.h


# Layers of the keeper, which the program inherits -------------------------------------------------


def _separate(request: Request) -> list[str]:
    """Enters namespaces with a minimal root; returns the names of the layers in force."""
    layers: list[str] = []
    if "namespaces" not in request.without and _unshare(layers):
        layers.append("namespaces")
        try:
            view.enter(request.limits["max_folder_bytes"], request.chosen)
            layers.append("own root")
        except OSError:
            # It may be half done. Then Landlock must protect the files, and nothing is writable.
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
            pass  # root without root's capabilities, as in most containers
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
        pass  # root that cannot be mapped: go without the layers that need a user namespace
    return True


# Layers of the program ----------------------------------------------------------------------------


def _lock_in(request: Request, inherited: list[str], *, was_root: bool, alive: int) -> list[str]:
    """Drops all privileges that are not needed; returns the names of the further layers.

    Raises Unsafe if too many remain.
    """
    layers = _become_unprivileged("own root" in inherited)
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
    # Threads are counted by user and namespace, except root's: root may start none.
    has_own_user = "own user" in layers or (
        not was_root and "user namespace" in (*inherited, *layers)
    )
    if request.compiles and not has_own_user:
        raise Unsafe(
            "a compiler starts processes, and without a user of its own (user.max_user_namespaces "
            "above 0) their number cannot be limited"
        )
    _limit(request.limits, has_own_user)
    layers.append("limits")
    has_own_root = "own root" in inherited
    if request.command and not has_own_root:
        raise Unsafe(
            "a command finds its program in a folder of its own, and without namespaces there is "
            "none (kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, and in a "
            "container a seccomp profile that allows unshare and mount)"
        )
    if request.command:
        put_file(request.code)  # Landlock's rule for an executable needs the file
    _keep_files_away(request, inherited, layers)
    _check_packages(request.packages)
    if os.uname().machine not in seccomp.MACHINES or "seccomp" in request.without:
        raise Unsafe(
            "no filter of system calls (seccomp) on this machine: it needs Linux with "
            "CONFIG_SECCOMP_FILTER on x86_64 or aarch64"
        )
    seccomp.apply(
        with_threads=has_own_user,
        with_attributes=has_own_root,
        with_exec=bool(request.command),
        with_processes=request.compiles,
    )
    return [*layers, "seccomp"]


def _become_unprivileged(has_own_root: bool) -> list[str]:
    """Root becomes a user who owns nothing, if that user can still read the library."""
    if os.geteuid() != 0 or not view.is_readable_by_all(through=not has_own_root):
        return []
    user = _FIRST_USER + os.getppid() if os.getppid() else _FIRST_USER + os.getpid()
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container whose root must not
        return []
    return ["own user"]


def _keep_files_away(request: Request, inherited: list[str], layers: list[str]) -> None:
    has_own_root = "own root" in inherited
    if "landlock" not in request.without and landlock.version():
        writable = [view.SCRATCH] if has_own_root else []
        landlock.apply(
            readable=view.readable(request.chosen),
            listable=view.python_folders(),
            executable=view.executable(request.command, request.compiles),
            writable=writable,
            fillable=view.SINKS,
        )
        layers.append("landlock")
    elif not has_own_root:
        raise Unsafe(
            "nothing protects the machine's files from the program: this kernel offers neither "
            "Landlock (Linux 5.13 or newer, with landlock in its lsm= list) nor user and mount "
            "namespaces (kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, "
            "and in a container a seccomp profile that allows landlock_* or unshare)"
        )


def _check_packages(packages: list[str]) -> None:
    for folder in packages:
        try:
            os.listdir(folder)
        except OSError as error:
            raise Unsafe(
                f"{folder} cannot be read by the user that programs run as ({error.strerror}): let "
                "every user read it and enter the folders above it"
            ) from error


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
    # By default each thread takes its full stack limit of address space and a 64 MiB malloc arena:
    # the memory limit would be reached before the thread limit.
    share = limits["memory_bytes"] // (4 * limits["max_threads"])
    _thread.stack_size(max(_SMALLEST_STACK, min(share // 4096 * 4096, _LARGEST_STACK)))
    kernel.share_malloc()


def _end_if_orphaned(alive: int) -> None:
    """Ends if the keeper died before the death signal was set: its end of the pipe is closed."""
    try:
        if os.read(alive, 1) == b"":
            os._exit(1)
    except BlockingIOError:
        os.close(alive)
