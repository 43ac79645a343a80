"""Programs and their tests: correct programs, and some that try to cheat."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollout_pool.rewards.code_tests import judge, program_of
from rollout_pool.sandbox.run import SandboxLimits, run_program
from rollout_pool.tasks.programs import ProgramTest

STATEMENT = "assert f(20) == 9407"
STATEMENTS = ProgramTest(statements="assert f(20) == 9407\nassert f(1) == 5")

DOUBLE = "print(2 * int(input()))"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("So:\n```python\nprint(1)\n```\nor\n```python\nprint(2)\n```\ndone", "print(2)\n"),
        ("```py\nprint(1)\n```\nwhich prints\n```\n1\n```", "print(1)\n"),
        ("```\nprint(3)\n```", "print(3)\n"),
        ("```python\nprint(4)", "print(4)"),
        ("print(5)", "print(5)"),
        ("", ""),
    ],
)
def test_program_is_the_last_block_of_python(answer, program):
    assert program_of(answer) == program


def test_program_of_another_language_is_the_last_block_of_it():
    answer = "```js\nlet a\n```\n```JavaScript\nlet b\n```\n```python\nprint(1)\n```"
    assert program_of(answer, ("javascript", "js")) == "let b\n"
    assert program_of(answer, ("perl",)) == "print(1)\n"
    signed = "```c++\nint a;\n```\n```c\nint b;\n```\n```\n$ ./a\n```"
    assert program_of(signed, ("cpp", "c++")) == "int a;\n"
    assert program_of(signed, ("c",)) == "int b;\n"


async def test_score_of_a_program_is_the_share_of_its_tests_that_it_passes():
    tests = [ProgramTest(input=str(n), output=f"{2 * n} \n\n") for n in (1, 2, 3)]
    verdict = await judge(DOUBLE, tests)
    assert (verdict.fraction, verdict.explanation) == (1.0, "")
    verdict = await judge("print(int(input()) ** 2)", tests)
    assert verdict.num_passed == 1 and verdict.explanation == "test 1: wrong output"
    statements = ProgramTest(statements="assert f(2) == 4\nassert f(0) == 0")
    assert (await judge("def f(x): return x * x", [statements])).fraction == 1.0
    wrong = await judge("def f(x): return x + 1", [statements])
    assert wrong.fraction == 0.0 and "AssertionError" in wrong.explanation


@pytest.mark.parametrize(
    "trick", ["import os; os._exit(0)", "exit()", "raise SystemExit", "def f(x: return 4", '"""']
)
async def test_program_that_ends_before_its_test_has_not_passed(trick):
    verdict = await judge(trick, [ProgramTest(statements="assert False")])
    assert verdict.fraction == 0.0 and verdict.explanation.startswith("test 1: ")


async def test_endless_program_is_not_given_all_its_tests():
    tests = [ProgramTest(input="1", output="1")] * 200
    limits = SandboxLimits(wall_time_s=0.3)
    async with asyncio.timeout(60):
        verdict = await judge("import time\ntime.sleep(60)", tests, limits)
    assert verdict.fraction == 0.0 and "it took too long" in verdict.explanation


# Programs without a solution ----------------------------------------------------------------------

OWN_CONSTANTS = """
import os, sys
for constant in sys._getframe().f_code.co_consts:
    if isinstance(constant, str):
        print(constant, flush=True)
os._exit(0)
"""
CODE_OF_THE_CALLER = """
import os, re, sys
code = sys._getframe(1).f_locals["code"]
print(re.findall("[0-9a-f]{32}", str(code))[-1], flush=True)
os._exit(0)
"""
ALL_IN_REACH = """
import os, sys

def found():
    frame, all_of_it = sys._getframe(), []
    while frame:
        values = [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
        for value in values:
            for name in getattr(type(value), "__slots__", ()):
                values.append(getattr(value, name, None))
            if hasattr(value, "co_consts"):
                all_of_it += value.co_consts
            if getattr(value, "__closure__", None):
                all_of_it += [cell.cell_contents for cell in value.__closure__]
        all_of_it += values
        frame = frame.f_back
    texts = [value for value in all_of_it if isinstance(value, str)]
    return [text.encode() for text in texts] + [v for v in all_of_it if type(v) is bytes]

def f(x):
    for content in found():
        print(content.decode("utf-8", "replace"), flush=True)
        for number in range(1, 64):
            try:
                os.write(number, content)
            except OSError:
                pass
    os._exit(0)
"""


@pytest.mark.parametrize(
    "attack",
    [OWN_CONSTANTS, CODE_OF_THE_CALLER, ALL_IN_REACH, f"{ALL_IN_REACH}\nf(0)"],
    ids=["its own constants", "its caller's code", "all in reach later", "all in reach at once"],
)
async def test_frames_hold_nothing_that_passes_a_test(attack):
    verdict = await judge(attack, [STATEMENTS])
    assert verdict.num_passed == 0 and verdict.explanation.startswith("test 1: ")


async def test_program_does_not_see_its_test_before_it_has_ended():
    test = ProgramTest(statements="assert f(3) == 9  # evihcra")
    looks = "assert not any(b'archive'[::-1] in text for text in found())\n"
    finds = "assert any(b'archive' in text for text in found())\n"  # its own text
    right = "def f(x): return x * x"  # rather than all that it found
    verdict = await judge(f"{ALL_IN_REACH}\n{looks}{finds}{right}", [test])
    assert (verdict.fraction, verdict.explanation) == (1.0, "")


@pytest.mark.parametrize(
    "trick",
    [
        "import builtins\nbuiltins.exec = lambda *given: None",
        "import builtins\nbuiltins.compile = lambda *given, **named: 'pass'",
        "import builtins\nbuiltins.AssertionError = SystemExit",
        "import builtins\nbuiltins.abs = lambda given: 9407",
        "import os\nos.read = lambda *given: b'0\\n'",
        "import sys\nsys.settrace(lambda frame, *rest: frame.f_globals.update(f=int))",
        "import sys\nsys.excepthook = lambda *given: None",
    ],
)
async def test_patched_python_does_not_pass_a_test(trick):
    tests = [ProgramTest(statements="assert abs(f(-20)) == 9407")]
    verdict = await judge(f"{trick}\ndef f(x): return x", tests)
    assert verdict.num_passed == 0 and verdict.explanation.startswith("test 1: ")


RIGS = {
    "equals all": """
class Equal:
    def __eq__(self, other):
        return True
    __bool__ = __contains__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
def f(x):
    return Equal()
""",
    "equal number": """
class Equal(int):
    def __eq__(self, other):
        return True
    __hash__ = int.__hash__
def f(x):
    return Equal(0)
""",
    "callers": """
import sys
def f(x):
    frame = sys._getframe(1)
    while frame:
        for value in [*frame.f_code.co_consts, *frame.f_locals.values()]:
            if type(value) is int and value > 9000:
                return value
        frame = frame.f_back
""",
    "all objects": """
import gc, re
def f(x):
    for thing in gc.get_objects():
        for value in gc.get_referents(thing):
            text = value.decode("utf-8", "replace") if type(value) is bytes else str(value)
            if found := re.search("== ?([0-9]{4})", text):
                return int(found[1])
""",
    "reads pipes": """
import os
for number in range(3, 64):
    try:
        os.set_blocking(number, False)
    except OSError:
        continue
def f(x):
    for number in range(3, 64):
        try:
            content = os.read(number, 100_000)
            os.write(number, content)
        except OSError:
            pass
""",
    "answers for itself": """
import os
for number in range(3, 64):
    for message in (b"ran", b"N", b"tlNTl0:d0:", b"t4:NTl0:d0:", b"0 0.0 1", b"\\xff" * 9):
        try:
            os.write(number, len(message).to_bytes(8, "big") + message)
        except OSError:
            pass
def f(x):
    os._exit(0)
""",
    "stops iteration": """
def f(x):
    raise StopIteration
""",
    "modules": """
import math, unittest, sys
class AllIsWell:
    def __getattr__(self, name):
        return lambda *given, **named: True
math.isclose = lambda *given, **named: True
unittest.TestCase.assertEqual = lambda *given: None
sys.modules["math"] = sys.modules["unittest"] = AllIsWell()
sys.meta_path.insert(0, AllIsWell())
math = AllIsWell()
def f(x): return 0
""",
    "signal": "f = lambda x: None\nimport os, signal\nos.kill(os.getpid() + 1, signal.SIGKILL)",
}


@pytest.mark.parametrize("rig", RIGS.values(), ids=RIGS)
async def test_rigged_program_does_not_pass_its_statements(rig):
    verdict = await judge(rig, [ProgramTest(statements=ANY_OF_SEVERAL)])
    assert verdict.num_passed == 0 and verdict.explanation.startswith("test 1: ")


ANY_OF_SEVERAL = """
import unittest
num_passed = 0
for test in (
    lambda: f(20) == 9407,
    lambda: all(map(lambda x: f(x) == 9407, [20])),
    lambda: 9407 in f(20),
    lambda: math.isclose(f(20), 9407),
    lambda: unittest.TestCase().assertEqual(f(20), 9407) is None,
):
    try:
        assert test()
        num_passed += 1
    except Exception:
        pass
assert num_passed
"""


@pytest.mark.parametrize("without", [(), ("landlock",), ("namespaces",)])
async def test_each_layer_alone_hides_the_tests_from_the_program(without):
    for name in ("all objects", "reads pipes", "answers for itself"):
        result = await run_program(RIGS[name], statements="assert f(20) == 9407", without=without)
        assert not result.held
    result = await run_program("def f(x): return 9407", statements=STATEMENT, without=without)
    assert result.held and result.reason is None


RIGHT_PROGRAM = """
import collections, enum, math
LIMIT = 10
Point = collections.namedtuple("Point", "x y")
class Colour(enum.IntEnum):
    red = 1
class Refused(KeyError):
    pass
class Stack:
    def __init__(self, *items):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
    def __len__(self):
        return len(self.items)
def same(x): return x
def in_place(items, more=None):
    items.sort()
    if more is not None:
        more.update(done=[*items])
def count(text): return collections.Counter(text)
def squares(n):
    for i in range(n):
        yield i * i
def refuse(): raise Refused("no")
def fail(): b"\\xff".decode()
def pair(): return Point(1, 2), Colour.red
def first(stacks): return stacks[0].items[0]
def calendar(year): return year + 1
"""
FAITHFUL = """
import math
values = [None, True, -3, 2**5000, 0.1, float("inf"), 2 - 1j, "d\\udc80é", b"x", bytearray(b"y"),
          [1, [2]], (1,), {1, "a"}, frozenset([2]), {(1, "k"): [None]}, "", [], {}]
for value in values:
    assert same(value) == value and type(same(value)) is type(value), value
assert math.isnan(same(float("nan")))
assert LIMIT == 10
items, more = [3, 1, 2], {}
alias = items
in_place(items, more=more)
assert alias == [1, 2, 3] and more == {"done": [1, 2, 3]}
assert count("aab") == {"a": 2, "b": 1}
assert pair() == ((1, 2), 1)
assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(100)) == 328350
stack = Stack(1)
stack.push([5])
assert len(stack) == 2 and stack.items == [1, [5]] and stack.items[1] == [5]
assert first([Stack(7), stack]) == 7
try:
    refuse()
except KeyError as error:
    assert "no" in str(error)
else:
    assert False
try:
    fail()
except ValueError:
    pass
def check(candidate):
    assert [candidate(n) for n in range(3)] == [0, 1, 2]
check(same)
assert calendar(2024) == 2025 and math.sqrt(same(9)) == 3
"""


async def test_statements_can_use_all_of_a_correct_program():
    result = await run_program(RIGHT_PROGRAM, statements=FAITHFUL)
    assert result.held and result.reason is None, result.stderr


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("assert Stack(1) == Stack(1)", "a test cannot compare an object of the program"),
        ("assert same(lambda: 1)", "a test cannot pass <function <lambda>"),
        ("assert missing(1)", "NameError: name 'missing' is not defined"),
        ("assert same(1) == 2", "AssertionError"),
    ],
)
async def test_unsupported_statement_fails_with_the_reason(statement, error):
    verdict = await judge(RIGHT_PROGRAM, [ProgramTest(statements=statement)])
    assert verdict.num_passed == 0 and error in verdict.explanation


async def test_program_exit_cannot_be_caught_by_a_statement():
    program = "import os\ndef f(x):\n    os._exit(0)"
    statements = "try:\n    f(1)\nexcept:\n    pass\nprint('held')"
    verdict = await judge(program, [ProgramTest(statements=statements)])
    assert (verdict.num_passed, verdict.explanation) == (
        0,
        "test 1: it ended before its tests (exit code 0)",
    )


async def test_correct_program_may_print_anything():
    program = "def f(x):\n    print('f of', x)\n    return {20: 9407, 1: 5}[x]\nprint(0, end='')"
    assert (await judge(program, [STATEMENTS])).fraction == 1.0


# Statements after a program -----------------------------------------------------------------------


async def test_statements_run_after_a_program_with_its_names():
    program = "import sys\ndef f(x):\n    print(input())\n    return x * x\nprint(f(2))\n"
    statements = "assert sys.stdin.read() == ''\nassert f(3) == 9"  # its input is its own
    result = await run_program(program, statements=statements, stdin="in\nmore\n")
    assert (result.held, result.reason) == (True, None), result.stderr
    assert (result.stdout, result.stderr) == ("in\n4\nmore\n", "")
    assert not (await run_program(program)).held


async def test_failed_statements_are_reported():
    result = await run_program("def f(x):\n    return x\n", statements="\nassert f(3) == 9")
    assert (result.held, result.reason, result.exit_code) == (False, "exit", 1)
    expected = 'Traceback (most recent call last):\n  File "tests.py", line 2, in <module>\n'
    assert result.stderr.startswith(f"{expected}    assert f(3) == 9\n")
    assert result.stderr.endswith("\nAssertionError\n")
    result = await run_program("def f(x): return {}[x]", statements="f(3)")
    assert 'File "program.py", line 1, in f\n    def f(x)' in result.stderr and not result.held
    assert "SyntaxError" in (await run_program("pass", statements="assert (")).stderr


async def test_statements_longer_than_a_pipe_arrive_whole():
    text = "x = 0\n" + "x += 1\n" * 30_000 + "assert x == 30_000"
    result = await run_program("pass", statements=text)
    assert result.held, result.stderr[-500:]


async def test_unread_statements_block_nothing():
    code = """
import os, time
for number in range(3, 64):
    try:
        os.write(number, b"ran")
    except OSError:
        pass
time.sleep(60)
"""
    limits = SandboxLimits(wall_time_s=1.5)
    result = await run_program(code, limits=limits, statements="pass\n" * 100_000)
    assert (result.held, result.reason) == (False, "wall_time") and result.seconds < 50


async def test_statements_that_hold_in_a_program_that_then_fails_do_not_count():
    code = "import atexit, os\natexit.register(os._exit, 3)"
    result = await run_program(code, statements="assert True")
    assert (result.held, result.reason, result.exit_code) == (True, "exit", 3)


# Time ---------------------------------------------------------------------------------------------

SLOW = "import time\nn = input()\ntime.sleep(2)\nprint(n)"


async def test_slow_tests_end_within_the_total_time():
    tests = [ProgramTest(input=str(n), output=str(n)) for n in range(50)]
    started = time.monotonic()
    verdict = await judge(SLOW, tests, total_s=6.0)
    assert time.monotonic() - started < 60
    assert 1 <= verdict.num_passed <= 2 and verdict.num_tests == 50
    place = verdict.num_passed + 1
    assert verdict.explanation == f"test {place}: all tests together took longer than 6 s"


async def test_single_test_is_bounded_by_the_total_time():
    verdict = await judge("while True: pass", [ProgramTest(input="", output="1")], total_s=1.0)
    assert verdict.explanation == "test 1: all tests together took longer than 1 s"
    limits = SandboxLimits(wall_time_s=1.0)
    sleeps = "import time\ntime.sleep(60)"
    verdict = await judge(sleeps, [ProgramTest(input="", output="1")], limits, total_s=60.0)
    assert verdict.explanation.startswith("test 1: it took too long")
