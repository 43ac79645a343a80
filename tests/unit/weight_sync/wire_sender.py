"""One sending rank as a process of its own, led by lines of JSON on its standard input.

{"do": "join", "spec": {...}, "timeout_s"}                          -> {} or {"error": ...}
{"do": "send", "version", "base_version", "first", ...}             -> {} or {"error": ...}
  "halt_at": k   says {"at": k} before the k-th of its buckets and waits for a line
  "flip_at": k   changes one bit of its k-th bucket
{"do": "leave"}                                                     -> {}
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
from weight_sync.sender.rank import Sender
from weight_sync.staging import Staging
from weight_sync.types import GroupSpec, WeightSyncError

_replies = os.fdopen(os.dup(1), "w")


def say(reply: dict[str, Any]) -> None:
    _replies.write(json.dumps(reply) + "\n")
    _replies.flush()


class _TamperedStaging(Staging):
    """Holds up one bucket, or spoils it."""

    halt_at: int | None = None
    flip_at: int | None = None

    def upload(self, turn: int, part: Tensor) -> Tensor:
        if turn == self.halt_at:
            say({"at": turn})
            sys.stdin.readline()
        if turn == self.flip_at:
            part = part.clone()
            part[part.numel() // 2] ^= 4
        return super().upload(turn, part)


def main() -> None:
    os.dup2(2, 1)  # gloo writes to standard output
    torch.set_num_threads(1)
    rank, device = int(sys.argv[1]), torch.device("cpu")
    sender = Sender(rank, WeightSyncConfig(), device)
    layout = model_layout(1)
    say({"ready": rank})
    while line := sys.stdin.readline():
        order = json.loads(line)
        try:
            match order["do"]:
                case "join":
                    sender.leave()
                    spec = msgspec.convert(order["spec"], GroupSpec)
                    layout = model_layout(spec.num_senders)
                    config = WeightSyncConfig(timeout_s=order["timeout_s"])
                    sender = Sender(rank, config, device)
                    sender.join(spec)
                case "send":
                    version, base = order["version"], order["base_version"]
                    staging = sender._staging = _TamperedStaging(config.num_buffers, device)
                    staging.halt_at = order.get("halt_at")
                    staging.flip_at = order.get("flip_at")
                    buckets = plan_buckets(layout, make_transfer(layout, version, base))
                    stream = wire_stream(layout, rank, version, base)
                    sender.send(buckets, stream, order["first"])
                case "leave":
                    sender.leave()
            say({})
        except WeightSyncError as error:
            say({"error": str(error)})


if __name__ == "__main__":
    main()
