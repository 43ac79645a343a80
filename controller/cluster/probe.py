"""Looks at one machine of a cluster for the others: its facts, its clock, and whether and how fast
it reaches them. Runs there as an actor.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from controller.cluster.facts import Asked, NodeFacts, node_facts
from host.network import listen

CONNECT_S = 5.0
SILENCE_S = 10.0
"""Longest wait for the next bytes of a transfer."""
TRANSFER_BYTES = 64 * 2**20
TRANSFER_S = 1.0
_PIECE = bytes(2**20)
_MOST_CONNECTING = 64


class Probe:
    """Its listener takes bytes from anybody and drops them; it closes with the process."""

    def look(self, asked: Asked, address: str, num_cpus: float, num_gpus: float) -> NodeFacts:
        return node_facts(asked, address, num_cpus, num_gpus)

    def clock(self) -> float:
        return time.time()

    def open_port(self, address: str) -> int:
        """Returns the number of a free port at which it listens from now on."""
        listener, _ = listen(address, 0)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def unreached(self, places: Sequence[tuple[str, int]]) -> list[int]:
        """Numbers of those to which it cannot connect."""

        def fails(place: tuple[str, int]) -> bool:
            try:
                socket.create_connection(place, timeout=CONNECT_S).close()
            except OSError:
                return True
            return False

        with ThreadPoolExecutor(_MOST_CONNECTING) as threads:
            failed = [*threads.map(fails, places)]
        return [number for number, is_failed in enumerate(failed) if is_failed]

    def send(self, place: tuple[str, int]) -> float | None:
        """Bytes per second of one connection; None if it fails. Takes about a second at most, or
        until the last piece has arrived."""
        with contextlib.suppress(OSError), socket.create_connection(place, CONNECT_S) as stream:
            stream.settimeout(SILENCE_S)
            began, sent = time.perf_counter(), 0
            with contextlib.suppress(TimeoutError):  # so slow that it is to be known
                while sent < TRANSFER_BYTES and time.perf_counter() < began + TRANSFER_S:
                    sent += stream.send(_PIECE)
                stream.shutdown(socket.SHUT_WR)
                stream.recv(1)  # it closes when it has all
            return sent / (time.perf_counter() - began)
        return None


def _accept(listener: socket.socket) -> None:
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=_drain, args=(stream,), daemon=True).start()


def _drain(stream: socket.socket) -> None:
    space = bytearray(len(_PIECE))
    with contextlib.suppress(OSError), stream:
        stream.settimeout(SILENCE_S)
        while stream.recv_into(space):
            pass
