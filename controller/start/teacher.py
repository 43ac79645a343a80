"""A teacher that the run serves itself: `task.rewards.NAME.path`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from configs.rollout_schema import TaskConfig
from configs.schema import Config
from rollout_pool.actors.names import TEACHER_KEY
from rollout_pool.engines.kinds import context_length
from rollout_pool.episodes.tokenizer import Tokenizer, load_tokenizer


def check_served_teacher(config: Config, student: Tokenizer) -> None:
    """Raises ValueError if the teacher that the run serves has another vocabulary or is too
    short."""
    if config.task.served_teacher is None:
        return
    name, reward = config.task.served_teacher
    assert reward.path is not None
    what = f"task.rewards.{name}.path={reward.path!r}"
    if not (Path(reward.path) / "config.json").is_file():
        raise ValueError(f"{what}: not a folder with a Hugging Face model; correct it")
    trust = config.model.trust_remote_code
    most = context_length(AutoConfig.from_pretrained(reward.path, trust_remote_code=trust))
    if most is not None and most < config.rollout.longest_trajectory:
        raise ValueError(
            f"{what}: it takes {most} tokens (max_position_embeddings in its config.json), and a "
            f"trajectory may have rollout.max_prompt_tokens + rollout.max_response_tokens="
            f"{config.rollout.longest_trajectory}; lower them, or choose another teacher"
        )
    teacher = load_tokenizer(reward.path, trust_remote_code=trust)
    text = "".join(map(chr, range(32, 127)))
    if len(teacher) != len(student) or teacher.encode(text) != student.encode(text):
        raise ValueError(
            f"{what}: its tokenizer is not the student's ({len(teacher)} and {len(student)} "
            "tokens); choose a teacher with the student's vocabulary"
        )


def with_url(task: TaskConfig, url: str) -> TaskConfig:
    """`task`, where the served teacher has the address of its server."""
    assert task.served_teacher is not None
    name, reward = task.served_teacher
    served = replace(reward, url=url, path=None, api_key_env=TEACHER_KEY)
    return replace(task, rewards={**task.rewards, name: served})
