"""Mathematics and programs."""

from __future__ import annotations

import json

import pytest

from configs.choices import TaskKind
from configs.load import load_config
from configs.rollout_schema import TaskConfig
from rollout_pool.sandbox.run import run_program
from rollout_pool.tasks.math_results import is_equal, is_same_number, last_box
from rollout_pool.tasks.programs import ProgramTest
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt, TaskStream

MATH_LINES = [
    {"problem": f"Half of ${2 * i}$?", "solution": rf"It is \boxed{{{i}}}."} for i in range(6)
]
CODE_LINES = [
    {
        "prompt": f"Add {i} to the number given.",
        "tests": [{"input": "1", "output": str(i + 1)}, {"assert": "True"}],
        "solution": f"print(int(input()) + {i})",
    }
    for i in range(4)
]


def task_of(tmp_path, kind, lines, **changes):
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return build_task(
        TaskConfig(kind=kind, name="mine", path=str(path), **{"eval_size": 1, **changes})
    )


def test_math_file_gives_problems_solutions_and_scores(tmp_path):
    task = task_of(tmp_path, TaskKind.math, MATH_LINES, instruction=" Box it.")
    [held_out] = task.eval_prompts()
    assert held_out.text == "Half of $10$? Box it."
    prompt = next(TaskStream(task, 0, 1))
    assert not task.is_held_out(prompt)
    solution = task.solution(prompt)
    assert task.score(prompt, solution) == 1.0
    assert task.score(prompt, r"so \boxed{77}") == 0.0
    assert task.demonstration(prompt)[-1].content == solution
    assert task.score(held_out, r"\boxed{5}") == 1.0


@pytest.mark.parametrize(
    ("final", "completion", "is_right"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}", True),
        (r"\frac{1}{2}", r"\boxed{3} no, \boxed{\frac12}", True),
        (r"\frac{1}{2}", r"\boxed{\frac12} no, \boxed{3}", False),
        ("42", "the answer is 42", True),
        ("42", "the answer is 41", False),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
        ("42", "", False),
        ("42", r"\boxed{42", False),
        ("42", r"\boxed{", False),
    ],
)
def test_boxes_are_compared_as_mathematics(final, completion, is_right):
    assert is_equal(final, completion) is is_right


@pytest.mark.parametrize(
    ("final", "completion", "is_same"),
    [
        ("42", "6 * 7 = 42\n#### 42", True),
        ("42", "#### 42.0", True),
        ("42", r"so it is \boxed{42}", True),
        ("42", "The answer is $42$.", True),
        ("42", "I think 41, no, 42", True),
        ("1,234", "#### 1234", True),
        ("1234", "#### 1,234", True),
        ("0.5", r"\boxed{\frac{1}{2}}", True),
        ("-3", "#### -3", True),
        ("42", "#### 43", False),
        ("42", "the 42 apples and 7 pears\n#### 7", False),
        ("42", "#### 42 dollars\n", True),
        ("42", "#### 42 or 43?", False),
        ("3", "#### -3", False),
        ("42", "####", False),
        ("42", "", False),
        ("42", "no number at all", False),
        ("42", "\x00\xff{{{", False),
    ],
)
def test_last_number_is_compared_as_mathematics(final, completion, is_same):
    assert is_same_number(final, completion) is is_same


def test_last_whole_box_counts_with_its_inner_braces():
    assert last_box(r"\boxed{1} and \boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert last_box("none") is None


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        (TaskKind.math, {"problem": "a", "solution": "42"}, r"\"solution\" must hold its final a"),
        (TaskKind.math, {"problem": "a"}, r": \"solution\" must be a non-empty string"),
        (TaskKind.math, "[", r": not JSON: .*each line must be \{\"problem\""),
        (TaskKind.code, {"prompt": "a"}, r": \"tests\" must not be missing or empty"),
        (TaskKind.code, {"prompt": "a", "tests": []}, r"\"tests\" must not be missing or empty"),
        (TaskKind.code, {"prompt": "a", "tests": [{"input": "1"}]}, r", test 1: \"output\" m"),
        (TaskKind.code, {"prompt": "a", "tests": {"assert": ""}}, r"\"tests\": \"assert\" must be"),
        (TaskKind.code, {"prompt": "a", "tests": ["x"]}, r", test 1: not an object"),
        (
            TaskKind.code,
            {"prompt": "a", "tests": {"assert": "x"}, "solution": 3},
            r"\"solution\" must be a string",
        ),
    ],
)
def test_bad_line_is_named(tmp_path, kind, line, message):
    with pytest.raises(ValueError, match=r"task.path=.*lines.jsonl, line 1.*" + message):
        task_of(tmp_path, kind, [line])


def test_bad_math_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"task.params.split: math has no such setting; it has s"):
        task_of(tmp_path, TaskKind.math, MATH_LINES, params={"split": "train"})


def test_code_file_gives_tests_and_a_solution_in_a_block(tmp_path):
    task = task_of(tmp_path, TaskKind.code, CODE_LINES)
    [held_out] = task.eval_prompts()
    assert held_out == Prompt(index=0, is_held_out=True, text="Add 3 to the number given.")
    assert task.tests(held_out) == (
        ProgramTest(input="1", output="4"),
        ProgramTest(statements="True"),
    )
    assert task.solution(held_out) == "```python\nprint(int(input()) + 3)\n```"
    with pytest.raises(ValueError, match=r"task.rewards: .* set task.rewards=\{tests: \{kind: cod"):
        task.score(held_out, "print(1)")


def test_code_without_a_file_or_a_solution_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"task.path=None: task.kind=code needs a JSONL file"):
        build_task(TaskConfig(kind=TaskKind.code))
    lines = [{"prompt": p, "tests": {"assert": "True"}} for p in "ab"]
    task = task_of(tmp_path, TaskKind.code, lines)
    with pytest.raises(ValueError, match=r"task.kind=code: problem 'a' has no solution; give each"):
        task.demonstration(next(TaskStream(task, 0, 1)))


async def test_programs_that_ship_with_the_project_pass_their_own_tests():
    config = load_config(["task=code", "rollout.max_prompt_tokens=400"])
    task = build_task(config.task)
    prompts = [task.example(i) for i in range(12)] + list(task.eval_prompts())
    assert len({prompt.text for prompt in prompts}) == 16
    for prompt in prompts:
        program = task.problem(prompt).solution
        for test in task.tests(prompt):
            code = program if test.statements is None else f"{program}\n{test.statements}\n"
            result = await run_program(code, stdin=test.input)
            assert result.reason is None, (prompt.text, result.stderr)
            assert result.stdout.split() == test.output.split(), prompt.text
