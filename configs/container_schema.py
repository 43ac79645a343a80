"""The settings of the containers in which tools run what a model wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from configs import checks
from configs.checks import Rule, Section
from configs.choices import ContainerKind

VERBS = ("start", "exec", "stop", "names")


@dataclass(kw_only=True, slots=True)
class ContainerConfig(Section):
    """The container of an episode of task.kind=repository."""

    SECTION: ClassVar[str] = "task.container"

    kind: ContainerKind = ContainerKind.bubblewrap
    image: str | None = field(default=None, metadata=checks.NOT_EMPTY)
    """docker, podman, kubernetes: of rows without an `image`."""
    workdir: str = field(default="/work", metadata=checks.matching(r"/[^\s:]+", "an absolute path"))
    """The repository's folder in the container."""
    timeout_s: float = field(default=60.0, metadata=checks.SECONDS)
    """Longest that one command of the model or of the tests may run."""
    memory_bytes: int = field(default=2**30, metadata=checks.within(2**26, checks.LARGEST_SIZE))
    """The most memory of the container; bubblewrap: of each process, as address space."""
    processes: int = field(default=128, metadata=checks.at_least(8))
    """The most processes and threads; kubernetes: the cluster's limit."""
    network: bool = False
    """Whether commands reach a network. kubernetes cannot close that of a pod, and needs true."""
    commands: dict[str, str] = field(default_factory=dict)
    """docker, podman, kubernetes: other command lines than the kind's, by what they do: `start`,
    `exec`, `stop` and `names` (docs/environments.md#containers)."""

    def rules(self) -> Iterator[Rule]:
        fix = "close the network of pods with a NetworkPolicy, and set true"
        yield Rule(self.network or self.kind is not ContainerKind.kubernetes, "network", fix)
        known = () if self.kind is ContainerKind.bubblewrap else VERBS
        fix = f"kind={self.kind.name} has {', '.join(known) or 'no commands'}; correct the names"
        yield Rule(set(self.commands) <= {*known}, "commands", fix)
