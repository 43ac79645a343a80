"""Looks at what a run is given before anything is started, so that bad input costs seconds."""

from __future__ import annotations

import os

import torch

from configs.schema import Config
from controller.plan import make_plan
from rollout_pool.prompts import load_tokenizer
from rollout_pool.tasks.task import build_task


def check_inputs(config: Config) -> None:
    """Raises ValueError for a task, a model or a number of GPUs that cannot be had."""
    if config.cluster.ray_address is None:
        make_plan(config, torch.cuda.device_count(), os.cpu_count() or 1)
    build_task(config.task)
    if config.model.path is not None:
        load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
