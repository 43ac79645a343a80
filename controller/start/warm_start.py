"""Turns a task's demonstrations into token ids for the trainer's warm start."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from configs.schema import Config
from rollout_pool.episodes.conversation import Message, ToolSpec, TrainableChat
from rollout_pool.episodes.renderer import chat_format
from rollout_pool.episodes.tokenizer import load_tokenizer
from rollout_pool.tasks.env_episodes import tools_shown
from rollout_pool.tasks.mixture import for_each_member, member_of
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import demonstrations
from trainer_pool.types import SupervisedExample


def supervised_examples(config: Config, model_path: str) -> list[SupervisedExample]:
    """The examples of all warm-start steps. Raises ValueError for a bad task or model."""
    tokenizer = load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
    chat = chat_format(tokenizer, config.task)  # which refuses pictures
    task, warm_start = build_task(config.task), config.trainer.warm_start
    tools = for_each_member(config.task, task, lambda _, one, member: tools_shown(one, member))
    draw = random.Random(config.run.seed)
    examples = []
    for prompt, messages in demonstrations(task, warm_start.num_steps * warm_start.batch_size):
        if draw.random() < warm_start.echo_fraction:
            messages = echo(messages)
        own = tools[member_of(task, prompt)[0]]
        examples.append(imitate(chat, messages, own, num_given=len(prompt.conversation)))
    return examples


def echo(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with its last answer replaced by the message before it."""
    if len(messages) < 2:
        return messages  # `imitate` rejects it
    *before, last = messages
    return (*before, dataclasses.replace(last, content=before[-1].content, tool_calls=()))


def imitate(
    chat: TrainableChat,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    num_given: int = 0,
) -> SupervisedExample:
    """Tokens of a conversation as an episode would produce them; the assistant's are learnt, but
    for those of the first `num_given` messages, which the episode begins with.

    Example: "ab =" "ba" "+ c =" "cba" gives, with e for the token that ends an answer,

        tokens      a b   = b a e +   c   = c b a e
        loss_mask   0 0 0 0 1 1 1 0 0 0 0 0 1 1 1 1

    Raises ValueError if it does not begin with another role and end with the assistant.
    """
    if not messages or messages[0].role == "assistant" or messages[-1].role != "assistant":
        raise ValueError(
            "task.factory: a demonstration must begin with a system or user message and end with "
            f"an assistant message; the roles of this one are {', '.join(m.role for m in messages)}"
        )
    tokens: list[int] = []
    prompt: list[int] = []
    answer: list[int] = []
    loss_mask: list[int] = []
    pending: list[Message] = [*messages[:num_given]]
    for message in messages[num_given:]:
        if message.role != "assistant":
            pending.append(message)
            continue
        if answer:
            prompt = chat.next_prompt(prompt, answer, pending, tools)
        else:
            prompt = chat.first_prompt(pending, tools)
        answer = chat.demonstration(message, tools)
        loss_mask += [0] * (len(prompt) - len(loss_mask)) + [1] * len(answer)
        tokens = [*prompt, *answer]
        pending = []
    return SupervisedExample(
        tokens=np.array(tokens, np.int32), loss_mask=np.array(loss_mask, np.uint8)
    )
