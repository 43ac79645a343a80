"""A stand-in for the trainer's collectives: an all-gather of one message per rank."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any


class Meeting:
    """Server of one job's all-gathers, in the process that supervises the job."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.is_over = threading.Event()
        """Once set, the ranks end after their current step."""
        self.num_rounds = 0
        self._num_ranks = num_ranks
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(num_ranks)
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name="meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call it when the ranks are gone."""
        for each in [self._listener, *self._connections]:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # was not connected
            finally:
                each.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            while len(self._connections) < self._num_ranks:
                self._connections.append(self._listener.accept()[0])
            files = [connection.makefile("rw") for connection in self._connections]
            while True:
                rounds = [file.readline() for file in files]
                if not all(rounds):
                    return  # a rank was killed
                words = sorted(json.loads(line) for line in rounds)
                self.num_rounds += 1
                reply = json.dumps([[word for _, word in words], self.is_over.is_set()])
                for file in files:
                    file.write(reply + "\n")
                    file.flush()
        except (OSError, ValueError):  # closed, or a line that a kill cut in two
            return


class Seat:
    """One rank's place in the meeting."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(120.0)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rw")
        self.is_over = False

    def share(self, word: Any) -> list[Any]:
        """All messages in rank order. Waits for all ranks; raises EOFError if one is gone."""
        self._file.write(json.dumps([self._rank, word]) + "\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            raise EOFError("a rank of this job is gone")
        words, self.is_over = json.loads(line)
        return list(words)
