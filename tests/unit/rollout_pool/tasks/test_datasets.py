"""Problems read from files and data sets as they are found in the wild."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from dataclasses import replace

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from configs.choices import TaskKind
from configs.rollout_schema import MixedTask, TaskConfig
from rollout_pool.tasks.registry import build_task, check_data, data_of
from rollout_pool.tasks.task import TaskStream
from rollout_pool.tasks.verifiers.adapter import Row

MORE = [{"question": f"{n} plus 1 is", "answer": n + 1} for n in range(4)]
LINES = {  # by kind: the text of a line of its file, with a text of one's own in the question
    TaskKind.questions: '{"question": "%s", "answer": "a"}',
    TaskKind.gsm8k: '{"question": "%s", "answer": "#### 1"}',
    TaskKind.math: r'{"problem": "%s", "solution": "\\boxed{1}"}',
    TaskKind.code: '{"prompt": "%s", "tests": [{"input": "1", "output": "1"}]}',
}


def questions(**settings):
    return build_task(TaskConfig(kind=TaskKind.questions, **{"eval_size": 1, **settings}))


def of_file(path, text, **settings):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return questions(path=str(path), **settings)


def of_rows(path, rows, **settings):
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return of_file(path, text, **settings)


def of_parquet(folder, rows, **settings):
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    params = {"eval_split": None, **settings.pop("params", {})}
    return questions(name=str(folder), params=params, **settings)


def in_epoch(task, count):
    """By its text, the training prompts of the first `count` places."""
    return {prompt.text: prompt for prompt in itertools.islice(TaskStream(task, 0, 1), count)}


# Answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (42.0, "42"),
        (42, "42"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (1e-5, "0.00001"),
        (3e15, "3" + "0" * 15),
    ],
)
def test_number_is_an_answer_as_one_writes_it(tmp_path, answer, text):
    rows = [{"question": "6 times 7 is", "answer": answer}, *MORE]
    listed = questions(params={"questions": rows})
    for task in (listed, of_rows(tmp_path / "a.jsonl", rows)):
        prompt = in_epoch(task, 4)["6 times 7 is"]
        assert task.solution(prompt) == text and task.score(prompt, text) == 1.0


@pytest.mark.parametrize(
    ("answer", "shown"),
    [("NaN", "nan"), ("Infinity", "inf"), ("null", "None"), ("true", "True"), ('" "', "' '")],
)
def test_answer_that_no_model_can_give_is_refused_with_its_row(tmp_path, answer, shown):
    lines = [json.dumps(MORE[0]), f'{{"question": "Unknown", "answer": {answer}}}']
    with pytest.raises(ValueError) as refused:
        of_file(tmp_path / "a.jsonl", "\n".join(lines))
    assert str(refused.value) == (
        f'task.path={tmp_path}/a.jsonl, line 2: "answer" must be text, a finite number or a list '
        f"of these, not {shown}; leave the row out, or give it its answer"
    )


def test_column_that_one_missing_value_made_floats_is_refused_with_the_row(tmp_path):
    rows = [{"question": f"{n}?", "answer": float(n)} for n in range(3)]
    task = of_parquet(tmp_path / "whole", rows)
    assert task.solution(in_epoch(task, 2)["1?"]) == "1"
    rows[1]["answer"] = None
    with pytest.raises(ValueError, match=r'train 1: "answer" must be .* not None; leave the row'):
        of_parquet(tmp_path / "missing", rows)


def test_each_of_a_list_of_answers_is_right_and_the_first_is_the_solution(tmp_path):
    rows = [{"question": "The capital of France is", "answer": ["Paris", "Lutetia", 75.0]}, *MORE]
    for task in (of_rows(tmp_path / "a.jsonl", rows), questions(params={"questions": rows})):
        prompt = in_epoch(task, 4)["The capital of France is"]
        assert task.solution(prompt) == "Paris"
        scores = [task.score(prompt, text) for text in ("lutetia.", "Paris", "75", "Rome")]
        assert scores == [1.0, 1.0, 1.0, 0.0]
    for bad, shown in (([], r"\[\]"), (["Paris", None], ".*None.")):
        rows[0]["answer"] = bad
        with pytest.raises(ValueError, match=rf'line 1: "answer" must be .* not {shown}; leave'):
            of_rows(tmp_path / "b.jsonl", rows)


def test_answer_of_several_lines_is_compared_with_as_many_last_lines(tmp_path):
    rows = [{"question": "Count.", "answer": "one\ntwo"}, {"question": "Go on.", "answer": "3"}]
    task = of_rows(tmp_path / "a.jsonl", rows)
    prompt = task.example(0)
    assert task.score(prompt, "Well:\nOne\n two") == 1.0
    assert task.score(prompt, "two") == task.score(prompt, "one two three") == 0.0


def test_narrow_floats_of_a_table_are_answers_as_they_are_written(tmp_path):
    asked = [f"{n}?" for n in range(3)]
    for dtype in (pyarrow.float16(), pyarrow.float32(), pyarrow.float64()):
        values = pyarrow.array(np.array([0.1, 42, 2.5], dtype.to_pandas_dtype()), dtype)
        ways = {
            "answer": values,
            "in.truth": pyarrow.StructArray.from_arrays([values], ["truth"]),
            "several": pyarrow.ListArray.from_arrays([0, 1, 2, 3], values),
        }
        for column, answers in ways.items():
            folder = tmp_path / f"{dtype}-{column}"
            folder.mkdir()
            name = column.partition(".")[0]
            table = pyarrow.table({"question": asked, name: answers})
            pyarrow.parquet.write_table(table, folder / "train.parquet")
            for path in (folder, folder / "train.parquet"):
                params = {"answer": column} | ({"eval_split": None} if path == folder else {})
                task = questions(path=str(path), params=params)
                found = {text: task.solution(one) for text, one in in_epoch(task, 2).items()}
                assert found == {"0?": "0.1", "1?": "42"}


def test_worked_out_answer_without_a_result_is_refused_with_its_row(tmp_path):
    math = {"score": "math"}
    for answer in ("foo ####", r"foo \boxed{ }"):
        rows = [*MORE, {"question": "?", "answer": ["1", answer]}]
        with pytest.raises(ValueError, match=r'line 5: "answer" has no result in its last box or '):
            of_rows(tmp_path / "a.jsonl", rows, params=math)
        assert of_rows(tmp_path / "a.jsonl", rows).eval_prompts()


# Lines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LINES)
def test_separators_inside_a_string_do_not_end_a_line_of_a_file(tmp_path, kind):
    text = "one\u2028two\u2029three\u0085four"
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(LINES[kind] % one for one in ("first", text, "last")))
    for paths in ({"path": str(path)}, {"path": str(path), "eval_path": str(path)}):
        task = build_task(TaskConfig(kind=kind, eval_size=1, **paths))
        shown = [one.question for one in (*task._training, *task._held_out)]
        assert shown[1] == text and len(shown) == (4 if "eval_path" in paths else 3)
    path.write_text(LINES[kind] % text + "\n\r\n{oops")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: not JSON"):
        build_task(TaskConfig(kind=kind, eval_size=1, path=str(path)))


def test_mark_of_the_byte_order_and_other_line_ends_are_no_part_of_a_line(tmp_path):
    lines = [json.dumps(row) for row in MORE]
    mark = "\ufeff"
    several = "\n".join(mark + line for line in lines)  # files, one put behind the other
    for text in (mark + "\n".join(lines), "\r\n".join(lines), several):
        assert len(in_epoch(of_file(tmp_path / "a.jsonl", text), 3)) == 3
    with pytest.raises(ValueError, match=r"a\.jsonl: not a text file in UTF-8"):
        of_file(tmp_path / "a.jsonl", "\n".join(lines).encode("utf-16"))


@pytest.mark.parametrize("kind", LINES)
def test_half_of_a_surrogate_pair_is_refused_with_its_line(tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(LINES[kind] % one for one in ("a", "b", r"bad \ud83d end", "c")))
    with pytest.raises(ValueError, match=r"line 3: \".*\" has half of a surrogate pair.*'\\ud83d'"):
        build_task(TaskConfig(kind=kind, eval_size=1, path=str(path)))
    path.write_text("\n".join(LINES[kind] % one for one in ("a", r"\ud83d\ude00")))
    task = build_task(TaskConfig(kind=kind, eval_size=1, path=str(path)))
    assert task.eval_prompts()[0].text == "\N{GRINNING FACE}"


def test_half_of_a_surrogate_pair_is_refused_in_every_text_of_a_problem(tmp_path):
    bad = r"\ud83d"
    for kind, line in {
        TaskKind.questions: f'{{"question": "a", "answer": ["b", "{bad}"]}}',
        TaskKind.gsm8k: f'{{"question": "a", "answer": "{bad} #### 1"}}',
        TaskKind.math: f'{{"problem": "a", "solution": "{bad} \\\\boxed{{1}}"}}',
        TaskKind.code: f'{{"prompt": "a", "tests": [{{"input": "{bad}", "output": "1"}}]}}',
    }.items():
        path = tmp_path / f"{kind.name}.jsonl"
        path.write_text(f"{line}\n{line}")
        with pytest.raises(ValueError, match=r"line 1.* has half of a surrogate pair"):
            build_task(TaskConfig(kind=kind, eval_size=1, path=str(path)))
    whole = '{"prompt": "a", "tests": {"assert": "1"}, "solution": "%s", "note": "%s"}'
    path.write_text(f"{whole % ('1', bad)}\n{whole % (bad, '')}")
    with pytest.raises(ValueError, match='line 2: "solution" has half'):  # a note is not used
        build_task(TaskConfig(kind=TaskKind.code, eval_size=1, path=str(path)))


# Other forms --------------------------------------------------------------------------------------

NESTED = {"question": "prompt", "answer": "reward_model.ground_truth"}


def nested(count, *before):
    return [
        {
            "prompt": [*before, {"role": "user", "content": f"{n}+1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"index": n},
        }
        for n in range(count)
    ]


def test_conversations_and_fields_of_columns_are_read_from_files_of_each_kind(tmp_path):
    system = {"role": "system", "content": "Be short."}
    for before, prompt in (([], None), ([system], "Be short.")):
        rows = nested(4, *before)
        settings = {"params": NESTED, "system_prompt": prompt}
        folder = tmp_path / str(prompt)
        parquet = folder / "train.parquet"
        for task in (
            of_parquet(folder, rows, **settings),
            questions(path=str(parquet), **settings),
            questions(path=str(parquet), eval_path=str(parquet), **settings),
            of_rows(tmp_path / "a.jsonl", rows, **settings),
        ):
            found = in_epoch(task, 3)
            assert {"1+1?", "2+1?"} < found.keys() and task.solution(found["2+1?"]) == "3"
            [*opening, user, _] = task.demonstration(found["1+1?"])
            assert user.content == "1+1?" and [one.content for one in opening] == [
                one["content"] for one in before
            ]


CALL_ID = "c00000001"


def called(arguments):
    function = {"name": "add", "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            [{"role": "system", "content": "Be long."}],
            "begins with the system message 'Be long.', and task.system_prompt is 'Be short.'; le",
        ),
        (
            ["a"],
            "message 1: 'a' must be an object with a \"role\", which is one of system, user, as",
        ),
        ([{"role": "human", "content": "a"}], "message 1: {'role': 'human', 'content': 'a'} must "),
        ([{"role": "user", "content": 7}], 'message 1: "content" must be a non-empty string'),
        ([{"role": "user", "content": " "}], 'message 1: "content" must be a non-empty string'),
        (
            [{"role": "user", "content": "a", "weight": 1}],
            'message 1: "weight" is no field of a message of the user, which has role, content; l',
        ),
        (
            [{"role": "assistant", "content": "a", "tool_calls": "add"}],
            "message 1: \"tool_calls\" must be a list, not 'add'",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}],
            "message 1, call 1: {'name': 'add'} must be {\"id\": ",
        ),
        ([called("{1")], 'message 1, call 1: "arguments" must be JSON: Expecting property name'),
        ([called("[1]")], 'message 1, call 1: "arguments" must be a JSON object, not [1]'),
        (
            [{"role": "tool", "content": "3", "tool_call_id": 7}],
            'message 1: "tool_call_id" must be a non-empty string',
        ),
    ],
)
def test_message_of_a_wrong_kind_is_refused_with_its_place(tmp_path, before, message):
    settings = {"params": NESTED, "system_prompt": "Be short.", "chat_template": True}
    with pytest.raises(ValueError) as refused:
        of_rows(tmp_path / "a.jsonl", nested(4, *before), **settings)
    place = f'task.path={tmp_path}/a.jsonl, line 1: "prompt"'
    assert str(refused.value).startswith(f"{place} {message}") or str(refused.value).startswith(
        f"{place}, {message}"
    )


@pytest.mark.parametrize(
    ("roles", "shown"),
    [((), "none"), (("system",), "system"), (("user", "assistant"), "user, assistant")],
)
def test_conversation_without_a_question_at_its_end_is_refused(tmp_path, roles, shown):
    row = {"question": [{"role": one, "content": "a"} for one in roles], "answer": "b"}
    with pytest.raises(ValueError, match=rf'line 1: "question": the roles {shown} leave the mod'):
        of_rows(tmp_path / "a.jsonl", [row, row], chat_template=True)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((), "the question and the answer are this one column, so its conversation must end"),
        (("user",), "the question and the answer are this one column, so its conversation must e"),
        (("assistant", "user", "assistant"), "the roles none leave the model nothing to answer"),
    ],
)
def test_whole_conversation_without_question_or_answer_is_refused(tmp_path, roles, message):
    row = {"question": [{"role": one, "content": "a"} for one in roles]}
    with pytest.raises(ValueError, match=f'line 1: "question": {message}'):
        of_rows(tmp_path / "a.jsonl", [row, row], params={"answer": "question"})


SEVERAL = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    called('{"a": 1, "b": 1}'),
    {"role": "tool", "content": "2", "tool_call_id": CALL_ID},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And one more"},
]


def several(count):
    """Rows of one last question whose earlier turns differ."""
    rows = [{"prompt": [dict(one) for one in SEVERAL], "label": n + 2} for n in range(count)]
    for n, row in enumerate(rows):
        row["prompt"][1]["content"] = f"{n}+1?"
    return rows


async def test_conversation_of_several_turns_is_what_an_episode_opens_with(tmp_path):
    settings = {
        "params": {"question": "prompt", "answer": "label"},
        "chat_template": True,
        "instruction": "!",
    }
    parquet = tmp_path / "rows" / "train.parquet"
    for task in (
        of_rows(tmp_path / "a.jsonl", several(4), **settings),
        of_parquet(parquet.parent, several(4), **settings),
        questions(path=str(parquet), **settings),
    ):
        prompts = list(itertools.islice(TaskStream(task, 0, 1), 3))
        assert {task.solution(prompt) for prompt in prompts} == {"2", "3", "4"}
        prompt = next(one for one in prompts if task.solution(one) == "3")
        first = (await task.environment(prompt).reset()).messages
        assert first == task.demonstration(prompt)[:-1] == prompt.opening("ignored")
        assert prompt.text == "And one more!" == first[-1].content
        assert [one.content for one in first[:5]] == ["Be short.", "1+1?", "", "2", "Two."]
        assert [one.role for one in first] == [one["role"] for one in SEVERAL]
        [call] = first[2].tool_calls
        assert (call.name, call.arguments, call.call_id) == ("add", {"a": 1, "b": 1}, CALL_ID)
        assert (first[3].tool_call_id, first[3].name) == (CALL_ID, "add")
        [shape] = task.shapes
        assert [one.role for one in shape.conversation] == [one.role for one in first]


PART = {"type": "text", "text": "?"}


def test_result_of_a_tool_may_be_what_the_model_is_to_answer(tmp_path):
    asked = {"role": "user", "content": [{"type": "text", "text": "1+1"}, PART]}
    rows = [{"question": [asked, *SEVERAL[2:4]], "answer": n} for n in range(2)]
    settings = {"chat_template": True, "system_prompt": "Add."}
    task = of_rows(tmp_path / "a.jsonl", rows, **settings)
    [prompt] = task.eval_prompts()
    opened = prompt.opening(None)
    assert [one.role for one in opened] == ["system", "user", "assistant", "tool"]
    assert (opened[0].content, prompt.text) == ("Add.", "1+1?")


def test_turns_without_a_template_that_sets_them_apart_are_refused(tmp_path):
    params = {"question": "prompt", "answer": "label"}
    with pytest.raises(
        ValueError, match=r"^task\.chat_template=false: task\.path=.*line 1: \"prom"
    ):
        of_rows(tmp_path / "a.jsonl", several(2), params=params)
    own = [{"role": "system", "content": "Be odd. "}, {"role": "user", "content": "1?"}]
    rows = [{"prompt": own, "label": n} for n in range(2)]
    task = of_rows(tmp_path / "b.jsonl", rows, params=params)
    assert [one.content for one in task.eval_prompts()[0].opening(None)] == ["Be odd. ", "1?"]


# Kinds of files -----------------------------------------------------------------------------------

PLAIN = [{"question": f"{n} plus 1 is", "answer": f"00{n + 1}"} for n in range(4)]


def written(folder, kind):
    """A file or a folder of PLAIN."""
    path = folder / f"rows.{kind}"
    table = pyarrow.Table.from_pylist(PLAIN)
    if kind in ("json", "data.json"):
        path.write_text(json.dumps(PLAIN if kind == "json" else {"data": PLAIN}, indent=1))
    elif kind == "lines.json":
        path.write_text("\n".join(map(json.dumps, PLAIN)))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, ["question", "answer"], delimiter=",\t"[kind == "tsv"])
            rows.writeheader()
            rows.writerows(PLAIN)
    elif kind == "arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    elif kind == "feather":
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif kind == "saved":
        datasets.Dataset.from_list(PLAIN).save_to_disk(path)
    else:
        splits = {"train": PLAIN[:3], "test": PLAIN[3:]}
        made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        if kind == "splits":
            datasets.DatasetDict(made).save_to_disk(path)
        else:
            for name, rows in made.items():
                rows.to_csv(path / f"{name}.csv")
    return path


KINDS = ("json", "data.json", "lines.json", "csv", "tsv", "arrow", "feather", "saved", "splits")


@pytest.mark.parametrize("kind", KINDS)
def test_file_or_saved_folder_of_each_kind_holds_the_same_data(tmp_path, kind, capfd):
    path = written(tmp_path, kind)
    config = TaskConfig(kind=TaskKind.questions, path=str(path), eval_size=1)
    task = build_task(config)
    assert [prompt.text for prompt in task.eval_prompts()] == ["3 plus 1 is"]
    assert {text: task.solution(one) for text, one in in_epoch(task, 3).items()} == {
        row["question"]: row["answer"] for row in PLAIN[:3]
    }
    by_lines = of_rows(tmp_path / "same.jsonl", PLAIN)
    assert task.data == by_lines.data
    if path.is_dir():
        assert build_task(replace(config, path=None, name=str(path))).data == task.data


def test_folder_of_files_is_a_data_set_with_splits(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    path.mkdir()
    for name, rows in (("train", PLAIN[:3]), ("test", PLAIN[3:])):
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = questions(path=str(path))
    assert task.data == of_rows(tmp_path / "same.jsonl", PLAIN).data
    with pytest.raises(ValueError, match=r"^task\.path='.*rows': its split 'dev' did not load"):
        questions(path=str(path), params={"eval_split": "dev"})
    (other := tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"^task\.eval_path=.*other: not a readable file"):
        questions(path=str(path), eval_path=str(other))


def test_folder_of_tables_in_text_keeps_its_values_as_text(tmp_path):
    by_lines = of_rows(tmp_path / "same.jsonl", PLAIN)
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / kind
        path.mkdir()
        for name, rows in (("train", PLAIN[:3]), ("test", PLAIN[3:])):
            lines = [separator.join(row.values()) for row in rows]
            (path / f"{name}.{kind}").write_text("\n".join([f"question{separator}answer", *lines]))
        assert questions(path=str(path)).data == by_lines.data
        with pytest.raises(ValueError, match=rf"^task\.path='.*{kind}': its split 'dev' did not"):
            questions(path=str(path), params={"eval_split": "dev"})
        (path / f"test.{kind}").write_text(f"question{separator}answer\na{separator}")
        with pytest.raises(ValueError, match=rf"^task\.path=.*test\.{kind}, line 2: \"answer\""):
            questions(path=str(path))
    (path / "test.tsv").unlink()
    (path / "test.tsv.gz").write_bytes(gzip.compress(b"question\tanswer\na\t007"))
    with pytest.raises(ValueError, match=r"^task\.path=.*test\.tsv\.gz: not a text file in UTF-8"):
        questions(path=str(path))


def test_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv: 2 columns are named 'answer'; rename all but"):
        of_file(tmp_path / "a.csv", "question,answer,answer\na,b,c\nd,e,f")


@pytest.mark.parametrize("text", ['"a\tb\nc"\td', '"a\tb"\tc'])
def test_value_of_tabs_that_a_quotation_mark_opens_does_not_swallow_others(tmp_path, text):
    with pytest.raises(ValueError, match=r"a\.tsv, line \d: a value that begins with a quotation"):
        of_file(tmp_path / "a.tsv", f"question\tanswer\n{text}\nd\te")
    task = of_file(tmp_path / "a.tsv", 'question\tanswer\n"""a"\tb\nc\td')
    assert in_epoch(task, 1).keys() == {'"a'}


def test_csv_keeps_commas_and_lines_in_quotes_and_names_a_line_that_is_none(tmp_path):
    text = '\ufeffquestion,answer\r\n"Say ""a, b""\u2028\nthen stop",a\r\n\r\nb,c\r\n'
    task = of_file(tmp_path / "a.csv", text)
    assert in_epoch(task, 1).keys() == {'Say "a, b"\u2028\nthen stop'}
    for bad, message in (
        ("b,c,d", "line 5: 3 values for the 2 columns question, answer; put a value that has a s"),
        ('"b', "line 5: not CSV: unexpected end of data"),
        ("b,", "line 5: \"answer\" must be text, a finite number or a list of these, not ''; lea"),
    ):
        with pytest.raises(ValueError) as refused:
            of_file(tmp_path / "a.csv", f"question,answer\n\na,b\n\n{bad}")
        assert str(refused.value).startswith(f"task.path={tmp_path}/a.csv, {message}")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"question": "a", "answer": "b"}, 7]', "a.json, row 1: not an object; each"),
        ("a.json", '[{"question": "a"', "a.json, line 1: not JSON: Expecting ',' delimiter"),
        ("a.json", "[" * 100_000, "a.json, line 1: not JSON: maximum recursion depth"),
        ("a.jsonl", '\n{"answer": ' + "9" * 5000, "a.jsonl, line 2: not JSON: Exceeds the limit"),
        ("a.json", "[]", "a.json: the file is empty; each line must be"),
        ("a.csv", "", "a.csv: the file is empty; each"),
        ("a.csv", "question,answer", "a.csv: the file is empty; each"),
        ("a.arrow", "nothing", "a.arrow: no Arrow file that can be read"),
        ("a.arrow", None, "a.arrow: there is no such file"),
    ],
)
def test_file_that_is_not_what_its_suffix_says_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as refused:
        questions(path=str(path))
    assert str(refused.value).startswith(f"task.path={tmp_path}/{message}")


def test_fields_of_columns_are_among_those_that_exist(tmp_path):
    missing = {**NESTED, "answer": "reward_model.truth"}
    names = r"prompt, reward_model\.style, reward_model\.ground_truth, extra_info\.index; set it"
    with pytest.raises(ValueError, match=r"answer='reward_model\.truth': .*line 1 .*" + names):
        of_rows(tmp_path / "a.jsonl", nested(4), params=missing)
    dotted = [{"question": f"{n}", "a.b": n} for n in range(3)]
    assert in_epoch(of_rows(tmp_path / "b.jsonl", dotted, params={"answer": "a.b"}), 2)


def test_parquet_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(ValueError, match=r"task.path=.*rows\.parquet: there is no such file"):
        questions(path=str(path))
    path.write_text("nothing")
    with pytest.raises(ValueError, match=r"task.path=.*rows\.parquet: no Parquet file that can"):
        questions(path=str(path))
    rows = [{"question": "a", "answer": "b"}, {"question": "", "answer": "c"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=r'rows\.parquet, row 1: "question" must be a non-empty'):
        questions(path=str(path))


# Which are held out -------------------------------------------------------------------------------


def test_rows_of_one_question_are_told_apart_by_their_answers(tmp_path):
    rows = [{"question": "Play one round.", "answer": n % 4} for n in range(8)]
    task = of_rows(tmp_path / "a.jsonl", rows)
    prompts = list(itertools.islice(TaskStream(task, 0, 1), 5))
    assert [task.solution(prompt) for prompt in task.eval_prompts()] == ["3"]
    assert {task.solution(prompt) for prompt in prompts} == {"0", "1", "2"}


def test_rows_with_several_conversations_about_one_question_are_that_question(tmp_path):
    def row(question, answer):
        said = (("user", question), ("assistant", answer))
        return {"messages": [{"role": role, "content": text} for role, text in said]}

    rows = [row("1+1?", "Two."), row("2+2?", "Four."), row("1+1?", "It is two.")]
    settings = {"params": {"question": "messages", "answer": "messages"}, "chat_template": True}
    task = of_rows(tmp_path / "a.jsonl", rows, **settings)
    assert in_epoch(task, 3).keys() == {"2+2?"}
    rows[1] = row("2+2?", "Five.")
    assert of_rows(tmp_path / "b.jsonl", rows, **settings).data != task.data


@pytest.mark.parametrize(
    ("kind", "held_out"),
    [
        (TaskKind.gsm8k, {"question": "a", "answer": "In other words. #### 1"}),
        (TaskKind.math, {"problem": "a", "solution": r"In other words. \boxed{1}"}),
        (TaskKind.code, {"prompt": "a", "tests": [{"input": "1", "output": "1"}], "solution": ""}),
    ],
)
def test_problem_with_another_way_to_the_same_answer_is_the_same_problem(tmp_path, kind, held_out):
    path = tmp_path / "rows.jsonl"
    rows = [LINES[kind] % one for one in ("a", "b")]
    path.write_text("\n".join([*rows, json.dumps(held_out)]))
    task = build_task(TaskConfig(kind=kind, eval_size=1, path=str(path)))
    assert in_epoch(task, 3).keys() == {"b"}


def test_tasks_of_an_environment_are_told_apart_by_all_but_their_numbers():
    first, again, other = (
        Row(question="Play.", opening=(), row={"idx": idx, "answer": "", "board": board})
        for idx, board in ((0, "x"), (1, "x"), (2, "y"))
    )
    assert first.right == again.right != other.right


def test_problems_that_are_held_out_too_are_passed_over_and_counted(tmp_path, caplog):
    rows = [{"question": f"{n}?", "answer": n} for n in range(6)]
    with caplog.at_level("INFO"):
        task = of_rows(tmp_path / "a.jsonl", [*rows, *rows[:2]], eval_size=2)
    assert in_epoch(task, 8).keys() == {"2?", "3?", "4?", "5?"}
    assert "2 of the 6 training problems of questions are held out too" in caplog.text


# The same data throughout a run -------------------------------------------------------------------


@pytest.mark.parametrize("is_mixed", [False, True])
def test_data_that_have_changed_since_the_run_began_are_refused(tmp_path, is_mixed):
    path, rows = tmp_path / "rows.jsonl", [{"question": f"{n}?", "answer": n} for n in range(5)]

    def now(rows):
        path.write_text("\n".join(map(json.dumps, rows)))
        own = {"kind": TaskKind.questions, "path": str(path), "eval_size": 1}
        config = TaskConfig(**own)
        if is_mixed:
            drawn = MixedTask(kind=TaskKind.alphabet_sort, eval_size=1)
            tasks = {"own": MixedTask(**own), "drawn": drawn}
            config = TaskConfig(kind=TaskKind.mixture, tasks=tasks, max_turns=3)
        return config, build_task(config)

    before = data_of(now(rows)[1])
    assert before.keys() == {"own" if is_mixed else ""}
    check_data(*now([dict(row) for row in rows]), before)
    more = [*rows, {"question": "5?", "answer": 5}]
    for changed in (more, rows[1:], rows[::-1], [{**rows[0], "answer": 7}, *rows[1:]]):
        with pytest.raises(ValueError) as refused:
            check_data(*now(changed), before)
        setting = "task.tasks.own" if is_mixed else "task"
        words = f"{setting}.path={path}: it has {len(changed) - 1} problems (sha256 "
        assert str(refused.value).startswith(words)
        assert "but the run began with 4 problems (sha256" in str(refused.value)
    check_data(*now(more), {})  # of a run that has not written it
