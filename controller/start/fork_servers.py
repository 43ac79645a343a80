"""The fork servers of a run on one machine without a GPU: processes/fork_server.py.

leash launch ── starts, keeps ──► fork servers ── fork ──► guard, controller
                                    ▲     ▲                          │
     keeper ── keeps them, too ─────┘     └── ask for processes      │ starts
       │  so that they outlive a controller,              │          ▼
       │  as the pools do                                 │        keeper
       └─────────────────────────────────► Ray ──► actors ┘

Guard and controller: controller/forked.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.environment import FORK_SERVERS_VARIABLE
from processes import fork_server
from processes.child import kill_group
from processes.fork_server import Kind
from processes.socket_folder import make_socket_folder

_SHARED = ("torch._dynamo", "aiohttp", "redis.asyncio", "uvicorn")
"""Not transformers: SGLang needs it with stubs of what is not installed, which others must not see.
"""
KINDS = (
    Kind(
        programs=["rollout_pool.engines.sglang.server"],
        imports=[
            *_SHARED,
            "rollout_pool.engines.sglang.server",  # the stubs, before sglang
            "sglang.launch_server",
            "sglang.srt.entrypoints.http_server",
            "sglang.srt.entrypoints.openai.serving_responses",  # else each server does
            "sglang.srt.managers.detokenizer_manager",
            "sglang.srt.managers.scheduler",
            "sglang.srt.models.registry",  # every model: else each scheduler does
            "sglang.srt.server_args",
        ],
    ),
    # Without ray itself: it reads its environment when it is imported.
    Kind(
        programs=[
            *("default_worker.py", "weight_sync.receiver.app", "controller.main"),
            *("controller.keeper", "rollout_pool.rewards.process"),
        ],
        imports=[
            *_SHARED,
            "trainer_pool.rank",
            "rollout_pool.worker.build",
            "rollout_pool.tasks.reasoning_gym",  # the quickstart's: with matplotlib, for plots
            "weight_sync.receiver.app",
        ],
    ),
)
_NVIDIA = Path("/dev/nvidiactl")
_END_S = 5.0


@contextlib.contextmanager
def fork_servers(kinds: Sequence[Kind] = KINDS, *, is_eager: bool = True) -> Iterator[None]:
    """Processes that are started meanwhile, by this one and its children, may be forked.

    Does nothing where the servers of another process are in use, or where there is a GPU.
    """
    if FORK_SERVERS_VARIABLE in os.environ or _NVIDIA.exists():
        yield
        return
    folder = make_socket_folder("leash-fork-")
    servers, kept = fork_server.start(folder, kinds, folder / "log", is_eager=is_eager)
    os.environ[FORK_SERVERS_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[FORK_SERVERS_VARIABLE]
        os.close(kept)
        servers.terminate()  # they may be importing still
        with contextlib.suppress(subprocess.TimeoutExpired):
            servers.wait(_END_S)
        kill_group(servers.pid)
        shutil.rmtree(folder, ignore_errors=True)
