"""The system call filter: no new processes (but a compiler's), no network, no access to other
processes, no mounts.

It needs no privileges and cannot be removed. The program sees a refused call as a missing
permission, and calls newer than this list as unimplemented.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from rollout_pool.sandbox import kernel

ALLOW = 0x7FFF0000
REFUSE = 0x00050000
"""SECCOMP_RET_ERRNO; the error number is in the low bits."""
KILL = 0x80000000

_LOAD, _EQUAL, _GREATER_OR_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data."""
_NEWEST = 462
"""The newest system call that this list covers."""
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020000
"""All CLONE_NEW... that clone knows."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables below, and the AUDIT_ARCH constant."""

_PR_SET_NAME, _PR_GET_NAME = 15, 16
_REFUSED_FCNTL = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX signal others, F_SETLEASE lets who opens the file wait for the
program, F_NOTIFY watches a folder."""
_IOCTL_OWNER = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP

_Table = dict[str, tuple["int | None", "int | None"]]
"""name: (x86_64, aarch64); None where the architecture has no such call."""


def _table(text: str) -> _Table:
    """Reads `name x86_64 aarch64; ...`, in which - stands for None."""
    rows = [entry.split() for entry in text.split(";")]
    return {
        name: (None if x86 == "-" else int(x86), None if arm == "-" else int(arm))
        for name, x86, arm in rows
    }


NEW_PROCESS = _table("""
    fork 57 -; vfork 58 -; execve 59 221; execveat 322 281
""")
NETWORK = _table("""
    socket 41 198; bind 49 200; listen 50 201; accept 43 202; accept4 288 242; connect 42 203;
    sendmsg 46 211; sendmmsg 307 269; io_uring_setup 425 425; io_uring_enter 426 426;
    io_uring_register 427 427
""")
"""Calls on sockets that it has, too: those of a pair, and its standard streams under uvloop.
sendmsg may name a receiver, and pass descriptors on."""
OTHERS = _table("""
    tkill 200 130; ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271;
    process_madvise 440 440; process_mrelease 448 448; pidfd_open 434 434; pidfd_getfd 438 438;
    pidfd_send_signal 424 424; kcmp 312 272; setsid 112 157; setpgid 109 154;
    setpriority 141 140; ioprio_set 251 30; sched_setscheduler 144 119; sched_setparam 142 118;
    sched_setattr 314 274; sched_setaffinity 203 122; shmat 30 196; shmctl 31 195;
    semop 65 193; semtimedop 220 192; semctl 66 191; msgsnd 69 189; msgrcv 70 188;
    msgctl 71 187; mq_unlink 241 181; inotify_init 253 -; inotify_init1 294 26;
    inotify_add_watch 254 27; migrate_pages 256 238; move_pages 279 239
""")
"""Other processes; memory, semaphores and queues that others have made and whose numbers can be
guessed (shmat to mq_unlink); reports of files that Landlock keeps away (inotify)."""
OUTLIVES = _table("""
    shmget 29 194; msgget 68 186; semget 64 190; mq_open 240 180; memfd_create 319 279;
    memfd_secret 447 447; io_setup 206 0; io_submit 209 2; add_key 248 217;
    request_key 249 218; keyctl 250 219
""")
"""Memory outside the process limits, or that outlives the process."""
SYSTEM = _table("""
    mount 165 40; umount2 166 39; pivot_root 155 41; chroot 161 51; fsopen 430 430;
    fsconfig 431 431; fsmount 432 432; fspick 433 433; move_mount 429 429; open_tree 428 428;
    mount_setattr 442 442; statmount 457 457; listmount 458 458; unshare 272 97; setns 308 268;
    bpf 321 280; perf_event_open 298 241; sync 162 81; syncfs 306 267; userfaultfd 323 282;
    init_module 175 105; finit_module 313 273; delete_module 176 106; kexec_load 246 104;
    kexec_file_load 320 294; reboot 169 142; swapon 167 224; swapoff 168 225; acct 163 89;
    quotactl 179 60; quotactl_fd 443 443; syslog 103 116; settimeofday 164 170;
    clock_settime 227 112; adjtimex 159 171; clock_adjtime 305 266; sethostname 170 161;
    setdomainname 171 162; vhangup 153 58; personality 135 92; modify_ldt 154 -; iopl 172 -;
    ioperm 173 -; uselib 134 -; open_by_handle_at 304 265; name_to_handle_at 303 264;
    fanotify_init 300 262; lookup_dcookie 212 18; nfsservctl 180 42
""")
"""The machine's own settings; sync flushes disks, which slows all of it."""
ATTRIBUTES = _table("""
    truncate 76 45; chmod 90 -; fchmod 91 52; fchmodat 268 53; fchmodat2 452 452; chown 92 -;
    lchown 94 -; fchown 93 55; fchownat 260 54; setxattr 188 5; lsetxattr 189 6;
    fsetxattr 190 7; removexattr 197 14; lremovexattr 198 15; fremovexattr 199 16; utime 132 -;
    utimes 235 -; futimesat 261 -; utimensat 280 88
""")
"""Landlock lets an owner change a file's attributes, and before Linux 6.2 its length."""
_TO_ITSELF = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
"""Allowed where the first argument is the program's own process."""
_CLONE, _CLONE3, _PRCTL, _PRLIMIT64 = (56, 220), (435, 435), (157, 167), (302, 261)
_FCNTL, _IOCTL, _SOCKETPAIR, _SENDTO = (72, 25), (16, 29), (53, 199), (44, 206)
_AF_UNIX = 1
_STREAMS = tuple(1 | flags for flags in (0, 0o2000000, 0o4000, 0o2004000))
"""SOCK_STREAM with SOCK_CLOEXEC, SOCK_NONBLOCK, both or neither."""


def apply(
    *, with_threads: bool, with_attributes: bool, with_exec: bool, with_processes: bool
) -> None:
    """Filters this process: whether it may start threads, change attributes of files, become
    another program, and start processes; the filter binds these too.

    Needs no_new_privs; raises OSError.
    """
    machine = os.uname().machine
    column, architecture = MACHINES[machine]
    thread_flag = _if_argument(0, _ANY_BIT, (_CLONE_THREAD,))
    threads = thread_flag if with_threads else [_refuse(errno.EAGAIN)]
    if with_processes:
        threads = _unless_argument(0, (_CLONE_NAMESPACES,), _ANY_BIT)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, KILL),
        _step(_LOAD, _NUMBER),
        *_when(_GREATER_OR_EQUAL, _NEWEST + 1, [_refuse(errno.ENOSYS)]),
        # ENOSYS: glibc falls back to clone, whose flags a filter can check.
        *_when(_EQUAL, _CLONE3[column], [_refuse(errno.ENOSYS)]),
        *_when(_EQUAL, _CLONE[column], threads),
        *_when(_EQUAL, _PRCTL[column], _if_argument(0, _EQUAL, (_PR_SET_NAME, _PR_GET_NAME))),
        *_when(_EQUAL, _PRLIMIT64[column], _if_argument(0, _EQUAL, (0,))),
        *_when(_EQUAL, _FCNTL[column], _unless_argument(1, _REFUSED_FCNTL)),
        *_when(_EQUAL, _IOCTL[column], _unless_argument(1, _IOCTL_OWNER)),
        # A datagram socket could send to any named socket of the machine.
        *_when(
            _EQUAL,
            _SOCKETPAIR[column],
            [*_unless_other(0, _AF_UNIX), *_if_argument(1, _EQUAL, _STREAMS)],
        ),
        *_when(_EQUAL, _SENDTO[column], _if_null(4)),  # what `send` is
    ]
    attributes = () if with_attributes else (ATTRIBUTES,)
    allowed = ("execve",) if with_exec else ()
    if with_processes:
        allowed = (*allowed, "fork", "vfork")
    for numbers in _TO_ITSELF.values():
        steps += _when(_EQUAL, numbers[column], _if_argument(0, _EQUAL, (os.getpid(),)))
    for table in (NEW_PROCESS, NETWORK, OTHERS, OUTLIVES, SYSTEM, *attributes):
        for name, columns in table.items():
            if (number := columns[column]) is not None and name not in allowed:
                steps += _when(_EQUAL, number, [_refuse(errno.EPERM)])
    code = b"".join([*steps, _step(_RETURN, ALLOW)])
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    set_mode_filter, by_syscall = 1, {"x86_64": 317, "aarch64": 277}
    kernel.syscall(by_syscall[machine], set_mode_filter, 0, header)


def _when(test: int, value: int, then: list[bytes]) -> list[bytes]:
    """Runs `then`, which must return, if the loaded value passes the test."""
    return [_step(test, value, 0, len(then)), *then]


def _if_argument(index: int, test: int, values: tuple[int, ...]) -> list[bytes]:
    """Allows the call if the low half of an argument passes the test with one of `values`."""
    checks = [
        _step(test, value, len(values) - place, 0)  # skips the other checks and what follows them
        for place, value in enumerate(values)
    ]
    load = _step(_LOAD, _ARGUMENTS + 8 * index)
    return [load, *checks, _refuse(errno.EPERM), _step(_RETURN, ALLOW)]


def _if_null(index: int) -> list[bytes]:
    """Allows the call if both halves of an argument are 0."""
    low = _ARGUMENTS + 8 * index
    return [
        *(_step(_LOAD, low), _step(_EQUAL, 0, 0, 3)),
        *(_step(_LOAD, low + 4), _step(_EQUAL, 0, 0, 1)),
        _step(_RETURN, ALLOW),
        _refuse(errno.EPERM),
    ]


def _unless_other(index: int, value: int) -> list[bytes]:
    """Refuses the call if the low half of an argument differs from `value`."""
    load = _step(_LOAD, _ARGUMENTS + 8 * index)
    return [load, _step(_EQUAL, value, 1, 0), _refuse(errno.EPERM)]


def _unless_argument(index: int, values: tuple[int, ...], test: int = _EQUAL) -> list[bytes]:
    """Refuses the call if the low half of an argument passes the test with one of `values`."""
    *checks, refuse, allow = _if_argument(index, test, values)
    return [*checks, allow, refuse]


def _refuse(error: int) -> bytes:
    return _step(_RETURN, REFUSE | error)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction of classic BPF."""
    return struct.pack("HBBI", code, if_true, if_false, value)
