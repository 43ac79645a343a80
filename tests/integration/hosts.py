"""Machines as Linux namespaces, joined by a virtual cable; needs root, `ip` and `unshare`.

Each has its own network, name, processes, home, /tmp and /dev/shm. They share the file system
otherwise, and a folder below /tmp, like machines with a shared folder. A machine's name leads where
it does on Debian: to 127.0.1.1, and on the other machine to nothing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc")
_INIT = """
import os, signal, sys

def reap(number, frame):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, reap)
print("up", flush=True)
sys.stdin.read()
"""
"""The first process of a machine: takes in orphans, and ends, with all others, with the test."""


class Host:
    """One machine. `kill` is what a power cut does."""

    def __init__(self, name: str, address: str, shared: Path) -> None:
        self.name = name
        self.address = address
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": "/tmp",
            "USER": "somebody",
        }
        names = shared / f"{name}.hosts"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        unshare = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "--kill-child"]
        self._first = subprocess.Popen(
            [*unshare, sys.executable, "-c", _INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "up\n"
        (inside,) = psutil.Process(self._first.pid).children()
        self.pid = inside.pid
        self.check(f"hostname {name} && mount --bind {names} /etc/hosts && ip link set lo up")
        self.check(f"mount -t tmpfs tmpfs /dev/shm && {_own_tmp(shared)}")

    def start(
        self, command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Run a line of shell in the checkout, as a user of this machine would."""
        enter = ["nsenter", "-t", str(self.pid), *_NAMESPACES]
        return subprocess.Popen(
            [*enter, "bash", "-c", f"cd {ROOT} && {command}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.environment, **(environment or {})},
            start_new_session=True,
        )

    def check(self, command: str, timeout_s: float = 120.0) -> str:
        """Its output; AssertionError if it fails."""
        process = self.start(command)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{command!r} did not end on {self.name}:\n{output}") from None
        assert process.returncode == 0, f"{command!r} on {self.name}:\n{output}"
        return output

    def python(self, code: str) -> str:
        """What a program prints that runs on this machine."""
        return self.check(f"{sys.executable} -c {shlex.quote(code)}")

    def kill(self) -> None:
        self._first.kill()
        self._first.wait()
        for stream in (self._first.stdin, self._first.stdout):
            assert stream is not None
            stream.close()


def _own_tmp(shared: Path) -> str:
    """An empty /tmp, but for what both machines share below it."""
    new = shared / "tmp"
    commands = [f"mkdir -p {new}", f"mount -t tmpfs tmpfs {new}"]
    for folder in {shared, ROOT}:
        if folder.is_relative_to("/tmp"):
            at = new / folder.relative_to("/tmp")
            commands += [f"mkdir -p {at}", f"mount --bind {folder} {at}"]
    return " && ".join([*commands, f"mount --move {new} /tmp"])


def missing() -> str | None:
    """Why there can be no such machines here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "nsenter", "ss"):
        if shutil.which(program) is None:
            return f"network namespaces need {program} (Debian: iproute2, util-linux)"
    probe = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"]
    made = subprocess.run(probe, capture_output=True, text=True, timeout=60)
    return None if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


@contextlib.contextmanager
def two_hosts(shared: Path) -> Iterator[tuple[Host, Host]]:
    """Two machines on one cable, by the addresses of docs/cluster.md, with the folder `shared`.

    Each sends everything else to a gateway that does not answer.
    """
    with contextlib.ExitStack() as closing:
        first = Host("host-a", "10.0.0.5", shared)
        closing.callback(first.kill)
        second = Host("host-b", "10.0.0.6", shared)
        closing.callback(second.kill)
        cable = ["ip", "link", "add", "eth0", "netns", str(first.pid), "type", "veth"]
        cable += ["peer", "name", "eth0", "netns", str(second.pid)]
        subprocess.run(cable, check=True, timeout=60)
        for host in (first, second):
            host.check(
                f"ip addr add {host.address}/24 dev eth0 && ip link set eth0 up"
                " && ip route add default via 10.0.0.254"
            )
        yield first, second
