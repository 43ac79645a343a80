"""TRL's GRPOTrainer on the same work: a plain synchronous loop with all cores for each phase.

python -m benchmarks.loops.trl_loop WORK FOLDER RIVALS SEED

`FOLDER` holds `model`, the prompts and the rewards; `RIVALS` is where TRL is installed. Writes the
trained model to `FOLDER/trl`, and prints a line of JSON for each step: seconds since the epoch,
mean reward, mean tokens of an answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.loops.work import WORKS, load, prompts_of
from configs.losses import Ppo
from configs.schema import Config
from host.user_code import load_callable
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt, Task


def reward_of(config: Config, task: Task) -> Callable[..., list[float]]:
    """The same reward as a run's, in TRL's form."""
    for reward in config.task.rewards.values():
        score = load_callable(str(reward.function), "task.rewards")
        return lambda completions, **_: [
            score(None, SimpleNamespace(answer=one)) for one in completions
        ]

    def task_score(completions: list[str], index: list[int], **_: Any) -> list[float]:
        asked = (Prompt(index=place, is_held_out=False, text="") for place in index)
        return [*map(task.score, asked, completions)]

    return task_score


def arguments_of(config: Config, folder: Path) -> dict[str, Any]:
    """Settings of GRPOConfig that say what those of a run say."""
    trainer, rollout, loss = config.trainer, config.rollout, config.algorithm.loss
    assert isinstance(loss, Ppo)
    return {
        "output_dir": str(folder / "trl"),
        "seed": config.run.seed,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": trainer.num_steps,
        "per_device_train_batch_size": trainer.groups_per_step * rollout.group_size,
        "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_response_tokens,
        "temperature": rollout.sampling.temperature,
        "shuffle_dataset": False,
        "learning_rate": trainer.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": trainer.lr_warmup_steps,
        "adam_beta1": trainer.adam_beta1,
        "adam_beta2": trainer.adam_beta2,
        "adam_epsilon": trainer.adam_epsilon,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "beta": 0.0,
        "epsilon": loss.clip_low,
        "epsilon_high": loss.clip_high,
        "loss_type": "dapo",  # the mean over all tokens of a step
        "scale_rewards": "group",
    }


class Steps(TrainerCallback):  # type: ignore[misc]
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" in logs:
            tokens = logs["completions/mean_length"]
            step = {"t": time.time(), "reward": logs["reward"], "tokens": tokens}
            print(json.dumps(step), flush=True)


def main() -> None:
    name, folder, rivals, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    sys.path.append(rivals)  # after what is installed here
    trl = importlib.import_module("trl")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = load(WORKS[name], folder)
    config.run.seed = seed
    task = build_task(config.task)
    prompts = prompts_of(config, task)
    columns = {"prompt": [one.text for one in prompts], "index": [one.index for one in prompts]}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=reward_of(config, task),
        train_dataset=Dataset.from_dict(columns),
        args=trl.GRPOConfig(**arguments_of(config, folder)),
        callbacks=[Steps()],
    )
    trainer.train()
    trainer.save_model(str(folder / "trl"))


if __name__ == "__main__":
    main()
