"""Landlock: which files the program may access, regardless of its user and namespaces."""

from __future__ import annotations

import os
import struct

from rollout_pool.sandbox import kernel

TYPE_CHECKING = False  # avoids the import of typing
if TYPE_CHECKING:
    from collections.abc import Iterable

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_NO_AUDIT_LOG = 1
"""From ABI 7: do not log denied accesses."""

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_OF_FILES = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)
"""Rights that apply to files; the others apply to folders only."""


def version() -> int:
    """The kernel's Landlock ABI; 0 if it is missing or disabled."""
    try:
        return kernel.syscall(_CREATE, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def all_rights(abi: int) -> int:
    """All file rights of this ABI: execute, write, read, list, remove, make, and later ones: rename
    across folders (2), truncate (3), device ioctl (5)."""
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        if abi >= since:
            rights |= 1 << bit
    return rights


def apply(
    readable: Iterable[str],
    listable: Iterable[str],
    executable: Iterable[str],
    writable: Iterable[str],
    fillable: Iterable[str],
) -> None:
    """Restricts this process to these paths and everything below them (`listable`: names only;
    `fillable`: existing files that may be written to).

    Missing paths are skipped. Also denies TCP and signals to other processes where this ABI can.
    Needs no_new_privs; raises OSError.
    """
    abi = version()
    ruleset = kernel.syscall(_CREATE, *_attributes(abi), 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ_FILE | READ_DIR)
        for path in listable:
            _allow(ruleset, path, READ_DIR)
        for path in executable:
            _allow(ruleset, path, EXECUTE)
        for path in writable:
            _allow(ruleset, path, all_rights(abi) & ~EXECUTE)
        for path in fillable:
            _allow(ruleset, path, WRITE_FILE)
        kernel.syscall(_RESTRICT, ruleset, _NO_AUDIT_LOG if abi >= 7 else 0)
    finally:
        os.close(ruleset)


def _attributes(abi: int) -> tuple[bytes, int]:
    """struct landlock_ruleset_attr of this ABI, and its size."""
    fields = [all_rights(abi)]
    if abi >= 4:
        fields.append(0b11)  # bind and connect of TCP
    if abi >= 6:
        fields.append(0b11)  # abstract Unix sockets and signals outside
    return struct.pack(f"{len(fields)}Q", *fields), 8 * len(fields)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, folder)
        kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(folder)
