"""Turns a task's own answers into token ids for the trainer's warm start."""

from __future__ import annotations

import numpy as np

from configs.schema import Config
from rollout_pool.prompts import load_tokenizer, tokenize_prompt, tokenize_solution
from rollout_pool.tasks.task import build_task, supervised_texts
from trainer_pool.types import SupervisedExample


def supervised_examples(config: Config, model_path: str) -> list[SupervisedExample]:
    """As many examples as the warm start will see. Raises ValueError for a bad task or model."""
    tokenizer = load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
    warm_start = config.trainer.warm_start
    examples = []
    for prompt, solution in supervised_texts(
        build_task(config.task), warm_start.num_steps * warm_start.batch_size
    ):
        question = tokenize_prompt(tokenizer, prompt, chat_template=config.task.chat_template)
        answer = tokenize_solution(tokenizer, solution)
        examples.append(
            SupervisedExample(
                tokens=np.array(question + answer, np.int32),
                loss_mask=np.array([0] * len(question) + [1] * len(answer), np.uint8),
            )
        )
    return examples
