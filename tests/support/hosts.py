"""Machines as Linux namespaces, joined by virtual cables; needs root, `ip` and `unshare`.

Each has its own network, name, processes, home, /tmp and /dev/shm. They share the file system
otherwise, and a folder below /tmp, like machines with a shared folder. A machine's name leads where
it does on Debian: to 127.0.1.1, and on the other machines to nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.repository import ROOT

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
        self,
        command: str,
        environment: Mapping[str, str] | None = None,
        streams: Sequence[int] = (subprocess.PIPE, subprocess.PIPE, subprocess.STDOUT),
    ) -> subprocess.Popen[str]:
        """Run a line of shell in the checkout, as a user of this machine would."""
        enter = ["nsenter", "-t", str(self.pid), *_NAMESPACES]
        stdin, stdout, stderr = streams
        return subprocess.Popen(
            [*enter, "bash", "-c", f"cd {ROOT} && {command}"],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
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
        """Runs a program on this machine and returns its output."""
        return self.check(f"{sys.executable} -c {shlex.quote(code)}")

    def cut(self, other: Host) -> None:
        """Take the cable from this machine, the switch, to the other; nothing hears of it."""
        self.check(f"ip link set to-{other.name} down")

    def heal(self, other: Host) -> None:
        self.check(f"ip link set to-{other.name} up")

    def slow_down(self, other: Host, rate: str) -> None:
        """Limits what this machine, the switch, passes on to the other: such as `1mbit`."""
        self.check(f"tc qdisc add dev to-{other.name} root tbf rate {rate} burst 32kb latency 1s")

    def speed_up(self, other: Host) -> None:
        self.check(f"tc qdisc del dev to-{other.name} root")

    def kill(self) -> None:
        self._first.kill()
        self._first.wait()
        for stream in (self._first.stdin, self._first.stdout):
            assert stream is not None
            stream.close()


def _own_tmp(shared: Path) -> str:
    """An empty /tmp, but for what all machines share below it."""
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
def joined_hosts(shared: Path, number: int) -> Iterator[list[Host]]:
    """Machines by the addresses of docs/cluster.md, with the folder `shared`.

    Each has a cable to a switch, which is in the first, and sends everything else to a gateway that
    does not answer.
    """
    with contextlib.ExitStack() as closing:
        hosts = []
        for place in range(number):
            host = Host(f"host-{'abc'[place]}", f"10.0.0.{5 + place}", shared)
            closing.callback(host.kill)
            hosts.append(host)
        switch = hosts[0]
        switch.check("ip link add eth0 type bridge && ip link set eth0 up")
        for host in hosts[1:]:
            cable = ["ip", "link", "add", f"to-{host.name}", "netns", str(switch.pid)]
            cable += ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
            subprocess.run(cable, check=True, timeout=60)
            switch.check(f"ip link set to-{host.name} master eth0 up")
        for host in hosts:
            host.check(
                f"ip addr add {host.address}/24 dev eth0 && ip link set eth0 up"
                " && ip route add default via 10.0.0.254"
            )
        yield hosts


# Ray, set up word for word as docs/cluster.md says ------------------------------------------------

PAGE = (ROOT / "docs" / "cluster.md").read_text()

HOLD_ROOM = """
import sys, time
import ray
from ray.util import placement_group_table

@ray.remote
class Room:
    def held(self):
        return True

ray.init("auto", logging_level="ERROR", log_to_driver=False)
rooms = [Room.options(num_cpus=int(cpus)).remote() for cpus in sys.argv[1:]]
ray.get([room.held.remote() for room in rooms])
print("held", flush=True)
while not any(group["state"] == "CREATED" for group in placement_group_table().values()):
    time.sleep(0.2)
"""


def blocks(heading: str) -> list[str]:
    """The commands below a heading of the page, in pieces that are without an empty line."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", PAGE, re.M | re.S)
    return [textwrap.dedent(piece) for piece in re.findall(r"(?:^    .*\n)+", section, re.M)]


def start_ray(hosts: Sequence[Host], num_cpus: Sequence[int]) -> None:
    """On all machines, which have so many CPUs."""
    token, head, other, status = blocks("By hand")
    first = hosts[0]
    first.check(token)
    copied = first.check("cat ~/.ray/auth_token")
    for host in hosts[1:]:
        host.check(f"umask 077 && mkdir ~/.ray && printf %s '{copied}' > ~/.ray/auth_token")
    for host, cpus in zip(hosts, num_cpus, strict=True):
        command = head if host is first else other
        host.check(f"exec >/tmp/node.log 2>&1\n{command.strip()} --num-cpus={cpus} &")
        if host is first:  # which listens before the others join
            wait = f"wait {first.address} 1 60"
            host.check(f". deploy/ray.env\n.venv/bin/python deploy/cluster/nodes.py {wait}")
    deadline = time.monotonic() + 60  # the head hears of a new node a moment later
    while f"0.0/{sum(num_cpus)}.0 CPU" not in (seen := first.check(status)):
        nodes = [host.check("cat /tmp/node.log") for host in hosts]
        assert time.monotonic() < deadline, "\n".join([seen, *nodes])
        time.sleep(1)


def hold_room(host: Host, *num_cpus: int) -> subprocess.Popen[str]:
    """Takes so many CPUs of single machines until a launch has its first place: the trainer's ranks
    have theirs then. Prints "held"."""
    words = " ".join(map(str, num_cpus))
    return host.start(f". deploy/ray.env\n{sys.executable} -c {shlex.quote(HOLD_ROOM)} {words}")
