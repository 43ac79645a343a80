"""System calls that Python lacks, as functions that raise OSError.

Part of the sandbox's child side, which uses only the standard library.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
SIGKILL = 9

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522
_M_ARENA_MAX = -8

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Makes a system call; raises OSError."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *passed)), f"system call {number}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _checked(result, f"mount on {target}")


def make_root(folder: str) -> None:
    """Makes `folder`, a mount point, the root; the old root becomes unreachable."""
    os.chdir(folder)
    syscall(_PIVOT_ROOT[os.uname().machine], b".", b".")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")


def prctl(option: int, value: int) -> None:
    unused = ctypes.c_ulong(0)
    result = _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), unused, unused, unused)
    _checked(result, f"prctl {option}")


def share_malloc() -> None:
    """Makes all future threads share one heap."""
    if hasattr(_libc, "mallopt"):  # glibc
        _libc.mallopt(ctypes.c_int(_M_ARENA_MAX), ctypes.c_int(1))


def drop_capabilities() -> None:
    """Drops all capabilities of this thread."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, none), "capset")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
