"""The parent's request to the sandbox's child side, encoded by `plain`: importing JSON would take
longer than the whole set-up.
"""

from __future__ import annotations

from rollout_pool.sandbox import plain, view


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
        fields = {name: getattr(self, name) for name in self.__slots__}
        return plain.encode(fields, _no_object)

    @classmethod
    def decode(cls, content: bytes) -> Request:
        return cls(**plain.decode(content, _no_object))


_no_object = ().__getitem__
"""A request has plain values alone."""
