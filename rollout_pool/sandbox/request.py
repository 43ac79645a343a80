"""The parent's request to the sandbox's child side, as text: importing JSON would take longer than
the whole set-up.

    parent_pid 4711
    without landlock,seccomp
    packages /opt/env/lib/python3.11/site-packages
    command                         or an executable and its arguments, separated by NUL
    compiles 0
    memory_bytes 536870912          one limit per line

    print("the code follows the first empty line")
"""

from __future__ import annotations

import os

from rollout_pool.sandbox import view


class Request:
    """Run `code` within `limits` (see SandboxLimits; whole numbers)."""

    __slots__ = ("code", "command", "compiles", "limits", "packages", "parent_pid", "without")

    def __init__(
        self,
        *,
        code: bytes,
        command: list[str],
        compiles: bool,
        limits: dict[str, int],
        packages: list[str],
        parent_pid: int,
        without: list[str],
    ) -> None:
        """`command`: an executable and its arguments, which run the code; if empty, Python does.
        `compiles`: it makes a file of the code instead.
        `packages`: folders that can be read and imported from. `without`: layers not to use."""
        self.code = code
        self.command = command
        self.compiles = compiles
        self.limits = limits
        self.packages = packages
        self.parent_pid = parent_pid
        self.without = without

    @property
    def chosen(self) -> list[str]:
        """Paths that the user lets the program read."""
        executable = [path for path in self.command[:1] if path != view.FILE]
        return [*self.packages, *executable, *(view.OF_COMPILERS if self.compiles else ())]

    def encode(self) -> bytes:
        lines = [f"parent_pid {self.parent_pid}", f"without {','.join(self.without)}"]
        lines.append("command " + "\0".join(self.command))
        lines.append(f"compiles {int(self.compiles)}")
        lines.append(f"packages {os.pathsep.join(self.packages)}")
        lines += [f"{name} {value}" for name, value in self.limits.items()]
        return "\n".join([*lines, "", ""]).encode() + self.code

    @classmethod
    def decode(cls, content: bytes) -> Request:
        head, _, code = content.partition(b"\n\n")
        fields = dict(line.split(" ", 1) for line in head.decode().split("\n"))
        parent_pid, without = int(fields.pop("parent_pid")), fields.pop("without")
        packages, command = fields.pop("packages"), fields.pop("command")
        compiles = bool(int(fields.pop("compiles")))
        limits = {name: int(value) for name, value in fields.items()}
        return cls(
            code=code,
            command=command.split("\0") if command else [],
            compiles=compiles,
            limits=limits,
            packages=packages.split(os.pathsep) if packages else [],
            parent_pid=parent_pid,
            without=without.split(",") if without else [],
        )
