"""Helps the launchers: `address NAME...` prints this machine's address on the way to the first of
these, `wait HEAD NUMBER SECONDS` returns when so many Ray nodes are alive."""

import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def address(*names: str) -> None:
    from host.network import is_loopback, own_address_towards

    own = [own_address_towards(name) for name in names]
    for name, towards in zip(names, own, strict=True):
        if is_loopback(towards) or towards == socket.getaddrinfo(name, None)[0][4][0]:
            print(f"{name} is this machine, the head; name only the others", file=sys.stderr)
            sys.exit(3)  # an error of Python itself is 1
    print(own[0])


def wait(head: str, number: str, seconds: str) -> None:
    deadline, alive = time.monotonic() + float(seconds), -1
    while alive < int(number):
        if time.monotonic() > deadline:
            sys.exit(f"{max(alive, 0)} of {number} Ray nodes are there after {seconds} s")
        time.sleep(0.5)
        try:
            if alive < 0:  # Ray's own attempt without a listening head takes long to fail
                socket.create_connection((head, 6379), timeout=5).close()
                import ray

                ray.init(f"{head}:6379", logging_level="ERROR", log_to_driver=False)
            alive = sum(node["Alive"] for node in ray.nodes())
        except (OSError, RuntimeError):
            continue


if __name__ == "__main__":
    {"address": address, "wait": wait}[sys.argv[1]](*sys.argv[2:])
