"""Programs that stand for `ssh`, `srun` and `scontrol` on the machines of hosts.py.

A pid namespace cannot be entered from its neighbour, so a program hands its three streams and the
command to the test through a socket in the shared folder, and the test starts it there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.hosts import Host

PROGRAM = f"""#!{sys.executable}
import json, os, shlex, signal, socket, sys

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
if name == "scontrol":
    with open(folder + "/scontrol.calls", "a") as calls:
        print(*words, file=calls)
    print(*words[2].split(",") if words[1] == "hostnames" else ["JobState=RUNNING"], sep="\\n")
    sys.exit()
if words[0] == "-G":
    sys.exit(print("hostname", words[1]))
if name == "ssh":  # which gives the command no variable
    ask = {{"host": words[-2], "command": words[-1], "environment": {{}}}}
else:
    (host,) = [word.partition("=")[2] for word in words if word.startswith("--nodelist=")]
    command = shlex.join(word for word in words if not word.startswith("--"))
    ask = {{"host": host, "command": "exec " + command, "environment": dict(os.environ)}}
test = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
test.connect(folder + "/socket")
signal.signal(signal.SIGTERM, lambda *_: test.send(b"SIGTERM"))
socket.send_fds(test, [json.dumps(ask).encode()], [0, 1, 2])
sys.exit(int(test.recv(16)))
"""


class ReachedHosts:
    """`path` is the folder of the programs; `close` when the machines are gone."""

    def __init__(self, hosts: Sequence[Host], path: Path) -> None:
        self.path = path
        self._hosts = {host.address: host for host in hosts}
        path.mkdir()
        for name in ("ssh", "srun", "sbatch", "scontrol"):
            (path / name).write_text(PROGRAM)
            (path / name).chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path / "socket"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def calls_of_scontrol(self) -> list[str]:
        return (self.path / "scontrol.calls").read_text().splitlines()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            message, streams, _, _ = socket.recv_fds(connection, 1 << 17, 3)
            ask = json.loads(message)
            host = self._hosts[ask["host"]]
            process = host.start(ask["command"], ask["environment"], streams)
            for stream in streams:
                os.close(stream)
            threading.Thread(target=self._pass_on, args=(connection, process), daemon=True).start()
            code = process.wait()
            connection.send(str(code).encode())

    def _pass_on(self, connection: socket.socket, process: subprocess.Popen[str]) -> None:
        """Its SIGTERM, and to the command SIGHUP when the program that stands for it is gone."""
        try:
            while connection.recv(16):
                self._signal(process, signal.SIGTERM)
            self._signal(process, signal.SIGHUP)
        except (OSError, psutil.NoSuchProcess):
            return  # it has ended

    def _signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        for child in psutil.Process(process.pid).children():  # `nsenter` passes none on
            child.send_signal(number)
