"""What a tokenizer makes of a task's first words: chat template, lengths, demonstrations.

Workers and the warm start would find the same faults after everything has been started.
"""

from __future__ import annotations

import asyncio
import itertools

from configs.choices import OnLongPrompt
from configs.schema import Config
from controller.start.warm_start import imitate
from rollout_pool.endpoint.agents import find_agent
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.tasks.environments import environment_factory, load_tools
from rollout_pool.tasks.task import Task, TaskStream, demonstrations
from rollout_pool.worker.prompts import PromptReader

NUM_PROMPTS = 32
"""Of the training prompts so many are looked at, and all that are held out."""
NUM_DEMONSTRATIONS = 4


def check_first_words(config: Config, task: Task, tokenizer: Tokenizer) -> None:
    """Raises ValueError for a chat template that is missing or takes no question, prompts that
    `rollout.max_prompt_tokens` refuses, and demonstrations that cannot be had."""
    chat = ChatFormat(
        tokenizer, chat_template=config.task.chat_template, tool_parser=config.task.tool_parser
    )
    _check_prompts(config, task, chat)
    # An environment of the user's own may do anything at its start, so it is left alone.
    if config.task.env is None and find_agent(config.task, task) is None:
        _check_opening(config, task, chat)
    if config.trainer.warm_start.num_steps:
        tools = [tool.spec for tool in load_tools(config.task.tools)]
        for messages in demonstrations(task, NUM_DEMONSTRATIONS):
            imitate(chat, messages, tools)


def _check_prompts(config: Config, task: Task, chat: ChatFormat) -> None:
    reader = PromptReader(chat, config.task, config.rollout)
    for prompt in itertools.islice(TaskStream(task, 0, 1), NUM_PROMPTS):
        reader.accepts(prompt)
    held_out = [reader.accepts(prompt) for prompt in task.eval_prompts()]
    if held_out and not any(held_out):
        raise ValueError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}: every held-out prompt "
            "is longer and would be skipped; raise the limit"
        )


def _check_opening(config: Config, task: Task, chat: ChatFormat) -> None:
    """The first prompt as an episode opens: with the tools that its environment offers."""
    first = asyncio.run(environment_factory(config.task, task)(task.example(0)).reset())
    length, most = len(chat.first(first.messages, first.tools)), config.rollout.max_prompt_tokens
    if length <= most:
        return
    if first.tools or config.rollout.on_long_prompt is OnLongPrompt.refuse:
        tools = f" with the descriptions of {len(first.tools)} tools" if first.tools else ""
        raise ValueError(
            f"rollout.max_prompt_tokens={most}: prompt 0{tools} has {length} tokens; raise the "
            "limit"
        )
