"""The parent's request to the sandbox's child side, as text: importing JSON would take longer than
the whole set-up.

    parent_pid 4711
    without landlock,seccomp
    packages /opt/env/lib/python3.11/site-packages
    command                         or an executable and its arguments, separated by NUL
    memory_bytes 536870912          one limit per line

    print("the code follows the first empty line")
"""

from __future__ import annotations

import os


class Request:
    """Run `code` within `limits` (see SandboxLimits; whole numbers)."""

    __slots__ = ("code", "command", "limits", "packages", "parent_pid", "without")

    def __init__(
        self,
        *,
        code: str,
        command: list[str],
        limits: dict[str, int],
        packages: list[str],
        parent_pid: int,
        without: list[str],
    ) -> None:
        """`command`: an executable and its arguments, which run the code; if empty, Python does.
        `packages`: folders that can be read and imported from. `without`: layers not to use."""
        self.code = code
        self.command = command
        self.limits = limits
        self.packages = packages
        self.parent_pid = parent_pid
        self.without = without

    @property
    def chosen(self) -> list[str]:
        """What the user lets the program read."""
        return [*self.packages, *self.command[:1]]

    def encode(self) -> bytes:
        lines = [f"parent_pid {self.parent_pid}", f"without {','.join(self.without)}"]
        lines.append("command " + "\0".join(self.command))
        lines.append(f"packages {os.pathsep.join(self.packages)}")
        lines += [f"{name} {value}" for name, value in self.limits.items()]
        # Code from a model may contain lone surrogates, which Python refuses anyway.
        return "\n".join([*lines, "", self.code]).encode("utf-8", "replace")

    @classmethod
    def decode(cls, content: bytes) -> Request:
        head, _, code = content.decode().partition("\n\n")
        fields = dict(line.split(" ", 1) for line in head.split("\n"))
        parent_pid, without = int(fields.pop("parent_pid")), fields.pop("without")
        packages, command = fields.pop("packages"), fields.pop("command")
        limits = {name: int(value) for name, value in fields.items()}
        return cls(
            code=code,
            command=command.split("\0") if command else [],
            limits=limits,
            packages=packages.split(os.pathsep) if packages else [],
            parent_pid=parent_pid,
            without=without.split(",") if without else [],
        )
