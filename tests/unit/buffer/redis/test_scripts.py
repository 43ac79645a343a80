"""The scripts of buffer/lua: each gets the library files that it uses, and no other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from buffer.redis.scripts import _DEFINITION, _FOLDER, _code, assemble, script_names, source

LIBRARY = sorted((_FOLDER / "lib").glob("*.lua"))
WORD = re.compile(r"[A-Za-z_]\w*")


def code(name: str) -> str:
    """A file without its comments and strings."""
    return _code((_FOLDER / f"{name}.lua").read_text())


def test_names_of_the_library_have_one_home_each() -> None:
    defined = Counter(
        name
        for path in LIBRARY
        for names in _DEFINITION.findall(_code(path.read_text()))
        for name in {*WORD.findall(names)}
    )
    assert [name for name, number in defined.items() if number > 1] == []


def test_scripts_get_the_library_that_they_use_and_no_other(tmp_path: Path) -> None:
    script = tmp_path / "script.lua"
    script.write_text("-- drop(), forget_kept()\nreturn redis.call('GET', 'rerun')\n")
    base = (_FOLDER / "lib" / "base.lua").read_text()
    main = f"local function main()\n{script.read_text()}end\n"
    assert assemble(script).startswith(base + main)
    script.write_text("return is_held('group-1', 'token')\n")
    assert assemble(script).startswith(base + (_FOLDER / "lib" / "group.lua").read_text() + "local")


def test_source_holds_each_library_file_once_before_its_use() -> None:
    text = source("trainer/form_batch")
    for name in ("audit", "fields_of", "leave_ready", "drop", "take", "read_batch"):
        assert text.count(f"local function {name}(") == 1
    assert text.index("local function fields_of(") < text.index("local function to_tombstones(")
    assert text.index("local function to_tombstones(") < text.index("local function drop(")


def test_library_files_are_all_used_by_a_script() -> None:
    shipped = "\n".join(source(name) for name in script_names())
    assert [path.stem for path in LIBRARY if path.read_text() not in shipped] == []


def _sent() -> dict[str, set[str]]:
    """By script, the fields of the requests in the package's code."""
    found: dict[str, set[str]] = {}
    for path in _FOLDER.parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            for name in (a.value for a in call.args if isinstance(a, ast.Constant)):
                if name in script_names() and isinstance(call.func, ast.Attribute):
                    fields = {keyword.arg for keyword in call.keywords if keyword.arg}
                    fields |= {"group_ids"} if call.func.attr == "_sum" else set()
                    found.setdefault(str(name), set()).update(fields)
    return found


def test_scripts_read_just_the_fields_that_are_sent_and_list_them() -> None:
    sent = _sent()
    assert sorted(sent) == list(script_names())
    for name in script_names():
        read = set(re.findall(r"\brequest\.(\w+)", code(name)))
        head = re.split(r"Reply:", (_FOLDER / f"{name}.lua").read_text())[0]
        assert read == sent[name] <= set(WORD.findall(head)), name
