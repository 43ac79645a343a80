"""Names sorted over several turns."""

from __future__ import annotations

import itertools

import pytest

from configs.choices import TaskKind
from configs.load import load_config
from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Completion
from rollout_pool.tasks.alphabet_sort import FAMILY_NAMES, FIRST_NAMES, fraction_in_place
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream

SHORT = {"num_turns": 3, "num_names_first": 2, "num_names_more": 1, "last_names": False}


def sort_task(**changes):
    return build_task(
        TaskConfig(
            **{
                "kind": TaskKind.alphabet_sort,
                "params": SHORT,
                "max_turns": 3,
                "eval_size": 20,
                **changes,
            }
        )
    )


def said(text):
    return Completion(text=text, content=text)


def test_demonstration_sorts_all_names_so_far_at_each_turn():
    task = sort_task()
    for prompt in itertools.islice(TaskStream(task, 0, 1), 20):
        messages = task.demonstration(prompt)
        assert [m.role for m in messages] == ["user", "assistant"] * 3
        assert messages[0].content == prompt.text
        so_far = []
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            words = question.content.split()
            so_far += [word for word in words if word not in "+="]
            assert words[-1] == "=" and (words[0] == "+") is (question is not messages[0])
            assert answer.content == " ".join(sorted(so_far))
        assert len(so_far) == len(set(so_far)) == 4
        assert task.solution(prompt) == messages[-1].content
        assert task.score(prompt, messages[-1].content) == 1.0


async def test_episode_is_worth_the_mean_over_its_turns():
    task = sort_task(system_prompt="Sort.")
    prompt = task.example(5)
    answers = [m.content for m in task.demonstration(prompt) if m.role == "assistant"]
    env = task.environment(prompt)
    first = await env.reset()
    assert [m.role for m in first.messages] == ["system", "user"]
    right = await env.step(said(f"thinking...\n {answers[0]}  \n"))
    assert right.reward == pytest.approx(1 / 3) and right.info == {"turn_0": 1.0}
    [question] = right.observation.messages
    assert question.role == "user" and question.content.startswith("+ ")
    names = answers[1].split()
    half = await env.step(said(f"{names[0]} {names[2]} {names[1]}"))
    assert half.reward == pytest.approx(1 / 9) and half.observation is not None
    nothing = await env.step(said(""))
    assert nothing.reward == 0 and nothing.observation is None
    assert nothing.info == {"turn_2": 0.0}
    await env.close()


@pytest.mark.parametrize(
    ("given", "right", "fraction"),
    [
        (["Eva", "Bob", "Ida"], ["Bob", "Eva", "Ida"], 1 / 3),
        (["Bob", "Ida"], ["Bob", "Eva", "Ida"], 1 / 3),
        (["Bob", "Eva", "Ida", "Bob", "Bob", "Bob"], ["Bob", "Eva", "Ida"], 1 / 2),
        ([], ["Bob"], 0.0),
    ],
)
def test_fraction_counts_names_in_their_places(given, right, fraction):
    assert fraction_in_place(given, right) == pytest.approx(fraction)


def test_whole_names_are_sorted_by_either_word_in_a_chat():
    for sort_by, place in (("first", 0), ("last", 1)):
        task = sort_task(
            chat_template=True, params={"sort_by": sort_by, "num_turns": 2}, max_turns=2
        )
        prompt = task.example(0)
        question, answer, more, last = (m.content for m in task.demonstration(prompt))
        assert f"alphabetical order of their {sort_by} names" in question
        names = last.split(", ")
        assert len(names) == 6 and all(len(name.split()) == 2 for name in names)
        assert names == sorted(names, key=lambda name: name.split()[place])
        assert set(answer.split(", ")) < set(names)
        assert more.startswith("Add these, and give all names so far")
        assert task.score(prompt, " ,  ".join(names) + ",") == 1.0


def test_index_always_names_the_same_episode_and_no_held_out_one_is_trained_on():
    task, again = sort_task(seed=4), sort_task(seed=4)
    assert [task.demonstration(task.example(i)) for i in range(9)] == [
        again.demonstration(again.example(i)) for i in range(9)
    ]
    other = sort_task(seed=5)
    assert task.demonstration(task.example(0)) != other.demonstration(other.example(0))
    # Few different episodes, so that training meets all the held-out ones.
    small = sort_task(params={**SHORT, "num_turns": 1, "num_known": 5}, eval_size=10, max_turns=1)
    held_out = {small.demonstration(prompt) for prompt in small.eval_prompts()}
    assert len(held_out) == 10
    trained = {small.demonstration(p) for p in itertools.islice(TaskStream(small, 0, 1), 200)}
    assert len(trained) == 10 and not trained & held_out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": {"turns": 2}}, r"task.params.turns: alphabet_sort has no such setting; it has"),
        ({"params": {"num_turns": "2"}}, r"task.params.num_turns='2': must be of type int"),
        ({"params": {"num_turns": 0}}, r"task.params.num_turns=0: must be at least 1"),
        ({"params": {"sort_by": "age"}}, r"task.params.sort_by='age': must be first or last"),
        ({"params": {**SHORT, "sort_by": "last"}}, r"sort_by='last': names have none with last_na"),
        ({"max_turns": 2}, r"task.max_turns=2: .*num_turns=3 turns; set task.max_turns=3"),
        ({"params": {"num_names_more": 40}}, r"needs 84 names, but there are only 62 to draw"),
        ({"params": {**SHORT, "num_known": 4}, "eval_size": 99}, r"gave only 24 different prompts"),
    ],
)
def test_bad_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        sort_task(**changes)


def test_names_are_all_different_and_the_first_twenty_begin_differently():
    for names in (FIRST_NAMES, FAMILY_NAMES):
        assert len(set(names)) == len(names) == 62
    assert len({name[0] for name in FIRST_NAMES[:20]}) == 20


def test_experiment_has_room_for_every_correct_episode():
    config = load_config([], "alphabet-sort")
    task = build_task(config.task)
    rollout = config.rollout
    for prompt in itertools.islice(TaskStream(task, 0, 1), 300):
        first, *rest = (m for m in task.demonstration(prompt))
        assert len(first.content) <= rollout.max_prompt_tokens  # a byte is a token
        answers = [len(m.content) + 1 for m in rest if m.role == "assistant"]
        assert max(answers) <= config.task.max_turn_tokens
        questions = sum(len(m.content) for m in rest if m.role == "user")
        # Also where every answer is as long as it may be.
        longest = questions + config.task.max_turn_tokens * len(answers)
        assert longest <= rollout.max_response_tokens
