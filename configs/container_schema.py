"""The settings of the containers in which tools run what a model wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from configs import checks
from configs.checks import Rule, Section
from configs.choices import ContainerKind

WITH_COMMANDS = (ContainerKind.docker, ContainerKind.podman, ContainerKind.kubernetes)
WITH_IMAGE = (*WITH_COMMANDS, ContainerKind.e2b)
WITH_URL = (ContainerKind.sandbox_fusion, ContainerKind.e2b)
VERBS = ("start", "exec", "stop", "names")


@dataclass(kw_only=True, slots=True)
class ContainerConfig(Section):
    """The container of an episode of task.kind=repository."""

    SECTION: ClassVar[str] = "task.container"

    kind: ContainerKind = ContainerKind.bubblewrap
    image: str | None = field(default=None, metadata=checks.NOT_EMPTY)
    """docker, podman, kubernetes: of rows without an `image`. e2b: the template, as base."""
    workdir: str = field(default="/work", metadata=checks.matching(r"/[^\s:]+", "an absolute path"))
    """The repository's folder in the container."""
    timeout_s: float = field(default=60.0, metadata=checks.SECONDS)
    """Longest that one command of the model or of the tests may run."""
    memory_bytes: int = field(default=2**30, metadata=checks.within(2**26, checks.LARGEST_SIZE))
    """The most memory of the container; bubblewrap: of each process, as address space; e2b: the
    template's."""
    processes: int = field(default=128, metadata=checks.at_least(8))
    """The most processes and threads; kubernetes, sandbox_fusion, e2b: theirs."""
    network: bool = False
    """Whether commands reach a network. kubernetes and sandbox_fusion cannot close that of a pod or
    a service, and need true."""
    url: str | None = field(
        default=None,
        metadata=checks.matching(r"https?://[^\s/@?]+[^\s@?]*", "an address as http://host"),
    )
    """sandbox_fusion: the service. e2b: its API, as https://api.e2b.app."""
    api_key_env: str | None = field(default=None, metadata=checks.VARIABLE)
    """For `url`: environment variable that holds the key."""
    commands: dict[str, str] = field(default_factory=dict)
    """docker, podman, kubernetes: other command lines than the kind's, by what they do: `start`,
    `exec`, `stop` and `names` (docs/environments.md#containers)."""

    def rules(self) -> Iterator[Rule]:
        fix = f"kind={self.kind.name}: a service needs its address, and no other has one"
        yield Rule((self.url is not None) == (self.kind in WITH_URL), "url", fix)
        is_keyed = self.kind is not ContainerKind.e2b or self.api_key_env is not None
        fix = "kind=e2b needs a key; name its environment variable, as E2B_API_KEY"
        yield Rule(is_keyed, "api_key_env", fix)
        is_open = self.kind in (ContainerKind.sandbox_fusion, ContainerKind.kubernetes)
        fix = "close the network there, of pods with a NetworkPolicy, and set true"
        yield Rule(self.network or not is_open, "network", fix)
        known = VERBS if self.kind in WITH_COMMANDS else ()
        fix = f"kind={self.kind.name} has {', '.join(known) or 'no commands'}; correct the names"
        yield Rule(set(self.commands) <= {*known}, "commands", fix)
