"""One sending rank as a process of its own, led by lines of JSON on its standard input.

{"do": "join", "spec": {...}, "timeout_s"}                          -> {} or {"error": ...}
{"do": "send", "version", "base_version", "first", ...}             -> {} or {"error": ...}
  "halt_at": k   says {"at": k} before the k-th of its buckets and waits for a line
  "flip_at": k   changes one bit of its k-th bucket
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec
import torch
from torch import Tensor
from wire_model import make_transfer, model_layout, wire_stream

from configs.schema import WeightSyncConfig
from weight_sync.buckets import plan_buckets
from weight_sync.group_thread import Staging
from weight_sync.sender.rank import Sender
from weight_sync.types import GroupSpec, WeightSyncError

DEVICE = torch.device("cpu")
_replies = os.fdopen(os.dup(1), "w")


def say(reply: dict[str, Any]) -> None:
    _replies.write(json.dumps(reply) + "\n")
    _replies.flush()


class _TamperedStaging(Staging):
    """Holds up one bucket, or spoils it."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(WeightSyncConfig().num_buffers, DEVICE)
        self._halt_at = order.get("halt_at")
        self._flip_at = order.get("flip_at")

    def upload(self, turn: int, part: Tensor) -> Tensor:
        if turn == self._halt_at:
            say({"at": turn})
            sys.stdin.readline()
        if turn == self._flip_at:
            part = part.clone()
            part[part.numel() // 2] ^= 4
        return super().upload(turn, part)


def main() -> None:
    os.dup2(2, 1)  # gloo writes to standard output
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    sender = Sender(rank, WeightSyncConfig(), DEVICE)
    layout = model_layout(1)
    say({"ready": rank})
    while line := sys.stdin.readline():
        order = json.loads(line)
        try:
            match order["do"]:
                case "join":
                    sender.group_thread.leave()
                    spec = msgspec.convert(order["spec"], GroupSpec)
                    layout = model_layout(spec.num_senders)
                    config = WeightSyncConfig(timeout_s=order["timeout_s"])
                    sender = Sender(rank, config, DEVICE)
                    sender.group_thread.join(spec, rank)
                case "send":
                    version, base = order["version"], order["base_version"]
                    sender.group_thread.staging = _TamperedStaging(order)
                    buckets = plan_buckets(layout, make_transfer(layout, version, base))
                    stream = wire_stream(layout, rank, version, base)
                    sender.send(buckets, stream, order["first"])
            say({})
        except WeightSyncError as error:
            say({"error": str(error)})


if __name__ == "__main__":
    main()
