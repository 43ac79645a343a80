"""Programs of other languages, which a command runs in the same sandbox."""

from __future__ import annotations

import shutil

import pytest

from rollout_pool.rewards.code_tests import judge
from rollout_pool.sandbox.environment import ProgramEnvironment, find_command
from rollout_pool.sandbox.run import (
    LocalSandbox,
    SandboxError,
    SandboxLimits,
    protections,
    run_program,
)
from rollout_pool.tasks.programs import ProgramTest

SETTING = "task.rewards.tests.command"
LAYERS = [(), ("landlock",)]
"""Without namespaces there is no folder for the program's file."""


def command(*words: str) -> ProgramEnvironment:
    return find_command(words, SETTING)


SHELL = command("/bin/sh", "{file}")
needs_perl = pytest.mark.skipif(shutil.which("perl") is None, reason="no perl on this machine")


@pytest.mark.parametrize("without", LAYERS)
async def test_command_runs_a_program_with_the_tests_input(without):
    code = "read n\necho $0 $((2 * n))\ntest $n = 21 || exit 3"
    result = await run_program(code, stdin="21\n", environment=SHELL, without=without)
    assert (result.stdout, result.reason, result.stderr) == ("/tmp/program 42\n", None, "")
    result = await run_program(code, stdin="4\n", environment=SHELL, without=without)
    assert (result.stdout, result.reason, result.exit_code) == ("/tmp/program 8\n", "exit", 3)


async def test_programs_of_a_command_are_judged_by_their_output():
    tests = [ProgramTest(input=str(n), output=str(2 * n)) for n in (1, 4)]
    verdict = await judge("read n; echo $((2 * n))", tests, sandbox=LocalSandbox(SHELL))
    assert (verdict.fraction, verdict.explanation) == (1.0, "")
    verdict = await judge("read n; echo 2", tests, sandbox=LocalSandbox(SHELL))
    assert (verdict.num_passed, verdict.explanation) == (1, "test 2: wrong output")
    verdict = await judge("read n; (", tests, sandbox=LocalSandbox(SHELL))
    assert verdict.num_passed == 0 and "Syntax error" in verdict.explanation


async def test_hung_and_forking_programs_of_a_command_fail():
    tests = [ProgramTest(output="1")]
    hung = "while :; do :; done"
    limits = SandboxLimits(cpu_time_s=1, wall_time_s=120.0)
    verdict = await judge(hung, tests, limits, LocalSandbox(SHELL))
    assert verdict.num_passed == 0 and "it exceeded its CPU time" in verdict.explanation
    limits = SandboxLimits(wall_time_s=0.5)
    verdict = await judge(hung, tests, limits, LocalSandbox(SHELL))
    assert verdict.num_passed == 0 and "it took too long" in verdict.explanation
    forks = "f() { f | f & }\nf\necho 1"
    verdict = await judge(forks, tests, sandbox=LocalSandbox(SHELL))
    assert verdict.num_passed == 0 and "ork" in verdict.explanation


ATTEMPTS = r"""
sub try { my ($what, $done) = @_; print $done ? "DONE $what\n" : "no $what\n"; }
try("fork", defined fork());
try("system", system("/bin/true") == 0);
try("read", open(my $a, "<", "/etc/passwd"));
try("read this project", open(my $b, "<", "SOURCE"));
try("write", open(my $c, ">", "/usr/lib/written"));
try("list", opendir(my $d, "/home"));
try("socket", socket(my $e, 2, 1, 0));
try("signal", kill(9, getppid()));
try("environment", scalar grep { $_ ne "_" } keys %ENV);
try("other executable", exec("/bin/sh", "-c", "echo DONE exec"));
my $held = 0;
for (3 .. 63) { $held++ if open(my $f, "<&=", $_); }
try("descriptor", $held > 1);  # its own file
open(my $g, ">", "/tmp/own") or die $!;
print $g "#!/bin/sh\necho DONE own";
close $g;
chmod 0755, "/tmp/own";
try("file that it wrote", exec("/tmp/own"));
print "alive\n";
"""


@needs_perl
@pytest.mark.parametrize("without", LAYERS)
async def test_program_of_a_command_reaches_no_more_than_one_of_python(without):
    code = ATTEMPTS.replace("SOURCE", __file__)
    result = await run_program(code, environment=command("perl", "{file}"), without=without)
    assert "DONE" not in result.stdout, result
    assert len(result.stdout.splitlines()) == 13, result


@needs_perl
async def test_memory_and_output_of_a_command_are_limited():
    perl = command("perl", "{file}")
    limits = SandboxLimits(memory_bytes=64 * 2**20)
    result = await run_program('print length("x" x 1e8)', environment=perl, limits=limits)
    assert result.reason == "exit" and "Out of memory" in result.stderr
    result = await run_program('print "x" x 1000 while 1', environment=perl)
    assert result.reason == "output"


async def test_command_that_cannot_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"{SETTING}=\['no-such', '{{file}}'\]: there is no exec"):
        command("no-such", "{file}")
    script = tmp_path / "script"
    script.write_text("#!/no/interpreter\n")
    script.chmod(0o755)
    if str(tmp_path).startswith("/tmp/"):
        with pytest.raises(ValueError, match=r"script lies in /tmp, where programs see their own"):
            command(str(script), "{file}")
    broken = ProgramEnvironment(interpreter=SHELL.interpreter, command=("/no/such", "such"))
    with pytest.raises(SandboxError, match=r"/no/such does not run .*: /no/such cannot be started"):
        await protections(broken)
    with pytest.raises(SandboxError, match=r"without namespaces there is none"):
        await protections(SHELL, without=("namespaces",))
    assert {"own root", "seccomp"} <= {*await protections(SHELL)}


# Compilers ----------------------------------------------------------------------------------------


def compiled(*compiler: str, runs: tuple[str, ...] = ("{file}",), **limits) -> LocalSandbox:
    """A sandbox of what `compiler` makes."""
    made = find_command(compiler, "task.rewards.tests.compile", compiles=True)
    limits = {"memory_bytes": 2 * 2**30, "wall_time_s": 30.0, **limits}
    return LocalSandbox(command(*runs), made, SandboxLimits(**limits))


def script(text: str, *runs: str, **limits) -> LocalSandbox:
    """One whose compiler is the shell script that is given as the program."""
    return compiled("/bin/sh", "-c", text, "{file}", "{output}", runs=runs or ("{file}",), **limits)


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")
TWICE = '#include <stdio.h>\nint main() { int n; scanf("%d", &n); printf("%d\\n", 2 * n); }'
TESTS = [ProgramTest(input=str(n), output=str(2 * n)) for n in (1, 4)]


GCC = ("gcc", "-x", "c", "{file}", "-o", "{output}")
BY_SHELL = 'cp "$0" /tmp/p.c && A=b gcc /tmp/p.c -o "$1"'


@needs_gcc
@pytest.mark.parametrize("compiler", [GCC, ("sh", "-c", BY_SHELL, "{file}", "{output}")])
async def test_compiler_makes_the_executable_that_is_tested(compiler):
    sandbox = compiled(*compiler)
    assert {"own root", "seccomp"} <= {*await sandbox.protections(SandboxLimits())}
    verdict = await judge(TWICE, TESTS, sandbox=sandbox)
    assert (verdict.fraction, verdict.explanation) == (1.0, "")
    verdict = await judge(TWICE.replace("2 * n", "2"), TESTS, sandbox=sandbox)
    assert (verdict.num_passed, verdict.explanation) == (1, "test 2: wrong output")
    verdict = await judge(TWICE.replace("int n;", "int n"), TESTS, sandbox=sandbox)
    assert verdict.num_passed == 0
    assert verdict.explanation.startswith("test 1: it does not compile (exit code 1): /tmp/p")


@needs_gcc
async def test_executable_is_as_locked_in_as_any_program():
    sandbox = compiled(*GCC)
    forks = TWICE.replace("int n;", "int n; if (fork() < 0) return 3;")
    verdict = await judge(f"#include <unistd.h>\n{forks}", TESTS, sandbox=sandbox)
    assert verdict.num_passed == 0 and "exit code 3" in verdict.explanation
    reads = TWICE.replace("int n;", 'int n; if (!fopen("/usr/bin/env", "r")) return 4;')
    verdict = await judge(reads, TESTS, sandbox=sandbox)
    assert verdict.num_passed == 0 and "exit code 4" in verdict.explanation
    hangs = TWICE.replace("int n;", "int n; for (;;);")
    verdict = await judge(hangs, TESTS, SandboxLimits(wall_time_s=0.5), sandbox)
    assert verdict.num_passed == 0 and "it took too long" in verdict.explanation


async def test_compiler_may_start_processes_and_what_it_makes_may_not():
    sandbox = script('(cat "$0" && echo "echo made") | cat > "$1"', "/bin/sh", "{file}")
    result = await sandbox.run("read n\necho $n\n", stdin="21", limits=SandboxLimits())
    assert (result.stdout, result.reason) == ("21\nmade\n", None)
    result = await sandbox.run("(echo 1) | read n\n", limits=SandboxLimits())
    assert result.stdout != "made\n" and "Cannot fork" in result.stderr


async def test_program_is_compiled_once_for_all_its_tests():
    sandbox = script('(echo "echo $$; "; date +"echo %N") > "$1"', "/bin/sh", "{file}")
    results = [await sandbox.run("same", limits=SandboxLimits()) for _ in range(3)]
    assert len({result.stdout.splitlines()[-1] for result in results}) == 1
    other = await sandbox.run("other", limits=SandboxLimits())
    assert other.stdout.splitlines()[-1] != results[0].stdout.splitlines()[-1]


@pytest.mark.parametrize("without", LAYERS)
async def test_compiler_reaches_nothing_but_what_compilers_need(without):
    code = (
        'try() { if eval "$1" 2>/dev/null; then echo "DONE $1"; else echo no; fi; }\n'
        "try 'cat /etc/passwd'\ntry 'cat /etc/hosts'\ntry 'ls /home'\ntry 'ls /proc'\n"
        f"try 'cat {__file__}'\ntry 'echo > /usr/written'\ntry 'kill -9 $PPID'\n"
        "try 'unshare -U true'\ntry 'unshare -m true'\ntry 'unshare -n true'\n"
        "ls /usr/include /usr/bin > /dev/null && echo seen\n"
    )
    shell = find_command(("/bin/sh", "{file}"), SETTING, compiles=True)
    result = await run_program(code, environment=shell, without=without)
    assert result.stdout == "no\n" * 10 + "seen\n", result


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exit 7", "it does not compile (exit code 7)"),
        ("exit 0", "it does not compile (exit code 0): it made no file"),
        ('ln -s /usr/bin/env "$1"', "it does not compile (exit code 0): it made no file"),
        ('mkfifo "$1"', "it does not compile (exit code 0): it made no file"),
        ('mkdir "$1"', "it does not compile (exit code 0): it made no file"),
        ("sleep 60 & sleep 60", "it does not compile (exit code -9): it took too long"),
        ("while :; do echo 1; done", "it does not compile (exit code -9): it printed too much"),
    ],
)
async def test_compiler_that_fails_fails_all_tests_at_once(text, why):
    sandbox = script(text, wall_time_s=2.0 if "sleep" in text else 60.0)
    verdict = await judge("", TESTS, sandbox=sandbox)
    assert (verdict.num_passed, verdict.explanation) == (0, f"test 1: {why}")


async def test_number_of_processes_of_a_compiler_is_limited():
    text = 'for i in 1 2 3 4 5 6 7 8; do sleep 60 & echo started; done; echo > "$1"'
    shell = find_command(("/bin/sh", "-c", text), SETTING, compiles=True)
    result = await run_program("", environment=shell, limits=SandboxLimits(max_threads=4))
    assert result.stdout == "started\n" * 3 and "Cannot fork" in result.stderr
    assert result.seconds < 55, "what it left has ended with it"


def test_command_without_a_compiler_names_an_executable():
    with pytest.raises(ValueError, match=r"compile=\['no-cc', '{file}'\]: there is no executable"):
        compiled("no-cc", "{file}")
