"""Any rank but the first of the control group's tests; runs in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import TCPStore

from weight_sync.sender.control import ControlError, ControlGroup, Message


def serve(rank: int, num_ranks: int, port: int, timeout_s: float, pipe: Connection) -> None:
    """Replies with the messages it received. Exits with 3, and reports why, when rank 0 is lost."""
    limit = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
    group = ControlGroup(
        store,
        "test",
        rank=rank,
        num_ranks=num_ranks,
        address="127.0.0.1",
        timeout_s=timeout_s,
    )

    def handle(message: Message) -> Message | None:
        if rank in message.get("dying", ()):
            os._exit(9)
        if rank in message.get("sleeping", ()):
            time.sleep(30)
        return None if message["do"] == "close" else {"rank": rank, "heard": message}

    try:
        group.serve(handle)
    except ControlError as error:
        pipe.send(str(error))
        sys.exit(3)
