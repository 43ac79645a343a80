"""Parsing valid and broken tool calls."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from configs.choices import ToolParser
from rollout_pool.episodes.tool_calls import parse_tool_calls


def hermes(text):
    return parse_tool_calls(ToolParser.hermes, text)


def llama3(text):
    return parse_tool_calls(ToolParser.llama3_json, text)


def calls_of(parsed):
    return list(parsed.calls)


def test_several_hermes_calls_are_taken_in_order_with_the_text_around_them():
    parsed = hermes(
        'First.\n<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>\nThen.'
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
    )
    assert calls_of(parsed) == [("find", {"q": "x"}), ("add", {"a": 1, "b": [2]})]
    assert parsed.content == "First.\n\nThen." and parsed.bad_call is None


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f", "arguments": {}, "id": 7, "why": null}', {}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": " f ", "arguments": {"code": "a\nb"}}', {"code": "a\nb"}),
        ('{"name": "f", "arguments": {"s": "</tool_call><tool_call>"}}', None),
    ],
)
def test_unambiguous_calls_are_accepted(written, arguments):
    expected = {"s": "</tool_call><tool_call>"} if arguments is None else arguments
    for text in (f"<tool_call>{written}</tool_call>", f"<tool_call>\n{written}"):
        parsed = hermes(text)
        assert calls_of(parsed) == [("f", expected)] and parsed.bad_call is None
        assert parsed.content == ""


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ('{"name": "f", "argum', r"not valid JSON \((Expecting|Unterminated).*argum'$"),
        ("", r"not valid JSON \(Expecting value"),
        ("[1, 2]", r"a call must be a JSON object, not \[1, 2\]"),
        ('{"arguments": {}}', r'a call must have a "name"'),
        ('{"name": 3}', r'a call must have a "name"'),
        ('{"name": "  "}', r'a call must have a "name"'),
        ('{"name": "f", "arguments": [1]}', r'the arguments of "f" must be a JSON object: \[1\]'),
        ('{"name": "f", "arguments": "3"}', r'the arguments of "f" must be a JSON object: 3'),
        ('{"name": "f", "arguments": "oops"}', r"not valid JSON .*oops"),
        ('{"name": "f", "arguments": {"x": NaN}}', r"NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', r"a lone surrogate"),
        ("[" * 100_000, r"nested too deeply"),
        ('{"name": "f", "arguments": ' + '{"a":' * 100_000, r"nested too deeply"),
    ],
)
def test_invalid_call_says_why_and_leaves_other_calls_valid(written, reason):
    good = '<tool_call>{"name": "g"}</tool_call>'
    for text in (f"<tool_call>{written}</tool_call>!", f"<tool_call>{written}</tool_call>{good}"):
        parsed = hermes(text)
        assert parsed.bad_call is not None and re.search(reason, parsed.bad_call)
        assert calls_of(parsed) == ([("g", {})] if good in text else [])


def test_text_after_an_unclosed_call_is_reported_and_the_next_call_is_found():
    parsed = hermes('<tool_call>{"name": "f"} so <tool_call>{"name": "g"}</tool_call> done')
    assert calls_of(parsed) == [("f", {}), ("g", {})]
    assert parsed.bad_call == "there is text between a call and its </tool_call>"
    assert parsed.content == "done"


def test_thoughts_hold_no_calls():
    call = '<tool_call>{"name": "f"}</tool_call>'
    for text in (f"<think>{call}", f"<think>say {call}?</think>No.", f"{call}</think> 7"):
        assert hermes(text).calls == () and hermes(text).content == text
    parsed = hermes(f"<think>{call}</think>Yes. {call}")
    assert calls_of(parsed) == [("f", {})]
    assert parsed.content == f"<think>{call}</think>Yes."


@pytest.mark.parametrize("parser", ToolParser)
@pytest.mark.parametrize("text", ["", " 42 \n", '{"answer": 3}', '{"name": "Ada", "age": 36}', "{"])
def test_answer_without_calls_is_left_as_it_is(parser, text):
    parsed = parse_tool_calls(parser, text)
    assert (parsed.content, parsed.calls, parsed.bad_call) == (text, (), None)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})], ""),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})], ""),
        ('<|python_tag|>{"name": "f"}', [("f", {})], ""),
        ('So: <|python_tag|>{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})], "So:"),
        (
            '{"name": "f", "parameters": {"a": ";"}}; {"name": "g", "parameters": {}};',
            [("f", {"a": ";"}), ("g", {})],
            "",
        ),
        ('<|python_tag|>{"name": "f"}; <|python_tag|>{"name": "g"}', [("f", {}), ("g", {})], ""),
        (
            '{"name": "f", "parameters": {}}; <|python_tag|>{"name": "g"}',
            [("f", {}), ("g", {})],
            "",
        ),
        ('{"type": "function", "name": "f", "parameters": {}} ok?', [("f", {})], "ok?"),
    ],
)
def test_llama3_calls(text, calls, content):
    parsed = llama3(text)
    assert calls_of(parsed) == calls and parsed.bad_call is None and parsed.content == content


@pytest.mark.parametrize(
    ("text", "num_calls", "content"),
    [
        ("wait <|python_tag|>print(1)", 0, "wait"),
        ('{"name": "f", "parameters": {"a": ', 0, '{"name": "f", "parameters": {"a":'),
        ('{"name": "f", "parameters": 3}', 0, '{"name": "f", "parameters": 3}'),
        ('<|python_tag|>{"name": "f"}; {"name": ', 1, ""),
        ("<|python_tag|>" + "[" * 100_000, 0, ""),
    ],
)
def test_broken_llama3_call_says_why(text, num_calls, content):
    parsed = llama3(text)
    assert len(parsed.calls) == num_calls and parsed.bad_call and parsed.content == content


TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>")
PARTS = ('{"name": "f"', ', "arguments": {"a": 1}}', ', "parameters": "{}"}', *'{}[;,"\\\n')
PIECES = st.sampled_from((*TAGS, *PARTS))


@given(
    st.sampled_from(ToolParser),
    st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=3))).map("".join)),
)
@example(ToolParser.llama3_json, '{"name": "f", "parameters": {"a": 1}}')
def test_parser_never_raises_and_its_calls_can_be_encoded(parser, text):
    parsed = parse_tool_calls(parser, text)
    for name, arguments in parsed.calls:
        assert name and json.dumps(arguments, ensure_ascii=False).encode()
    if not parsed.calls and parsed.bad_call is None:
        assert parsed.content == text


NAMES = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name == name.strip())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES, max_size=3)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3))
def test_well_formed_calls_round_trip(calls):
    as_hermes = "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"
        for name, arguments in calls
    )
    as_llama3 = "; ".join(
        json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
        for name, arguments in calls
    )
    if "</think>" not in as_hermes:
        assert calls_of(hermes(as_hermes)) == calls
    if "</think>" not in as_llama3 and "<|python_tag|>" not in as_llama3:
        assert calls_of(llama3(as_llama3)) == calls
