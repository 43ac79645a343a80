"""Starts a worker process of Ray by a fork server, in the place of Ray's own setup_worker.py.

Raylet runs it as `ray_worker.py --serialized-runtime-env-context=<JSON> ... <script> <arguments>`.
Without a fork server it becomes Ray's own, which this file imports nothing heavy to avoid.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys

from processes import fork_server

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""Meant for the set-up, not for the worker."""


def main(words: list[str]) -> None:
    environment = dict(os.environ)
    command = [sys.executable]
    for word in words:
        if word.startswith(_CONTEXT):
            environment |= json.loads(word.removeprefix(_CONTEXT))["env_vars"]
        elif not word.startswith(_LANGUAGE):
            command.append(word)
    environment.setdefault("OMP_NUM_THREADS", "1")  # as Ray would, but before torch is there
    if fork_server.fork(command, environment, (0, 1, 2)) is None:
        _become_rays_own(words)


def _become_rays_own(words: list[str]) -> None:
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    folder = os.path.join(os.path.dirname(ray.origin), "_private", "workers")
    os.execv(sys.executable, [sys.executable, os.path.join(folder, "setup_worker.py"), *words])


if __name__ == "__main__":
    main(sys.argv[1:])
