"""A teacher that the run serves itself, on one machine without GPUs: `task.rewards.NAME.path`."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

from buffer.loop_thread import LoopThread
from configs.choices import PauseMode, RewardKind
from configs.rollout_schema import RewardConfig
from configs.schema import Config
from controller.ray_environment import LOOPBACK
from controller.watch.supervise import RunFailed, failure
from processes.leftovers import list_path
from rollout_pool.engines.engine import EngineSpec, SGLangEngine
from rollout_pool.episodes.tokenizer import Tokenizer, load_tokenizer

KEY_VARIABLE = "LEASH_TEACHER_KEY"
NAME = "teacher"


def served_teacher(config: Config) -> tuple[str, RewardConfig] | None:
    """The part of the reward whose teacher the run serves, with its name; None without one."""
    for name, reward in config.task.rewards.items():
        if reward.kind is RewardKind.teacher and reward.path is not None:
            return name, reward
    return None


def check_served_teacher(config: Config, *, uses_gpu: bool, student: Tokenizer) -> None:
    """Raises ValueError if this run cannot serve its teacher, or if that has another vocabulary."""
    found = served_teacher(config)
    if found is None:
        return
    name, reward = found
    what = f"task.rewards.{name}.path={reward.path!r}"
    if uses_gpu or config.cluster.ray_address is not None:
        where = "in a Ray cluster" if config.cluster.ray_address is not None else "with GPUs"
        raise ValueError(
            f"{what}: {where} the run serves no teacher; start a server for it (python -m "
            f"sglang.launch_server --model-path {reward.path}) and set task.rewards.{name}.url"
        )
    assert reward.path is not None
    if not (Path(reward.path) / "config.json").is_file():
        raise ValueError(f"{what}: not a folder with a Hugging Face model; correct it")
    teacher = load_tokenizer(reward.path, trust_remote_code=config.model.trust_remote_code)
    text = "".join(map(chr, range(32, 127)))
    if len(teacher) != len(student) or teacher.encode(text) != student.encode(text):
        raise ValueError(
            f"{what}: its tokenizer is not the student's ({len(teacher)} and {len(student)} "
            "tokens); choose a teacher with the student's vocabulary"
        )


class ServedTeacher:
    """Its server, a child of the controller: it ends with the controller, and the run with it."""

    def __init__(self, config: Config, run_dir: Path, log_path: Path) -> None:
        """Starts the server. Raises EngineError with the end of its log if it does not start."""
        found = served_teacher(config)
        assert found is not None and found[1].path is not None
        name, reward = found
        self._what = f"of task.rewards.{name}.path={reward.path!r}"
        self._log = log_path
        key = os.environ[KEY_VARIABLE] = secrets.token_urlsafe(32)
        spec = EngineSpec(
            name=NAME,
            config=config.rollout.engine,
            pause_mode=PauseMode.resubmit,
            model_path=str(reward.path),
            trust_remote_code=config.model.trust_remote_code,
            host=LOOPBACK,
            log_path=log_path,
            leftovers_path=list_path(run_dir, NAME),
            num_threads=1,
            uses_gpu=False,
            seed=0,
            key=key,
        )
        self._loop, self._engine = LoopThread(NAME), SGLangEngine(spec)
        try:
            info = self._loop.run(self._engine.start())
        except BaseException:
            self.stop()
            raise
        served = replace(reward, url=info.url, path=None, api_key_env=KEY_VARIABLE)
        self.task = replace(config.task, rewards={**config.task.rewards, name: served})
        """The run's, with the address of the server."""

    async def death(self) -> RunFailed:
        """Returns when the server has ended; in any event loop."""
        code = await self._engine.wait_dead()
        what = f"{self._what} died (exit code {code}); a resumed run serves it again"
        return failure(NAME, what, self._log)

    def stop(self) -> None:
        self._loop.stop(self._engine.stop())
