"""Limits on prompts apply to the tokens that open an episode."""

from __future__ import annotations

import pytest

from configs.choices import OnLongPrompt
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker.loop import PromptReader
from trainer_pool.model.scratch import byte_tokenizer

TEMPLATE = """
{%- for message in messages -%}{{ message.role[0] + '>' + message.content }}{%- endfor -%}
{{ 'a>' if add_generation_prompt }}
"""


def reader(limit, on_long=OnLongPrompt.refuse, **task):
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    rollout = RolloutConfig(max_prompt_tokens=limit, on_long_prompt=on_long)
    config = TaskConfig(**task)
    chat = ChatFormat(made, chat_template=config.chat_template, tool_parser=config.tool_parser)
    return PromptReader(chat, config, rollout)


def prompt(text):
    return Prompt(index=5, is_held_out=False, text=text)


@pytest.mark.parametrize(
    ("task", "opening"),
    [
        ({}, b"hi"),
        ({"system_prompt": "Be."}, b"Be.hi"),
        ({"chat_template": True}, b"u>hia>"),
        ({"chat_template": True, "system_prompt": "Be."}, b"s>Be.u>hia>"),
    ],
)
def test_prompt_is_as_long_as_all_that_opens_its_episode(task, opening):
    exact = reader(len(opening), **task)
    assert bytes(exact.opening(prompt("hi"))) == opening and exact.accepts(prompt("hi"))
    message = rf"rollout.max_prompt_tokens={len(opening) - 1}: prompt 5 has {len(opening)} tokens"
    with pytest.raises(ValueError, match=message):
        reader(len(opening) - 1, **task).accepts(prompt("hi"))


def test_prompt_that_may_be_skipped_is_counted_and_the_next_is_given():
    skipping = reader(3, OnLongPrompt.skip)
    prompts = iter([prompt("long"), prompt("ok"), prompt("longer"), prompt("abc")])
    assert [read.text for read in filter(skipping.accepts, prompts)] == ["ok", "abc"]
    assert skipping.num_skipped == 2


def test_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="prompt 5 has no tokens"):
        reader(3).accepts(prompt(""))
