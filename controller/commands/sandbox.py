"""`make sandbox`: runs programs of the model for rewards of runs on other machines."""

from __future__ import annotations

import os
from collections.abc import Sequence

import uvicorn

from configs.load import load_config
from configs.rollout_schema import RewardConfig, TaskConfig
from controller.start.sandboxes import check_sandbox
from host.http_server import HttpLimits, ServerConfig
from host.network import is_loopback, listen
from rollout_pool.rewards.code_tests import languages_of, limits_of, local_sandbox
from rollout_pool.sandbox.app import Language, make_app

CLOSE_S = 1


def serve_sandbox(
    overrides: Sequence[str], experiment: str, *, host: str, port: int, key_env: str | None
) -> None:
    """Serves the languages of the task's rewards until a signal.

    Raises ValueError for a reward that this machine cannot run, an address that others reach
    without a key, and OSError for one that is taken.
    """
    key = os.environ.get(key_env, "") if key_env else ""
    if key_env and not key:
        raise ValueError(f"--key-env={key_env!r}: there is no such environment variable; set it")
    if not key and not is_loopback(host):
        raise ValueError(
            f"--host={host!r}: other machines could run programs here; name the environment "
            "variable of a key, --key-env=NAME (make: KEY_ENV=NAME), or leave the host out"
        )
    languages = _languages(load_config(overrides, experiment).task)
    listener, url = listen(host, port)
    print(f"sandbox at {url} for {', '.join(languages)}; Ctrl-C ends it", flush=True)
    config = ServerConfig(make_app(languages, key), HttpLimits(), close_s=CLOSE_S)
    uvicorn.Server(config).run(sockets=[listener])


def _languages(config: TaskConfig) -> dict[str, Language]:
    languages: dict[str, Language] = {}
    by_name: dict[str, RewardConfig] = {}
    for task in config.by_name.values():
        check_sandbox(task)
        for part, reward in task.rewards.items():
            setting = f"task.rewards.{part}"
            if not reward.runs_tests:
                continue
            if reward.url is not None:
                raise ValueError(
                    f"{setting}.url={reward.url!r}: this sandbox runs the programs; leave it out"
                )
            served = Language(sandbox=local_sandbox(reward, setting), limits=limits_of(reward))
            for name in languages_of(reward):
                if by_name.setdefault(name, reward) != reward:
                    raise ValueError(
                        f"{setting}.languages: {name} is the name of another reward's language "
                        "too; serve each by a sandbox of its own"
                    )
                languages[name] = served
    if not languages:
        raise ValueError(
            "task.rewards: no part has kind=code_tests, so no program would be run; use task=code"
        )
    return languages
