"""Stands in for the dashboard agent of a Ray on one machine, which nothing here asks.

Raylet starts an agent whatever the options, waits for its ports, and ends with it. Ray's own
imports for seconds, and from then on gathers figures of all processes for a dashboard that does not
run. This one says that it serves nothing, as Ray's own does where its packages are missing:
`no_agent.py <Ray's agent.py> --session-dir=<folder> --node-id=<id> ...`.
"""

import os
import signal
import sys

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Names of the files in which raylet looks for them."""
NONE = "-1"


def main(words: list[str]) -> None:
    options = dict(word.split("=", 1) for word in words if "=" in word)
    for name in PORTS:
        path = f"{options['--session-dir']}/{name}_{options['--node-id']}"
        with open(f"{path}.new", "w") as file:
            file.write(NONE)
        os.rename(f"{path}.new", path)  # whole or not there
    signal.pause()


if __name__ == "__main__":
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with raylet
    if os.getppid() != 1:
        main(sys.argv[1:])
