"""The order of a file's rows: epochs, weights, and which epoch a worker is in."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest

from configs.choices import TaskKind
from configs.rollout_schema import MixedTask, TaskConfig
from rollout_pool.tasks.data.epochs import Epochs
from rollout_pool.tasks.registry import build_task, check_data, data_of, epoch_of
from rollout_pool.tasks.task import TaskStream

FORMS = {
    TaskKind.questions: lambda text: {"question": text, "answer": "a"},
    TaskKind.gsm8k: lambda text: {"question": text, "answer": "#### 1"},
    TaskKind.math: lambda text: {"problem": text, "solution": "\\boxed{1}"},
    TaskKind.code: lambda text: {"prompt": text, "tests": {"assert": "1"}},
    TaskKind.repository: lambda text: {
        "problem": text,
        "files": {"a.py": ""},
        "test_command": ["true"],
        "image": "python",
    },
}


def config_of(path, weights, kind=TaskKind.questions, **params) -> TaskConfig:
    """Rows a, b, c, ... with these weights, of which the last is held out; None: no column."""
    rows = [
        FORMS[kind](text) | ({} if weight is None else {"w": weight})
        for text, weight in zip("abcdefgh", weights, strict=False)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    more = {"chat_template": True, "max_turns": 2} if kind is TaskKind.repository else {}
    return TaskConfig(kind=kind, path=str(path), eval_size=1, params=params, **more)


def texts(task, count: int) -> str:
    return "".join(task.example(index).text for index in range(count))


def test_problems_come_as_often_as_their_weights_and_fractions_add_up_over_epochs() -> None:
    epochs = Epochs([1, 2, 0.5], 0, shuffles=False)
    found = [epochs.find(index) for index in range(14)]
    assert [problem for _, problem in found] == [0, 1, 1, 0, 1, 1, 2, 0, 1, 1, 0, 1, 1, 2]
    assert [epoch for epoch, _ in found] == [0] * 3 + [1] * 4 + [2] * 3 + [3] * 4
    assert [epochs.find(index) for index in range(13, -1, -1)] == found[::-1]
    far = 7 * 10**12  # each pair of epochs has seven prompts
    assert epochs.find(far + 6) == (2 * 10**12 + 1, 2)


def test_problems_of_one_fraction_take_turns() -> None:
    epochs = Epochs([0.5] * 4, 0, shuffles=False)
    assert [epochs.find(index)[1] for index in range(8)] == [1, 3, 0, 2, 1, 3, 0, 2]
    rare = Epochs([0.01], 0, shuffles=False)  # most epochs are empty
    assert [rare.find(index) for index in range(2)] == [(99, 0), (199, 0)]


def test_shuffled_epochs_have_the_weights_and_without_any_the_order_of_earlier_runs() -> None:
    epochs = Epochs([3, 0, 1.25, 1], 7, shuffles=True)
    found = [epochs.find(index) for index in range(2 * 21)]
    for first in (0, 4):  # four epochs have three times five prompts, and six
        counts = Counter(problem for epoch, problem in found if first <= epoch < first + 4)
        assert counts == {0: 12, 2: 5, 3: 4}
    plain = Epochs([1] * 6, 7, shuffles=True)
    for epoch in range(3):
        order = list(range(6))
        random.Random(f"7/{epoch}").shuffle(order)
        assert [plain.find(6 * epoch + place) for place in range(6)] == [
            (epoch, problem) for problem in order
        ]


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_order_of_the_file_and_weights_are_those_of_every_kind(tmp_path, kind) -> None:
    config = config_of(tmp_path / "a.jsonl", [2, "1", 0.5, 0, 9], kind, shuffle=False, weight="w")
    task = build_task(config)
    assert texts(task, 7) == "aabaabc"
    assert [prompt.text for prompt in task.eval_prompts()] == ["e"]
    shuffled = build_task(config_of(tmp_path / "b.jsonl", [2, 1, 1, 0, 9], kind, weight="w"))
    orders = {texts(shuffled, 4 * epoch + 4)[-4:] for epoch in range(6)}
    assert {"".join(sorted(order)) for order in orders} == {"aabc"} and len(orders) > 1


def test_weights_in_a_list_and_within_a_column_are_read_and_held_out_files_need_none(
    tmp_path,
) -> None:
    rows = [{"question": text, "answer": "a", "meta": {"w": n}} for n, text in enumerate("abc")]
    params = {"questions": rows, "shuffle": False, "weight": "meta.w"}
    listed = build_task(TaskConfig(kind=TaskKind.questions, params=params, eval_size=1))
    assert texts(listed, 3) == "bbb"
    config = config_of(tmp_path / "a.jsonl", [1, 2], weight="w", shuffle=False)
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": "z", "answer": "a"}))
    config.eval_path = str(tmp_path / "eval.jsonl")
    assert texts(build_task(config), 6) == "abbabb"


def test_held_out_prompts_are_passed_over_in_the_order_of_the_file(tmp_path) -> None:
    config = config_of(tmp_path / "a.jsonl", [2, 1, 1], weight="w", shuffle=False)
    config.eval_path = str(tmp_path / "eval.jsonl")
    (tmp_path / "eval.jsonl").write_text(json.dumps(FORMS[TaskKind.questions]("b")))
    stream = TaskStream(build_task(config), 0, 1)
    assert "".join(prompt.text for prompt in itertools.islice(stream, 6)) == "aacaac"
    assert stream.position == 8


@pytest.mark.parametrize("bad", [-1, "many", None, [1], float("nan"), 101, 0.001, 10**400])
def test_bad_weight_is_refused_with_its_row(tmp_path, bad) -> None:
    config = config_of(tmp_path / "a.jsonl", [1, 1, 1], weight="w")
    (tmp_path / "a.jsonl").write_text(
        "\n".join(
            json.dumps({"question": "a", "answer": "a", "w": weight}) for weight in (1, bad, 1)
        )
    )
    with pytest.raises(ValueError) as refused:
        build_task(config)
    assert str(refused.value).startswith(
        f'task.path={tmp_path}/a.jsonl, line 2: "w" must be a weight from 0.01 to 100, or 0 for a '
        f"row that never comes, not {bad!r:.100}"
    )
    assert str(refused.value).endswith("; correct it, or leave the row out")


def test_bad_settings_of_the_order_are_refused(tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    for weights, kind, params, message in (
        (
            [1, 1],
            TaskKind.questions,
            {"weight": "v"},
            r"weight='v': .*line 1 has no such column, on",
        ),
        ([0, 0, 1], TaskKind.questions, {"weight": "w"}, r"weight='w': no row to train on has a w"),
        ([1, 1], TaskKind.questions, {"shuffle": "no"}, r"shuffle='no': must be true or false"),
        *(([1, 1], kind, {"shufle": False}, r"shufle: \w+ has no such setting") for kind in FORMS),
    ):
        with pytest.raises(ValueError, match=rf"task\.params\.{message}"):
            build_task(config_of(file, weights, kind, **params))


def test_other_order_and_other_weights_are_other_data(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    plain = config_of(path, [None] * 4)
    before = data_of(build_task(plain))
    for same in ({}, {"shuffle": True}, {"weight": "w"}):
        config = config_of(path, [1, 1.0, "1", 1], **same)
        check_data(config, build_task(config), before)
    for weights, params in (
        ([1] * 4, {"shuffle": False}),
        ([2, 1, 1, 1], {"weight": "w"}),
        ([1, 1, 0, 1], {"weight": "w"}),
    ):
        config = config_of(path, weights, **params)
        with pytest.raises(ValueError, match=r"it has 3 problems .*, but the run began with 3 pro"):
            check_data(config, build_task(config), before)
        check_data(config, build_task(config), data_of(build_task(config)))


def test_epochs_are_told_by_task_also_where_a_held_out_prompt_is_replaced(tmp_path) -> None:
    rows = config_of(tmp_path / "a.jsonl", [1, 2, 1, 1], weight="w")
    task = build_task(rows)
    assert [epoch_of(task, index) for index in (0, 3, 4, 11, 12)] == [
        ("", epoch) for epoch in (1, 1, 2, 3, 4)
    ]

    def listed(letters: str, weight: int) -> MixedTask:
        params = {"questions": [{"question": one, "answer": "a"} for one in letters]}
        kind = TaskKind.questions
        return MixedTask(kind=kind, params=params, eval_size=1, weight=weight)

    made = MixedTask(kind=TaskKind.alphabet_sort, eval_size=1)
    tasks = {"few": listed("abc", 1), "many": listed("xyzua", 2), "made": made}
    mixed = build_task(TaskConfig(kind=TaskKind.mixture, tasks=tasks, max_turns=3))
    found = [epoch_of(mixed, index) for index in range(4 * 8)]  # of four prompts, eight rounds
    assert sorted(found) == sorted(
        [("few", 1 + n // 2) for n in range(8)]
        + [("many", 1 + n // 4) for n in range(16)]
        + [("made", 0)] * 8
    )
