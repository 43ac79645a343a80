"""The files that a sandboxed program can see: Python, what the user chose (packages, or another
language's executable), shared libraries and the program's own /tmp.

Two independent layers enforce it: a root assembled from read-only mounts, and Landlock's rules.
"""

from __future__ import annotations

import os
import stat
import sys

from rollout_pool.sandbox import kernel

SCRATCH = "/tmp"
"""The program's own folder: in memory, limited in size, deleted with the program."""
FILE = f"{SCRATCH}/program"
"""Where a command finds its program."""
OUTPUT = f"{SCRATCH}/output"
"""Where a compiler puts what it makes."""
OF_COMPILERS = ("/usr", "/bin", "/etc/alternatives")
"""Seen by compilers besides: the programs that they start, headers and libraries."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
SINKS = ("/dev/null",)
"""Writable devices."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_SINGLE_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_NOT_PYTHON_ITSELF = ("site-packages", "dist-packages")
"""Excluded unless the user chose them: installed packages may include this project."""
_MOUNT_FLAGS = {
    os.ST_RDONLY: kernel.MS_RDONLY,
    os.ST_NOSUID: kernel.MS_NOSUID,
    os.ST_NODEV: kernel.MS_NODEV,
    os.ST_NOEXEC: kernel.MS_NOEXEC,
    os.ST_NOATIME: kernel.MS_NOATIME,
    os.ST_NODIRATIME: kernel.MS_NODIRATIME,
    os.ST_RELATIME: kernel.MS_RELATIME,
}


def python_folders() -> list[str]:
    """Folders of the standard library, of which there may be two."""
    # sysconfig has it too, but its import takes longer than all of this.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = [os.path.dirname(os.__file__), f"{sys.exec_prefix}/{sys.platlibdir}/{version}"]
    return list(dict.fromkeys(os.path.realpath(place) for place in places if os.path.isdir(place)))


def python_libraries() -> list[str]:
    """Shared libraries that came with this Python."""
    found = []
    for folder in python_folders():
        if (beside := os.path.dirname(folder)) not in _LIBRARIES:
            found += [f"{beside}/{name}" for name in os.listdir(beside) if ".so" in name]
    return found


def readable(chosen: list[str]) -> list[str]:
    """Readable paths, with everything below them; `chosen`: by the user."""
    paths = [*_LIBRARIES, *_SINGLE_FILES, *DEVICES, *python_libraries(), *chosen]
    for folder in python_folders():
        paths += [
            f"{folder}/{name}" for name in os.listdir(folder) if name not in _NOT_PYTHON_ITSELF
        ]
    return paths


def is_readable_by_all(through: bool) -> bool:
    """Returns whether any user can read the library; `through`: and reach its folder."""
    for folder in python_folders():
        if not os.stat(folder).st_mode & stat.S_IXOTH:
            return False
        if not os.stat(f"{folder}/os.py").st_mode & stat.S_IROTH:
            return False
        while through and folder != "/":
            folder = os.path.dirname(folder)
            if not os.stat(folder).st_mode & stat.S_IXOTH:
                return False
    return True


def executable(command: list[str], compiles: bool) -> list[str]:
    """The command's executable, the loaders of shared libraries, and what a compiler starts."""
    return [command[0], *_LIBRARIES, *(OF_COMPILERS if compiles else ())] if command else []


def enter(scratch_bytes: int, chosen: list[str]) -> None:
    """Makes these files the only visible ones, in an own mount namespace. Raises OSError."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = SCRATCH  # any folder can be the mount point; it is hidden afterwards
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "size=4m,nr_inodes=4k,mode=0755")
    python = (*python_folders(), *python_libraries())
    # A folder before what is in it, which it shows too.
    for path in sorted((*_LIBRARIES, *_SINGLE_FILES, *DEVICES, *python, *chosen), key=len):
        _show(root, path)
    for folder in python_folders():
        for name in _NOT_PYTHON_ITSELF:
            if f"{folder}/{name}" not in chosen and os.path.isdir(f"{root}{folder}/{name}"):
                _mount_empty(f"{root}{folder}/{name}", 4096)
    _make_read_only(root)
    os.makedirs(f"{root}{SCRATCH}", exist_ok=True)
    _mount_empty(f"{root}{SCRATCH}", scratch_bytes)
    kernel.mount("none", root, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)
    kernel.make_root(root)
    os.chdir(SCRATCH)


def _mount_empty(path: str, size: int) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", path, "tmpfs", flags, f"size={size},nr_inodes=4k,mode=1777")


def _show(root: str, path: str) -> None:
    """Shows `path` at the same place under `root`; links stay links."""
    place = root + path
    if not os.path.lexists(path) or os.path.lexists(place):
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.makedirs(place)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o444))
    kernel.mount(path, place, None, kernel.MS_BIND | kernel.MS_REC)


def _make_read_only(root: str) -> None:
    """Makes every mount below `root` read-only, including nested ones."""
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        points = mounts_below(root, mounts.readlines())
    for point in points:
        # A remount must repeat the mount's flags, which must not be dropped.
        has = os.statvfs(point).f_flag
        flags = sum(mine for theirs, mine in _MOUNT_FLAGS.items() if has & theirs)
        flags |= kernel.MS_RDONLY | kernel.MS_NOSUID
        kernel.mount("none", point, None, kernel.MS_REMOUNT | kernel.MS_BIND | flags)


def mounts_below(root: str, mountinfo: list[str]) -> list[str]:
    """Points of the mounts in the tree of the mount that is seen at `root`, in the form of Linux's
    /proc/PID/mountinfo. The mount at `root` hides others, whose points have the same beginning."""
    found = [line.split() for line in mountinfo]
    points = {mount[0]: mount[4].encode().decode("unicode_escape") for mount in found}
    (*_, seen) = (number for number, point in points.items() if point == root)
    inside, below = {seen}, list[str]()
    for number, parent, *_ in found:  # a mount is listed after the one that it lies in
        if parent in inside:
            inside.add(number)
            below.append(points[number])
    return below
