"""Programs of other languages, which a command runs in the same sandbox."""

from __future__ import annotations

import shutil

import pytest

from rollout_pool.rewards.code_tests import judge
from rollout_pool.sandbox.environment import ProgramEnvironment, find_command
from rollout_pool.sandbox.run import SandboxError, SandboxLimits, protections, run_program
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
    verdict = await judge("read n; echo $((2 * n))", tests, environment=SHELL)
    assert (verdict.share, verdict.explanation) == (1.0, "")
    verdict = await judge("read n; echo 2", tests, environment=SHELL)
    assert (verdict.num_passed, verdict.explanation) == (1, "test 2: wrong output")
    verdict = await judge("read n; (", tests, environment=SHELL)
    assert verdict.num_passed == 0 and "Syntax error" in verdict.explanation


async def test_hung_and_forking_programs_of_a_command_fail():
    tests = [ProgramTest(output="1")]
    hung = "while :; do :; done"
    limits = SandboxLimits(cpu_time_s=1, wall_time_s=30.0)
    verdict = await judge(hung, tests, limits, SHELL)
    assert verdict.num_passed == 0 and "it exceeded its CPU time" in verdict.explanation
    limits = SandboxLimits(wall_time_s=0.5)
    verdict = await judge(hung, tests, limits, SHELL)
    assert verdict.num_passed == 0 and "it took too long" in verdict.explanation
    forks = "f() { f | f & }\nf\necho 1"
    verdict = await judge(forks, tests, environment=SHELL)
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
