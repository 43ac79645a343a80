"""Arguments of a chat template or a renderer: what they change, and those that change nothing."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.renderer import chat_format, check_template_args
from tests.support.rollout import merging_tokenizer

QWEN3 = r"""
{%- for message in messages -%}
{%- set said = message.content -%}
{%- if message.role == 'assistant' and not keeps_thoughts and not loop.last -%}
{%- set said = said.rpartition('</think>')[2].lstrip('\n') -%}
{%- elif message.role == 'assistant' and '</think>' not in said -%}
{%- set said = '<think>\n\n</think>\n\n' + said -%}
{%- endif -%}
{%- if said is string -%}
{{ '<|im_start|>' + message.role + '\n' + said + '<|im_end|>\n' }}
{%- else -%}
{%- for part in said if part.type == 'image' -%}
{{ 'Picture ' + loop.index | string if numbers_pictures }}<image>
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{{- '<think>\n\n</think>\n\n' if false in (enable_thinking, thinking) }}
{%- endif -%}
"""
"""Like Qwen3's."""
QUESTION = Message(role="user", content="1+1?")
CLOSED = "<think>\n\n</think>\n\n"


def tokenizer():
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    made = merging_tokenizer([("1", "2")], specials, QWEN3, eos_token="<|im_end|>")
    tags = ["think", "tool_call", "tool_response"]
    marks = (mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>"))
    made.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return made


def settings(args, **more):
    return TaskConfig(chat_template=True, template_args=args, **more)


@pytest.mark.parametrize("name", [None, "qwen3"])
def test_thoughts_that_are_switched_off_are_closed_in_the_prompt_and_in_no_answer(name):
    made = tokenizer()
    task = settings({"enable_thinking": False}, renderer=name)
    check_template_args(made, task)
    chat = chat_format(made, task)
    usual = chat_format(made, settings({}, renderer=name)).first_prompt([QUESTION])
    prompt = chat.first_prompt([QUESTION])
    assert made.decode(prompt) == made.decode(usual) + CLOSED
    answer = chat.demonstration(Message(role="assistant", content="2"))
    assert made.decode(answer) == "2<|im_end|>"
    behind = made.decode(chat.next_prompt(prompt, answer, [QUESTION]))
    assert behind == made.decode([*prompt, *answer]) + "\n" + made.decode(prompt)


@pytest.mark.parametrize(
    "args",
    [
        {"keeps_thoughts": True},
        {"numbers_pictures": True},
        {"enable_thinking": False, "thinking": False},  # the same, in two models' words
    ],
)
def test_argument_that_only_some_conversations_show_is_one(args):
    check_template_args(tokenizer(), settings(args))


@pytest.mark.parametrize(
    ("args", "renderer", "message"),
    [
        ({"enable_thoughts": False}, None, "enable_thoughts=False: changes nothing in what the ch"),
        ({"enable_thinking": True}, None, "enable_thinking=True: changes nothing in what the chat"),
        (
            {"enable_thinking": False, "keeps_thoughts": False},
            None,
            "keeps_thoughts=False: changes nothing in what the chat template writes: it is no arg",
        ),
        ({"tools": []}, None, "tools: has its value from the run in every call of a template; le"),
        ({"messages": []}, None, "messages: has its value from the run in every call of a templ"),
        ({"enable_thinking": True}, "qwen3", "enable_thinking=True: changes nothing in what qwen3"),
        (
            {"thinking_retention": "none"},
            "qwen3",
            "thinking_retention: the renderer qwen3 has no such argument; it has enable_thinking",
        ),
        ({"reasoning": 1}, "minimax-m2", "reasoning: the renderer minimax-m2 has no such argum"),
    ],
)
def test_argument_that_changes_nothing_or_is_none_is_refused_by_name(args, renderer, message):
    with pytest.raises(ValueError) as refused:
        check_template_args(tokenizer(), settings(args, renderer=renderer))
    assert str(refused.value).startswith(f"task.template_args.{message}")


def test_argument_of_a_wrong_kind_is_refused_with_what_the_renderer_says():
    task = settings({"enable_thinking": ["no"]}, renderer="qwen3")
    with pytest.raises(ValueError, match=r"^task\.template_args=\{'enable_thinking': \['no'\]\}: "):
        chat_format(tokenizer(), task)
