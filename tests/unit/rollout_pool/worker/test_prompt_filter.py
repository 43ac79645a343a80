"""Limits on prompts apply to the tokens that open an episode."""

from __future__ import annotations

import pytest

from configs.choices import OnLongPrompt
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker.prompt_filter import PromptFilter
from trainer_pool.model.scratch import byte_tokenizer

TEMPLATE = """
{%- for message in messages -%}{{ message.role[0] + '>' + message.content }}{%- endfor -%}
{{ 'a>' if add_generation_prompt }}
"""


def filter_of(limit, on_long=OnLongPrompt.refuse, **task):
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    rollout = RolloutConfig(max_prompt_tokens=limit, on_long_prompt=on_long)
    config = TaskConfig(**task)
    chat = ChatFormat(made, chat_template=config.chat_template, tool_parser=config.tool_parser)
    return PromptFilter(chat, config, rollout)


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
    exact = filter_of(len(opening), **task)
    assert bytes(exact.opening(prompt("hi"))) == opening and exact.accepts(prompt("hi"))
    message = rf"rollout.max_prompt_tokens={len(opening) - 1}: prompt 5 has {len(opening)} tokens"
    with pytest.raises(ValueError, match=message):
        filter_of(len(opening) - 1, **task).accepts(prompt("hi"))


def test_prompt_that_may_be_skipped_is_counted_and_the_next_is_given():
    skipping = filter_of(3, OnLongPrompt.skip)
    prompts = iter([prompt("long"), prompt("ok"), prompt("longer"), prompt("abc")])
    assert [read.text for read in filter(skipping.accepts, prompts)] == ["ok", "abc"]
    assert skipping.num_skipped == 2


def test_prompt_of_half_a_surrogate_pair_is_skipped_and_counted(caplog):
    for on_long in OnLongPrompt:
        reads = filter_of(20, on_long)
        assert not reads.accepts(prompt("bad \ud83d end"))
        assert reads.num_skipped == 1 and "prompt 5 is skipped" in caplog.text


def test_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="prompt 5 has no tokens"):
        filter_of(3).accepts(prompt(""))
