"""Prompts, their streams and their scores."""

from __future__ import annotations

import itertools
import json

import pytest

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Completion
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream, demonstrations

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
EXPRESSION = r": (.*=)$"


def sums(**changes):
    return build_task(
        TaskConfig(
            **{"params": SUMS, "prompt_pattern": EXPRESSION, "eval_size": 50, "seed": 3, **changes}
        )
    )


def problems(path, count):
    lines = [
        json.dumps({"question": f"What is {i} + 1?", "answer": f"Add. #### {i + 1}"})
        for i in range(count)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def words(path, **changes):
    return build_task(TaskConfig(kind=TaskKind.gsm8k, path=path, **{"eval_size": 3, **changes}))


def test_pattern_cuts_the_prompt_to_the_expression():
    prompt = sums().example(0)
    left, operator, right, equals = prompt.text.split()
    assert operator in "+-" and equals == "=" and left.isdigit() and right.isdigit()


def test_index_always_names_the_same_prompt_also_across_the_generators_chunks():
    indices = [0, 999, 1000, 1001, 123_456]
    first = [sums().example(i) for i in indices]
    other = sums()
    assert [other.example(i) for i in reversed(indices)] == first[::-1]
    assert len({prompt.text for prompt in first}) > 2


def test_right_answer_scores_one_and_another_does_not():
    task = sums()
    for prompt in [*itertools.islice(TaskStream(task, 0, 1), 20), *task.eval_prompts()[:20]]:
        left, operator, right, _ = prompt.text.split()
        result = int(left) + int(right) if operator == "+" else int(left) - int(right)
        assert task.solution(prompt) == str(result)
        assert task.score(prompt, f" {result}\n") == 1.0
        assert task.score(prompt, str(result + 1)) < 0.5
        assert task.score(prompt, "what?") < 0.5
        assert task.score(prompt, "") < 0.5


async def test_question_with_one_answer_is_an_episode_of_one_step():
    prompt = sums().example(0)
    env = sums(system_prompt="Be brief.").environment(prompt)
    first = await env.reset()
    assert [(m.role, m.content) for m in first.messages] == [
        ("system", "Be brief."),
        ("user", prompt.text),
    ]
    step = await env.step(Completion(text="7", content="7"))
    assert step.observation is None and step.reward is None
    await env.close()


def test_held_out_prompts_are_never_trained_on_even_where_prompts_repeat():
    task = sums(eval_size=100)
    held_out = {prompt.text for prompt in task.eval_prompts()}
    assert len(held_out) == 100
    trained = {prompt.text for prompt in itertools.islice(TaskStream(task, 0, 1), 2000)}
    assert len(trained) > 50 and not held_out & trained


def test_stream_continues_from_its_position():
    task = sums()
    whole = list(itertools.islice(TaskStream(task, 0, 1), 30))
    first = TaskStream(task, 0, 1)
    begun = list(itertools.islice(first, 12))
    rest = list(itertools.islice(TaskStream(task, 0, 1, position=first.position), 18))
    assert begun + rest == whole


def test_streams_of_all_workers_share_the_prompts_out():
    task = sums()
    streams = [
        {prompt.index for prompt in itertools.islice(TaskStream(task, worker, 3), 40)}
        for worker in range(3)
    ]
    assert not streams[0] & streams[1] and not streams[1] & streams[2]
    assert {index % 3 for index in streams[2]} == {2}


def test_task_with_too_few_prompts_to_hold_back_says_so():
    with pytest.raises(ValueError, match=r"task.eval_size=500: chain_sum .* only 200 different"):
        sums(eval_size=500)
    message = r"task\.eval_size: .*, such as '.* ='; nothing is left to train on; .*task\.eval_path"
    with pytest.raises(ValueError, match=message):
        next(TaskStream(sums(eval_size=200), 0, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "chain_sums"}, r"task.name='chain_sums': .* did you mean chain_sum\?"),
        ({"params": {"terms": 2}}, r"task.params.terms: chain_sum has no such setting; it has .*m"),
        ({"params": {"seed": 2}}, r"task.params.seed: use task.seed"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, r"task.params=.*max_terms must be >="),
        ({"prompt_pattern": "("}, r"task.prompt_pattern='\(': must be a regular expression"),
        ({"prompt_pattern": "never"}, r"task.prompt_pattern='never': matches nothing in the q"),
    ],
)
def test_bad_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        sums(**changes)


@pytest.mark.parametrize("pattern", ["is [0-8] ", "(is [0-8] )|.", "(x*)"])
def test_question_of_which_a_pattern_leaves_nothing_is_refused_before_its_turn(tmp_path, pattern):
    with pytest.raises(ValueError, match=r"^task\.prompt_pattern=.*matches nothing in the quest"):
        words(problems(tmp_path / "words.jsonl", 13), prompt_pattern=pattern)


def test_every_epoch_of_a_file_has_each_training_problem_once_in_another_order(tmp_path):
    task = words(problems(tmp_path / "words.jsonl", 13))
    epochs = [[task.example(10 * e + i).text for i in range(10)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    held_out = [prompt.text for prompt in task.eval_prompts()]
    assert held_out == ["What is 10 + 1?", "What is 11 + 1?", "What is 12 + 1?"]
    assert not set(held_out) & set(epochs[0])


def test_answer_of_a_file_is_scored_and_used_for_the_warm_start(tmp_path):
    task = words(
        problems(tmp_path / "words.jsonl", 13), instruction=" Think.", system_prompt="Be brief."
    )
    [(_, (system, question, answer))] = demonstrations(task, 1)
    number = int(question.content.split()[2])
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (question.role, question.content) == ("user", f"What is {number} + 1? Think.")
    assert (answer.role, answer.content) == ("assistant", f"Add. #### {number + 1}")
    prompt = next(TaskStream(task, 0, 1))
    answer = answer.content
    assert task.score(prompt, answer) == 1.0
    assert task.score(prompt, "#### 999") == 0.0
    assert task.score(prompt, "no idea") == 0.0


def test_held_out_problems_can_come_from_a_file_of_their_own(tmp_path):
    task = words(
        problems(tmp_path / "train.jsonl", 5), eval_path=problems(tmp_path / "test.jsonl", 2)
    )
    assert len(task.eval_prompts()) == 2
    texts = {prompt.text for prompt in itertools.islice(TaskStream(task, 0, 1), 6)}
    assert texts == {"What is 2 + 1?", "What is 3 + 1?", "What is 4 + 1?"}


def test_listed_questions_can_have_held_out_ones_in_a_file(tmp_path):
    listed = [{"question": f"{i} + {i} =", "answer": str(2 * i)} for i in range(3)]
    task = build_task(
        TaskConfig(
            kind=TaskKind.questions,
            params={"questions": listed},
            eval_path=problems(tmp_path / "test.jsonl", 2),
            eval_size=5,
        )
    )
    assert [prompt.text for prompt in task.eval_prompts()] == ["What is 0 + 1?", "What is 1 + 1?"]
    texts = {prompt.text for prompt in itertools.islice(TaskStream(task, 0, 1), 6)}
    assert texts == {one["question"] for one in listed}


def data_set(folder, **splits):
    """A Hugging Face data set in a folder: rows with the columns prompt and label."""
    folder.mkdir()
    for split, count in splits.items():
        rows = [{"prompt": f"{split} {n}?", "label": n, "more": None} for n in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def rows_of(name, **changes):
    params = {"question": "prompt", "answer": "label", **changes.pop("params", {})}
    return build_task(TaskConfig(kind=TaskKind.questions, name=name, params=params, **changes))


def test_data_set_gives_questions_by_the_names_of_its_columns(tmp_path):
    task = rows_of(data_set(tmp_path / "rows", train=4, test=3), eval_size=2)
    assert [prompt.text for prompt in task.eval_prompts()] == ["test 0?", "test 1?"]
    prompts = list(itertools.islice(TaskStream(task, 0, 1), 4))
    assert {prompt.text for prompt in prompts} == {f"train {n}?" for n in range(4)}
    assert all(task.solution(prompt) == prompt.text[6] for prompt in prompts)
    assert task.score(prompts[0], f"so\n {prompts[0].text[6]}") == 1.0


def test_data_set_without_a_split_for_evaluation_holds_its_last_rows_back(tmp_path):
    name = data_set(tmp_path / "rows", train=5)
    task = rows_of(name, params={"eval_split": None}, eval_size=2)
    assert [prompt.text for prompt in task.eval_prompts()] == ["train 3?", "train 4?"]
    with pytest.raises(ValueError, match=r"rows': its split 'test' did not load .*check the name"):
        rows_of(name)


def test_data_set_and_listed_questions_do_not_go_together(tmp_path):
    name, listed = data_set(tmp_path / "rows", train=2, test=2), [{"prompt": "a", "label": "b"}]
    with pytest.raises(ValueError, match=r"^task\.name='.*rows': names a data set, and task\.pa"):
        rows_of(name, params={"questions": listed})
    assert rows_of(name, params={"questions": None}).eval_prompts()
    with pytest.raises(ValueError, match=r"^task\.params\.subset: questions has no such setting"):
        rows_of("chain_sum", params={"questions": listed * 2, "subset": "main"}, eval_size=1)


@pytest.mark.parametrize("column", ["labels", ["label"]])
def test_missing_column_is_named_with_those_that_exist(tmp_path, column):
    name = data_set(tmp_path / "rows", train=2, test=2)
    for changes, place in (({}, f"{name}, train 0"), ({"path": f"{name}/test.jsonl"}, "line 1")):
        with pytest.raises(ValueError) as refused:
            rows_of(name, params={"answer": column}, **changes)
        message = str(refused.value)
        assert message.startswith(f"task.params.answer={column!r}: task.")
        assert (
            place in message
            and "has no such column, only prompt, label, more; set it to" in message
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"words.jsonl: the file is empty"),
        ("\n\n", r"words.jsonl: the file is empty"),
        ('{"question": "a", "answer": "#### 1"}\n{oops\n', r"line 2: not JSON: .* at column 2; "),
        ('\n["a"]', r"line 2: not an object"),
        ('{"question": "a"}', r'line 1: "answer" must be a non-empty string'),
        ('{"question": "", "answer": "#### 1"}', r'line 1: "question" must be a non-empty string'),
        ('{"question": "a", "answer": "1"}', r'line 1: "answer" must end in "#### <the final'),
        ('{"question": "a", "answer": "#### "}', r'line 1: "answer" must end in'),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "words.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"task.path=.*" + message):
        words(str(path))


def test_missing_or_too_short_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"task.path=/nowhere.jsonl: there is no such file"):
        words("/nowhere.jsonl")
    with pytest.raises(ValueError, match=r"task.eval_size=3: .* has only 3 problems"):
        words(problems(tmp_path / "short.jsonl", 3))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit('--data is missing')", "failed: SystemExit: --data is missing"),
        ("return next(iter(()))", "failed: StopIteration"),
        ("raise ValueError('task.name: no')", "^task.name: no"),
    ],
)
def test_factory_that_fails_is_named(tmp_path, body, message):
    path = tmp_path / "mine.py"
    path.write_text(f"def build(config):\n    {body}\n")
    with pytest.raises(ValueError, match=message):
        build_task(TaskConfig(kind=TaskKind.custom, factory=f"{path}:build"))
