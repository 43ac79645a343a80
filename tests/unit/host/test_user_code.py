"""Code that settings name as module:name or file.py:name."""

from __future__ import annotations

import json

import pytest

from host.user_code import load_callable

SETTING = "task.factory"


def test_name_in_a_module_or_in_a_file_is_found(tmp_path):
    assert load_callable("json:dumps", SETTING) is json.dumps
    assert load_callable("json:JSONDecoder.decode", SETTING) is json.JSONDecoder.decode
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass(slots=True)\n"
        "class Mine:\n"
        "    number: int = 3\n"
        "def get(): return Mine().number\n"
    )
    assert load_callable(f"{path}:get", SETTING)() == 3


def test_two_names_of_one_file_share_its_state(tmp_path):
    path = tmp_path / "counter.py"
    path.write_text("seen = []\ndef add(x): seen.append(x)\ndef get(): return seen\n")
    load_callable(f"{path}:add", SETTING)("a")
    assert load_callable(f"{path}:get", SETTING)() == ["a"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json", r"task.factory='json': write it as module:name or file.py:name"),
        ("json:", r"write it as module:name"),
        (":dumps", r"write it as module:name"),
        ("json:dump_all", r"task.factory='json:dump_all': json has nothing named 'dump_all'"),
        ("jsonn.tool:main", r"there is no module named 'jsonn'; put it on PYTHONPATH"),
        ("/nowhere/mine.py:get", r"task.factory='/nowhere/mine.py:get': there is no file /nowhere"),
    ],
)
def test_missing_name_is_reported(name, message):
    with pytest.raises(ValueError, match=message):
        load_callable(name, SETTING)


def test_file_that_fails_says_how_and_can_be_fixed(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"broken.py could not be loaded: ZeroDivisionError: div"):
        load_callable(f"{path}:get", SETTING)
    path.write_text("import notthere\n")
    with pytest.raises(ValueError, match="no module named 'notthere'"):
        load_callable(f"{path}:get", SETTING)
    path.write_text("get = int\n# changed")
    assert load_callable(f"{path}:get", SETTING) is int


def test_object_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match=r"task.factory='json:__doc__': must be a fun"):
        load_callable("json:__doc__", SETTING)


def test_file_may_import_the_modules_beside_it(tmp_path):
    (tmp_path / "letters_beside.py").write_text("LETTER = 'a'\n")
    (tmp_path / "json.py").write_text("1 / 0\n")  # hides nothing
    path = tmp_path / "mine.py"
    path.write_text(
        "import json, letters_beside\n"
        "def get(): import letters_beside; return json.dumps(letters_beside.LETTER)\n"
    )
    assert load_callable(f"{path}:get", SETTING)() == '"a"'


def test_files_whose_neighbours_have_one_name_are_refused_with_both(tmp_path):
    """Python has one module of a name: the second file would get the first one's."""
    for folder, inner in (("one", "words_of_two"), ("two", "words_of_two"), ("three", "of_three")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{inner}.py").write_text(f"WORD = {folder!r}\n")
        (tmp_path / folder / f"through_{folder}.py").write_text(f"from {inner} import WORD\n")
        (tmp_path / folder / "score.py").write_text(
            f"def get():\n    import through_{folder}\n    return through_{folder}.WORD\n"
        )
        (tmp_path / folder / "alone.py").write_text("import json\nget = json.dumps\n")
    one, two, three = (tmp_path / folder for folder in ("one", "two", "three"))
    assert load_callable(f"{one}/score.py:get", SETTING)() == "one"
    with pytest.raises(ValueError) as caught:
        load_callable(f"{two}/score.py:get", SETTING)
    for place in (one, two):
        assert f"{place}/words_of_two.py" in str(caught.value)
    assert load_callable(f"{three}/score.py:get", SETTING)() == "three"
    assert load_callable(f"{two}/alone.py:get", SETTING)([1]) == "[1]", "it imports none of them"
    (one / "second.py").write_text("from words_of_two import WORD\nget = WORD.upper\n")
    assert load_callable(f"{one}/second.py:get", SETTING)() == "ONE", "its own is the first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(2)", r"mine.py could not be loaded: SystemExit: 2"),
        ("open('/nowhere/words.txt')", r"could not be loaded: FileNotFoundError: .*words\.txt"),
    ],
)
def test_file_that_exits_or_misses_a_file_of_its_own_says_so(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_callable(f"{path}:get", SETTING)
