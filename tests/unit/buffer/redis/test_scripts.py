"""The scripts of buffer/lua: each includes the library files that it uses, and no other."""

from __future__ import annotations

import ast
import re

import pytest

from buffer.redis.scripts import _FOLDER, script_names, source

LIBRARY = sorted(path.stem for path in (_FOLDER / "lib").glob("*.lua"))
WORD = re.compile(r"[A-Za-z_]\w*")
DEFINITION = re.compile(r"^local (?:function )?([\w, ]+)", re.MULTILINE)


def code(name: str) -> str:
    """A file without its comments and strings."""
    text = (_FOLDER / f"{name}.lua").read_text()
    return re.sub(r"'[^']*'", "''", re.sub(r"--.*", "", text))


HOMES = {
    name: library
    for library in LIBRARY
    for defined in DEFINITION.findall(code(f"lib/{library}"))
    for name in WORD.findall(defined)
}
"""The file of lib/ that defines each name."""


@pytest.mark.parametrize("name", [*script_names(), *(f"lib/{name}" for name in LIBRARY)])
def test_scripts_include_the_library_that_they_use_and_no_other(name: str) -> None:
    used = {HOMES[word] for word in WORD.findall(code(name)) if word in HOMES}
    included = re.findall(r"^-- @include lib/(\w+)$", (_FOLDER / f"{name}.lua").read_text(), re.M)
    assert included == sorted(used - {"base", name.removeprefix("lib/")})


def test_source_holds_each_library_file_once_before_its_use() -> None:
    text = source("trainer/form_batch")
    for name in ("audit", "fields_of", "leave_ready", "drop", "take", "read_batch"):
        assert text.count(f"local function {name}(") == 1
    assert text.index("local function fields_of(") < text.index("local function to_tombstones(")
    assert text.index("local function to_tombstones(") < text.index("local function drop(")


def test_library_files_are_all_included_by_a_script() -> None:
    shipped = "\n".join(source(name) for name in script_names())
    assert [name for name in LIBRARY if f"-- @include lib/{name}\n" not in shipped] == ["base"]


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
