"""Further held-out sets: their prompts, their rewards, and what of them is refused."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from datasets import Dataset

from configs.load import load_config, read_config, to_yaml
from controller.start.preflight import check_plan, check_task
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.tasks.registry import build_task, check_data, data_of
from rollout_pool.tasks.task import TaskStream
from tests.support.rollout import ended_episode

OWN = [
    "task.kind=questions",
    "task.eval_size=1",
    'task.params={questions: [{question: "1+1", answer: a}, {question: "1+2", answer: a}, '
    '{question: "1+3", answer: a}, {question: "1+4", answer: a}]}',
]


def file_of(path, *questions):
    lines = [json.dumps({"question": one, "answer": one[-1]}) for one in questions]
    path.write_text("\n".join(lines))
    return str(path)


def config_of(*settings):
    return load_config([*OWN, *settings])


def test_questions_of_sets_are_all_of_their_files_and_none_is_trained(tmp_path):
    hard = file_of(tmp_path / "hard.jsonl", "9+9", "1+2", "8+7")
    long = file_of(tmp_path / "long.jsonl", "7+7", "5+5")
    config = config_of(
        f"task.eval_sets={{hard: {{kind: questions, path: {hard}}}, "
        f"long: {{kind: questions, path: {long}, eval_size: 1, instruction: '='}}}}",
        *("trainer.keep_best=accuracy/hard", "rollout.eval_every=50"),
    )
    task = check_task(config.task)
    found = [(one.task, one.text, one.index) for one in task.eval_prompts()]
    assert found == [
        ("", "1+4", 0),
        *(("hard", "9+9", 1), ("hard", "1+2", 2), ("hard", "8+7", 3)),
        ("long", "7+7=", 4),
    ]
    prompts = [*islice(TaskStream(task, 0, 1), 40)]
    assert {one.text for one in prompts} == {"1+1", "1+3"}
    assert {one.task for one in prompts} == {""} and task.name == "questions"
    right = ["a", "9", "2", "7", "7"]
    assert [task.score(one, answer) for one, answer in zip(task.eval_prompts(), right, strict=True)]
    assert task.solution(task.eval_prompts()[3]) == "7"
    assert (
        check_plan(config) is not None
    )  # no prompt of a set is left to train on, and none must be


def test_set_of_a_saved_folder_is_its_test_split_or_all_of_it(tmp_path):
    rows = [{"question": f"{n}?", "answer": "a"} for n in range(3)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "alone")
    (tmp_path / "split").mkdir()
    for split, some in (("train", rows[:2]), ("test", rows[2:])):
        Dataset.from_list(some).to_json(tmp_path / "split" / f"{split}.jsonl")
    sets = [f"{name}: {{kind: questions, path: {tmp_path}/{name}}}" for name in ("alone", "split")]
    task = build_task(config_of(f"task.eval_sets={{{', '.join(sets)}}}").task)
    texts = [(one.task, one.text) for one in task.eval_prompts()[1:]]
    assert texts == [("alone", "0?"), ("alone", "1?"), ("alone", "2?"), ("split", "2?")]


def test_sets_stand_beside_the_tasks_of_a_mixture_without_a_weight(tmp_path):
    hard = file_of(tmp_path / "hard.jsonl", "9+9")
    config = load_config(
        ["task=mixed", f"task.eval_sets={{hard: {{kind: questions, path: {hard}}}}}"]
    )
    task, usual = build_task(config.task), build_task(load_config(["task=mixed"]).task)
    assert {task.example(index).task for index in range(40)} == {"spelling", "sums"}
    assert [task.example(i) for i in range(40)] == [usual.example(i) for i in range(40)]
    assert [one.task for one in task.eval_prompts()][-2:] == ["sums", "hard"]


async def test_rewards_of_a_set_are_added_to_those_of_the_task(tmp_path):
    (tmp_path / "own.py").write_text("def length(prompt, episode): return len(episode.answer)")
    hard = file_of(tmp_path / "hard.jsonl", "9+9")
    config = config_of(
        f"task.eval_sets={{hard: {{kind: questions, path: {hard}, "
        f"rewards: {{length: {{kind: function, function: {tmp_path}/own.py:length}}}}}}}}",
        "task.rewards={right: {kind: task}}",
    ).task
    task = build_task(config)
    own, hard_one = task.eval_prompts()
    pool = RewardPool(config, num_processes=1, timeout_s=60, log_path=tmp_path / "log")
    scorer = EpisodeScorer(config, task=task, pool=pool)
    try:
        await pool.start()
        scores = [await scorer.score(one, ended_episode("9")) for one in (own, hard_one)]
    finally:
        await scorer.close()
        await pool.close()
    assert [score.parts for score in scores] == [{"right": 0.0}, {"right": 1.0, "length": 1.0}]


def test_data_of_a_set_must_stay_as_they_were(tmp_path):
    hard = file_of(tmp_path / "hard.jsonl", "9+9", "8+8")
    config = config_of(f"task.eval_sets={{hard: {{kind: questions, path: {hard}}}}}")
    before = data_of(build_task(config.task))
    assert [*before] == ["", "hard"]
    file_of(tmp_path / "hard.jsonl", "9+9")
    with pytest.raises(ValueError, match=r"^task\.eval_sets\.hard\.path=.* but the run began with"):
        check_data(config.task, build_task(config.task), before)


def test_settings_of_sets_are_kept_with_those_of_the_run(tmp_path):
    hard = file_of(tmp_path / "hard.jsonl", "9+9")
    config = config_of(
        f"task.eval_sets={{hard: {{kind: questions, path: {hard}, num_samples: 4}}}}",
        "rollout.eval.temperature=0.5",
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config
    answered = config.task.eval_sets["hard"].answered(config.rollout.eval)
    assert (answered.num_samples, answered.temperature) == (4, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "{hard: {kind: questions, path: /nowhere.jsonl}}",
            r"task\.eval_sets\.hard\.path=/nowhere",
        ),
        (
            "{hard: {kind: questions, num_samples: 4}}",
            r"task\.eval_sets\.hard\.num_samples=4: greed",
        ),
        ("{hard: {kind: mixture}}", r"task\.eval_sets\.\*\.kind='mixture': a set is of one"),
        ("{'a/b': {kind: questions}}", r"task\.eval_sets=\['a/b'\]: a name has letters"),
        ("{hard: {kind: verifiers}}", r"task\.eval_sets=\['hard'\]: environments of the verifiers"),
        ("{hard: {samples: 4}}", r"task\.eval_sets\.hard\.samples"),
        ("{hard: {top_p: 0}}", r"task\.eval_sets\.\*\.top_p=0"),
        (
            "{hard: {kind: questions, params: {questions: [{question: a}]}}}",
            r"task\.eval_sets\.hard\.params\.answer='answer': .* has no such column",
        ),
        (
            "{all: {kind: questions, eval_size: 1, params: {questions: [{question: x, answer: a}, "
            "{question: '1+1', answer: a}]}}, b: {kind: questions, eval_size: 2, params: "
            "{questions: [{question: x, answer: a}, {question: '1+2', answer: a}, "
            "{question: '1+3', answer: a}]}}}",
            r"task\.eval_size: the held-out prompts of all tasks are all the prompts that it has",
        ),
    ],
)
def test_bad_sets_are_refused_before_the_start(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_plan(config_of(f"task.eval_sets={settings}"))


def test_sets_beside_an_agent_or_a_task_of_their_name_are_refused(tmp_path):
    (tmp_path / "own.py").write_text("async def run(session, prompt): return 0.0")
    with pytest.raises(ValueError, match=r"^task\.eval_sets=\['hard'\]: an agent leads the epis"):
        config_of("task.eval_sets={hard: {}}", f"task.agent={tmp_path}/own.py:run")
    with pytest.raises(ValueError, match=r"^task\.eval_sets=\['sums'\]: a task of the mixture has"):
        load_config(["task=mixed", "task.eval_sets={sums: {}}"])
