"""Malicious programs, each stopped by the sandbox, and harmless ones."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys

import psutil
import pytest

from rollout_pool.sandbox import seccomp
from rollout_pool.sandbox.run import (
    SandboxError,
    SandboxLimits,
    cost_of_missing,
    protections,
    run_program,
)
from tests.support.repository import ROOT


async def test_harmless_program_works(run):
    code = """
import collections, dataclasses, decimal, fractions, heapq, itertools, json, math, random, re
n = int(input())
print(json.dumps({"root": math.isqrt(n), "words": re.findall("[a-z]+", input())}))
if __name__ == "__main__":
    exit()
"""
    result = await run(code, stdin="49\nab 12 cd\n")
    assert (result.exit_code, result.reason, result.stderr) == (0, None, "")
    assert result.stdout == '{"root": 7, "words": ["ab", "cd"]}\n'
    assert result.explanation == ""


async def test_all_of_the_standard_library_that_programs_use_works(run):
    names = "asyncio bisect calendar csv ctypes datetime difflib enum functools hashlib io"
    names += " logging operator pathlib pickle queue secrets sqlite3 ssl string struct tempfile"
    names += " textwrap timeit typing unittest uuid zlib zoneinfo"
    imports = "\n".join(f"import {name}" for name in names.split())
    loop = "async def f():\n    await asyncio.sleep(0.01)\n    return 5\nprint(asyncio.run(f()))"
    result = await run(f"{imports}\n{loop}")
    assert (result.stdout, result.stderr, result.tried) == ("5\n", "", ())


async def test_program_can_write_to_its_own_folder():
    code = """
import os, tempfile
open("/tmp/a", "w").write("x" * 1000)
os.rename("/tmp/a", "/tmp/b")
print(len(open("/tmp/b").read()), os.listdir("/tmp"), tempfile.gettempdir(), os.getcwd())
"""
    result = await run_program(code)
    assert result.stdout == "1000 ['b'] /tmp /tmp\n", result.stderr
    again = await run_program("import os; print(os.listdir('/tmp'))")
    assert again.stdout == "[]\n"


async def test_program_error_is_reported_as_its_own(run):
    result = await run("def f():\n    raise KeyError('no such key')\nf()")
    assert (result.exit_code, result.reason) == (1, "exit")
    expected = (
        'Traceback (most recent call last):\n  File "program.py", line 3, in <module>\n    f()'
    )
    assert result.stderr.startswith(expected)
    assert result.explanation.endswith("KeyError: 'no such key'")
    assert (await run("import sys; sys.exit(7)")).exit_code == 7
    assert "SyntaxError" in (await run("def f(:\n  pass")).stderr


# Time and memory ----------------------------------------------------------------------------------


async def test_loop_that_ignores_its_signal_ends_at_its_cpu_limit(quick):
    ignores = "import signal; signal.signal(24, signal.SIG_IGN)\n"
    loop = f"{ignores}print('begun', flush=True)\nwhile True: pass"
    result = await run_program(loop, limits=quick)
    assert (result.reason, result.exit_code, result.stdout) == ("cpu_time", -9, "begun\n")
    assert result.seconds < 100


async def test_cpu_limit_is_told_on_a_machine_where_ticks_are_not_the_time_that_programs_ran(quick):
    # These run between two ticks and sleep at each, so that the program is charged for their time.
    busy = (
        "import time\nwhile True:\n    until = time.perf_counter() + 0.0025\n"
        "    while time.perf_counter() < until: pass\n    time.sleep(0.0005)"
    )
    command = [sys.executable, "-c", busy]
    # The kernel shares out the CPU between sessions first.
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(6)]
    try:
        result = await run_program("while True: pass", limits=quick)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert (result.reason, result.exit_code) == ("cpu_time", -9)


@pytest.mark.parametrize("last", [100, 0])
async def test_program_that_closes_its_outputs_still_ends_at_its_limit(last):
    code = f"import os, time\nprint(1, flush=True)\nos.close(1)\nos.close(2)\ntime.sleep({last})"
    limits = SandboxLimits(wall_time_s=5.0 if last else 60.0)
    result = await run_program(code + "\nos._exit(0)", limits=limits)
    expected = ("wall_time", -9) if last else (None, 0)
    assert (result.reason, result.exit_code) == expected
    assert result.stdout == "1\n" and result.seconds < 55


async def test_program_that_ignores_every_signal_still_ends():
    code = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)
"""
    result = await run_program(code, limits=SandboxLimits(wall_time_s=0.5))
    assert (result.reason, result.exit_code) == ("wall_time", -9)


@pytest.mark.machine
async def test_memory_bomb_fails_alone():
    before = psutil.virtual_memory().available
    # A slow machine takes more than a second of CPU to hand out that many pages.
    limits = SandboxLimits(cpu_time_s=20, wall_time_s=60.0)
    bomb = "kept = []\nwhile True:\n    kept.append(bytearray(10_000_000))"
    result = await run_program(bomb, limits=limits)
    assert (result.exit_code, result.reason) == (1, "memory")
    assert psutil.virtual_memory().available > before - 2**30
    assert (await run_program("x = 'a' * 10**12")).reason == "memory"


async def test_endless_output_is_stopped(quick):
    result = await run_program("while True:\n    print('x' * 1000)", limits=quick)
    assert result.reason == "output"
    assert len(result.stdout) == quick.max_output_bytes
    code = "import sys\nwhile True:\n    sys.stderr.write('y' * 100_000)"
    result = await run_program(code, limits=quick)
    assert result.reason == "output" and len(result.stderr) == quick.max_output_bytes


async def test_output_at_the_limit_is_complete():
    limits = SandboxLimits(max_output_bytes=100_000)
    result = await run_program("print('x' * 99_999)", limits=limits)
    assert (result.reason, len(result.stdout)) == (None, 100_000)
    result = await run_program("print('x' * 100_000)", limits=limits)
    assert (result.reason, len(result.stdout)) == ("output", 100_000)


async def test_deep_recursion_is_an_error_of_the_program():
    code = (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
    )
    assert (await run_program(code + "print(f(20_000))")).stdout == "20000\n"


# Processes ----------------------------------------------------------------------------------------


async def test_persistent_fork_bomb_ends_at_its_limit(quick):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await run_program(bomb, limits=quick)
    assert (result.reason, result.tried) == ("cpu_time", ("processes",))


STARTS = [
    "import os; os.fork()",
    "import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 60'])",
    "import os; os.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
    "import os; os.execv('/bin/sh', ['sh', '-c', 'true'])",
    "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "import ctypes; e = ctypes.CDLL(None).vfork(); assert e < 0; raise BlockingIOError(11, '')",
]


async def test_other_processes_cannot_be_started(attempt):
    result = await attempt(STARTS)
    assert result.reason == "processes" and "AssertionError" not in result.stdout


async def test_os_system_starts_nothing(run):
    result = await run("import os; print(os.system('sleep 60 &') != 0)")
    assert result.stdout == "True\n" and result.tried == ("processes",)


async def test_background_processes_end_with_the_program(run, quick):
    code = """
import os
for name in ("setsid", "setpgrp"):
    try:
        getattr(os, name)()
        print(name)
    except OSError:
        pass
"""
    result = await run(code)
    assert (result.stdout, result.reason) == ("", None)
    waits = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    result = await run_program(f"import threading, time\n{waits}", limits=quick)
    assert result.reason is None and result.seconds < 100


async def test_threads_are_bounded(run):
    code = """
import threading, time
threading.stack_size(65536)
made = 0
try:
    for made in range(100_000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError as error:
    print(made < 40, error)
"""
    assert (await run(code)).stdout == "True can't start new thread\n"


async def test_as_many_threads_as_promised_fit_into_the_memory():
    code = """
import threading
over = threading.Event()
threads = [threading.Thread(target=over.wait) for _ in range(31)]  # and the first
for thread in threads:
    thread.start()
print(threading.active_count())
over.set()
for thread in threads:
    thread.join()
print("ended")
"""
    result = await run_program(code)
    assert (result.stdout, result.stderr) == ("32\nended\n", "")


async def test_thread_may_request_a_large_stack():
    code = """
import functools, sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(128 * 2**20)
@functools.lru_cache(None)  # whose recursion is one of C
def f(n): return 0 if n == 0 else 1 + f(n - 1)
thread = threading.Thread(target=lambda: print(f(20_000)))
thread.start()
thread.join()
"""
    assert (await run_program(code)).stdout == "20000\n"


async def test_calls_that_burden_the_whole_machine_are_refused(run):
    column = ("x86_64", "aarch64").index(os.uname().machine)
    tables = {**seccomp.OUTLIVES, **seccomp.SYSTEM}
    numbers = [tables[name][column] for name in ("sync", "syncfs", "io_setup", "io_submit")]
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    print(libc.syscall(number, 1, ctypes.create_string_buffer(64), 0), ctypes.get_errno())
"""
    assert (await run(code)).stdout == f"-1 {errno.EPERM}\n" * 4


async def test_other_processes_cannot_be_signalled(run):
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        code = f"""
import ctypes, fcntl, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for target in ({os.getpid()}, {bystander.pid}, -1, 0, os.getppid(), -{os.getpgid(0)}):
    for number in (9, 15, 0):
        try:
            os.kill(target, number)
            print("signalled", target)
        except OSError:
            pass
for flags in ((8, {bystander.pid}), (10, 9)):
    try:
        fcntl.fcntl(0, *flags)
        print("owned", flags)
    except OSError:
        pass
assert libc.syscall(424, {bystander.pid}, 9, None, 0) == -1
print(libc.ptrace(16, {bystander.pid}, None, None), "processes")
os.kill(os.getpid(), 0)
"""
        result = await run(code)
        assert (result.stdout, result.exit_code) == ("-1 processes\n", 0), result
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# The sandbox itself -------------------------------------------------------------------------------


async def test_every_layer_is_in_force_where_the_kernel_has_it():
    layers = await protections()
    assert {"limits", "seccomp"} <= set(layers)
    assert {"landlock", "own root"} & set(layers)


async def test_layers_are_seen_also_where_programs_have_little_time():
    limits = SandboxLimits(wall_time_s=0.001)
    assert await protections(limits=limits) == await protections()


async def test_missing_namespaces_are_reported_with_their_cost():
    few = cost_of_missing(await protections(without=("namespaces",)))
    assert few is not None and "WITHOUT NAMESPACES" in few and "single hole in either" in few
    layers = await protections()
    assert (cost_of_missing(layers) is None) == ({"namespaces", "own root"} <= set(layers))


@pytest.mark.parametrize("without", [("seccomp",), ("landlock", "namespaces")])
async def test_programs_are_not_run_with_too_few_layers(without, tmp_path):
    with pytest.raises(SandboxError, match=r"cannot be run safely here: .*(seccomp|Landlock)"):
        await run_program("print('ran')", without=without)


async def test_cancelled_caller_ends_the_program():
    others = {*psutil.Process().children()}  # servers that the session shares
    running = asyncio.create_task(run_program("import time\ntime.sleep(60)"))
    while {*psutil.Process().children()} <= others:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


PARENT = """
import asyncio, sys
from rollout_pool.sandbox.run import run_program
asyncio.run(run_program("import time; print('on', flush=True)\\nwhile True: time.sleep(1)"))
"""


async def test_program_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT)
    try:
        async with asyncio.timeout(60):
            while len(found := psutil.Process(parent.pid).children(recursive=True)) < 2:
                await asyncio.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(found, timeout=60)
    assert alive == []


async def test_program_that_breaks_itself_ends_only_itself(run):
    for code in ("import os; os._exit(3)", "import ctypes; ctypes.string_at(0)"):
        result = await run(code)
        assert result.exit_code != 0 and result.reason == "exit"


async def test_unread_input_is_harmless(run):
    result = await run("print('done')", stdin="x" * 5_000_000)
    assert (result.stdout, result.reason) == ("done\n", None)
    result = await run("import sys; print(len(sys.stdin.read()))", stdin="ü" * 500_000)
    assert result.stdout == "500000\n"


async def test_concurrent_programs_take_turns():
    results = await asyncio.gather(*(run_program(f"print({i})") for i in range(20)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]
