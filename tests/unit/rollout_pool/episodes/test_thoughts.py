from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.thoughts import ThoughtStream, divide, join_thoughts, without_thoughts

CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("text", "are_open", "thoughts", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\n 7 ", False, "hm\n\nso", "7 "),
        ("  <think>hm</think>7", False, "hm", "7"),
        (f"{CLOSED}7", False, "", "7"),
        ("hm\n</think>\n7", True, "hm", "7"),
        ("<think>hm</think>7", True, "hm", "7"),
        ("</think>7", True, "", "7"),
        ("<think>hm</thi", False, "hm</thi", ""),
        ("hm", True, "hm", ""),
        ("  7\n", False, "", "  7\n"),
        ("<thin", False, "", "<thin"),
        ("7 </think> 8", False, "", "7 </think> 8"),
        ("<think>a</think>b</think> c", False, "a", "b</think> c"),
        ("", True, "", ""),
    ],
)
def test_text_is_divided_into_thoughts_and_content(text, are_open, thoughts, content):
    assert divide(text, are_open=are_open) == (thoughts, content)
    if not are_open and text.startswith("<think>") and thoughts:
        assert divide(join_thoughts(thoughts, content)) == (thoughts, content)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", "a", " ", "\n", "<", "nk>"])),
    st.booleans(),
)
def test_text_that_comes_in_pieces_is_divided_as_the_whole_one(pieces, are_open):
    stream, said = ThoughtStream(are_open=are_open), []
    for piece in pieces:
        said.append(stream.feed(piece, is_end=False))
    said.append(stream.feed("", is_end=True))
    together = tuple("".join(one[place] for one in said) for place in (0, 1))
    assert together == divide("".join(pieces), are_open=are_open)


def test_thoughts_come_as_soon_as_they_cannot_be_their_end():
    stream = ThoughtStream(are_open=False)
    fed = [stream.feed(one, is_end=False) for one in ("<thi", "nk>a", " b", " </t", "hink>", " c")]
    assert fed == [("", ""), ("a", ""), (" b", ""), ("", ""), ("", ""), ("", "c")]


def test_thoughts_before_the_last_question_are_left_out():
    roles = ("user", "assistant", "user", "assistant", "tool", "assistant")
    texts = ("1?", "<think>hm\n</think>\n\n1", "2?", "<think>so</think>", "x", "<think>so</think>2")
    messages = [Message(role=r, content=t) for r, t in zip(roles, texts, strict=True)]
    shown = [message.content for message in without_thoughts(messages)]
    assert shown == ["1?", "1", *texts[2:]]
    assert without_thoughts(messages[:2]) == messages[:2]
    for said in ("<think>hm</think>Write `</think>` to end it.", "Write `</think>` to end it."):
        answer = [Message(role="assistant", content=said), messages[0]]
        assert without_thoughts(answer)[0].content == "Write `</think>` to end it."
    more = [*messages, Message(role="user", content="3?")]
    assert [m.content for m in without_thoughts(more)] == ["1?", "1", "2?", "", "x", "2", "3?"]
