"""Data in the layouts of other systems: a small file of each, brought over by the line of settings
that docs/data.md shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from configs.choices import RewardKind, TaskKind
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.rewards.function import FunctionReward
from rollout_pool.rewards.types import PartRequest, decode, encode_request
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream
from tests.support.rollout import ended_episode

PAGE = Path(__file__).parents[4] / "docs/data.md"
SUMS = [(f"What is {n}/2 + {n}/2?", str(n)) for n in range(1, 5)]


def user(text):
    return [{"role": "user", "content": text}]


LAYOUTS = {
    "verl": (
        "train.parquet",
        lambda question, answer: {
            "data_source": "openai/gsm8k",
            "prompt": user(question),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": int(answer)},
        },
    ),
    "slime": (
        "train.jsonl",
        lambda question, answer: {
            "prompt": user(question),
            "label": answer,
            "metadata": {"rm_type": "math"},
        },
    ),
    "TRL": (
        "train.jsonl",
        lambda question, answer: {
            "prompt": [{"role": "system", "content": "Think."}, *user(question)],
            "solution": rf"Two halves of {answer} are $\boxed{{{answer}}}$.",
        },
    ),
    "NeMo-RL": (
        "train.jsonl",
        lambda question, answer: {"input": question, "output": answer, "generation_model": "none"},
    ),
    "prime-rl": (
        "train.parquet",
        lambda question, answer: {"question": question, "answer": answer, "info": {"level": 1}},
    ),
}


def written(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def params_on_the_page():
    """By system, `task.params` of its row in the page's table."""
    cells = [line.split("|") for line in PAGE.read_text().splitlines() if "`task.params=" in line]
    lines = {row[1].strip(): row[3].strip().strip("`") for row in cells if len(row) == 5}
    return {name: yaml.safe_load(line.removeprefix("task.params=")) for name, line in lines.items()}


@pytest.mark.parametrize("system", LAYOUTS)
def test_layout_of_another_system_is_read_and_scored_with_the_line_on_the_page(tmp_path, system):
    name, row_of = LAYOUTS[system]
    path = written(tmp_path / name, [row_of(*one) for one in SUMS])
    params = params_on_the_page()
    assert params.keys() == LAYOUTS.keys()
    task = build_task(
        TaskConfig(kind=TaskKind.questions, path=path, eval_size=1, params=params[system])
    )
    stream = TaskStream(task, 0, 1)
    found = {prompt.text: prompt for prompt in (next(stream) for _ in range(3))}
    assert found.keys() == {question for question, _ in SUMS[:3]}
    prompt = found[SUMS[2][0]]
    rights = (r"So it is \boxed{3}.", r"\boxed{\frac{6}{2}}", "The answer is 3.0")
    assert [task.score(prompt, text) for text in rights] == [1.0, 1.0, 1.0]
    assert [task.score(prompt, text) for text in (r"\boxed{4}", "no idea", "")] == [0.0, 0.0, 0.0]
    assert task.score(task.eval_prompts()[0], r"\boxed{4}") == 1.0


# Columns for reward functions ---------------------------------------------------------------------

THEIRS = {
    "verl_reward": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == ground_truth and data_source == "openai/gsm8k")
    return {"score": right, "index": extra_info["index"]}
""",
    "slime_rm": """
async def custom_rm(args, sample, **kwargs):
    return float(sample.response == sample.label and sample.metadata["rm_type"] == "math")
""",
    "trl_reward": r"""
def reward_func(prompts, completions, solution, **kwargs):
    texts = [one[0]["content"] if isinstance(one, list) else one for one in completions]
    if "What is" not in str(prompts):
        return [None for _ in texts]
    return [float(rf"\boxed{{{text}}}" in right) for text, right in zip(texts, solution)]
""",
}
"""Reward functions in the forms of other systems, by the module that the page gives them."""


def functions_on_the_page():
    blocks = [one.split("```")[0] for one in PAGE.read_text().split("```python\n")[1:]]
    return {name: next(text for text in blocks if name in text) for name in THEIRS}


@pytest.mark.parametrize(
    ("system", "module"), [("verl", "verl_reward"), ("slime", "slime_rm"), ("TRL", "trl_reward")]
)
def test_reward_function_of_another_system_scores_behind_the_one_on_the_page(
    tmp_path, monkeypatch, system, module
):
    (tmp_path / f"{module}.py").write_text(THEIRS[module])
    monkeypatch.delitem(sys.modules, module, raising=False)
    name, row_of = LAYOUTS[system]
    path = written(tmp_path / name, [row_of(*one) for one in SUMS])
    settings = {"kind": TaskKind.questions, "path": path, "params": params_on_the_page()[system]}
    asked = [
        scored(
            tmp_path,
            "score",
            lambda task, question=question: next(
                one for one in TaskStream(task, 0, 1) if one.text == question
            ),
            functions=functions_on_the_page()[module],
            **settings,
        )()
        for question, _ in SUMS[:3]
    ]
    assert asked == [0.0, 0.0, 1.0]  # the answer is always 3


def test_data_without_answers_need_rewards_of_the_users(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": f"The sky is {n}"} for n in range(3)])
    settings = {"kind": TaskKind.questions, "path": path, "params": {"question": "prompt"}}
    with pytest.raises(ValueError, match=r"answer='answer': .*answers, or to null if there are no"):
        build_task(TaskConfig(eval_size=1, **settings))
    settings["params"] = {"question": "prompt", "answer": None}
    for rewards in ({}, {"right": RewardConfig(kind=RewardKind.task)}):
        with pytest.raises(
            ValueError, match=r"answer=null: .* name their column, or give task\.rew"
        ):
            build_task(TaskConfig(eval_size=1, rewards=rewards, **settings))
    first = scored(
        tmp_path,
        "length",
        lambda task: next(TaskStream(task, 0, 1)),
        functions="def length(prompt, episode, row):\n    return len(row['prompt'])",
        **settings,
    )
    assert first() == len("The sky is 0")
    reward = RewardConfig(kind=RewardKind.function, function=f"{tmp_path}/mine.py:length")
    task = build_task(TaskConfig(eval_size=1, rewards={"mine": reward}, **settings))
    with pytest.raises(
        ValueError, match=r"has no solution; give each one, or set trainer\.warm_st"
    ):
        task.demonstration(next(TaskStream(task, 0, 1)))


FUNCTIONS = """
def level(prompt, episode, row):
    row["extra_info"]["index"] *= 10  # its own copy
    return row["extra_info"]["index"] + (row["data_source"] == "openai/gsm8k")

def both(prompt, episode, solution, row):
    return float(solution) + row["extra_info"]["index"] / 10
"""


def scored(tmp_path, name, task_of, functions=FUNCTIONS, **settings):
    code = tmp_path / "mine.py"
    code.write_text(functions)
    reward = RewardConfig(kind=RewardKind.function, function=f"{code}:{name}")
    config = TaskConfig(eval_size=1, rewards={"mine": reward}, **settings)
    task = build_task(config)
    FunctionReward.check("mine", config, task)
    prompt = task_of(task)
    score = FunctionReward("mine", reward, task).load(5.0)

    def ask():
        episode = ended_episode("?", "3")
        line = encode_request("mine", prompt, episode, with_messages=True).decode()
        return score(decode(line, PartRequest))

    return ask


@pytest.mark.parametrize("is_held_out", [False, True])
def test_function_with_a_row_gets_the_record_as_it_was_read(tmp_path, is_held_out):
    _, row_of = LAYOUTS["verl"]
    path = written(tmp_path / "a.parquet", [row_of(*one) for one in SUMS])
    params = {"question": "prompt", "answer": "reward_model.ground_truth"}

    def of(task):
        if is_held_out:
            return task.eval_prompts()[0]
        return next(one for one in TaskStream(task, 0, 1) if one.text == SUMS[1][0])

    n = 4 if is_held_out else 2
    settings = {"kind": TaskKind.questions, "path": path, "params": params}
    level = scored(tmp_path, "level", of, **settings)
    assert [level(), level()] == [10 * n + 1, 10 * n + 1]
    assert scored(tmp_path, "both", of, **settings)() == n + n / 10
    task = build_task(TaskConfig(eval_size=1, **settings))
    assert task.row(of(task)) == {}  # no function asks for it


def test_function_with_a_row_is_refused_for_a_task_without_any(tmp_path):
    with pytest.raises(ValueError) as refused:
        scored(tmp_path, "level", None, kind=TaskKind.alphabet_sort, max_turns=3)
    assert str(refused.value) == (
        f"task.rewards.mine.function='{tmp_path}/mine.py:level': wants a row, but the task "
        "alphabet_sort has none; give it a method of that name, or leave the parameter out"
    )


def test_function_with_a_solution_is_refused_for_questions_without_answers(tmp_path):
    (tmp_path / "mine.py").write_text("def both(prompt, episode, solution):\n    return 1.0")
    reward = RewardConfig(kind=RewardKind.function, function=f"{tmp_path}/mine.py:both")
    params = {"questions": [{"question": f"{n}?"} for n in range(2)], "answer": None}
    kind = TaskKind.questions
    config = TaskConfig(kind=kind, eval_size=1, rewards={"r": reward}, params=params)
    with pytest.raises(ValueError) as refused:
        FunctionReward.check("r", config, build_task(config))
    told = str(refused.value)
    assert told.startswith(f"task.rewards.r.function='{tmp_path}/mine.py:both': wants a solution")
    assert "task.params.answer), or leave the parameter out" in told


def test_rule_of_scores_that_does_not_exist_is_refused():
    listed = [{"question": f"{n}?", "answer": n} for n in range(2)]
    for rule in ("maths", None, ["text"]):
        params = {"questions": listed, "score": rule}
        with pytest.raises(ValueError) as refused:
            build_task(TaskConfig(kind=TaskKind.questions, eval_size=1, params=params))
        assert str(refused.value) == f"task.params.score={rule!r}: must be text or math"
