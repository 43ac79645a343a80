"""Programs that import packages of an environment which the user prepared."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_pool.rewards.code_tests import judge
from rollout_pool.sandbox.environment import ProgramEnvironment, find_python
from rollout_pool.sandbox.run import LocalSandbox, SandboxError, protections, run_program
from rollout_pool.tasks.programs import ProgramTest

SETTING = "task.rewards.tests.python"
USES = "import doubling\nprint(doubling.double(int(input())))\nf = doubling.double"


def make_venv(folder: Path) -> Path:
    """The interpreter of a new virtual environment with the package `doubling`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    package = next(folder.glob("lib/python*/site-packages")) / "doubling"
    package.mkdir()
    (package / "__init__.py").write_text("from doubling.twice import double\n")
    (package / "twice.py").write_text("def double(x): return 2 * x\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    # Programs have their own /tmp.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="environment ") as folder:
        Path(folder).chmod(0o755)
        yield make_venv(Path(folder) / "env")


@pytest.fixture(scope="module")
def environment(python) -> ProgramEnvironment:
    return find_python(str(python), SETTING)


async def test_program_and_statements_import_packages_of_the_environment(run, environment):
    statements = "import doubling\nassert f(4) == doubling.double(4) == 8"
    result = await run(USES, stdin="21", environment=environment, statements=statements)
    assert (result.stdout, result.reason, result.held) == ("42\n", None, True), result.stderr


async def test_package_is_found_only_in_its_environment(run):
    assert "No module named 'doubling'" in (await run(USES, stdin="21")).stderr


async def test_only_the_packages_can_be_read_and_none_written(attempt, python, environment):
    folder, (packages,) = python.parents[1], environment.packages
    codes = [
        f"open({str(folder / 'pyvenv.cfg')!r})",
        f"import os; os.listdir({str(folder)!r} + '/bin')",
        f"open({packages!r} + '/doubling/twice.py', 'a')",
        f"open({packages!r} + '/written', 'w')",
        f"import os; os.remove({packages!r} + '/doubling/twice.py')",
        "open('/etc/passwd')",
        "import pytest",
    ]
    await attempt(codes, environment=environment)
    assert {path.name for path in Path(packages).iterdir()} == {"doubling"}


async def test_tests_are_judged_in_the_environment(environment):
    tests = [ProgramTest(input="2", output="4"), ProgramTest(statements="assert f(1) == 2")]
    sandbox = LocalSandbox(environment)
    verdict = await judge(USES, tests[:1], sandbox=sandbox)
    assert verdict.fraction == 1.0, verdict.explanation
    verdict = await judge("import doubling\nf = doubling.double", tests[1:], sandbox=sandbox)
    assert verdict.fraction == 1.0, verdict.explanation
    forks = "import doubling, os\nos.fork()\nprint(4)"
    verdict = await judge(forks, tests[:1], sandbox=sandbox)
    assert verdict.fraction == 0.0 and "start or signal a process" in verdict.explanation


async def test_packages_that_programs_cannot_read_are_reported(environment):
    if "own user" not in await protections(environment):
        pytest.skip("programs run as this user")
    folder = Path(environment.packages[0])
    folder.chmod(0o700)
    try:
        with pytest.raises(SandboxError, match=r"site-packages cannot be read by the user that"):
            await run_program("print(1)", environment=environment)
    finally:
        folder.chmod(0o755)


def test_python_that_cannot_run_programs_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"{SETTING}='/no/python': there is no such file; give"):
        find_python("/no/python", SETTING)
    with pytest.raises(ValueError, match=rf"{SETTING}='/bin/true': does not run as a Python: "):
        find_python("/bin/true", SETTING)
    with pytest.raises(ValueError, match=r"does not run as a Python: .*Permission denied"):
        find_python(__file__, SETTING)
    old = tmp_path / "python"  # as Python 3.10 would describe itself
    old.write_text("""#!/bin/sh\necho '{"version": [3, 10], "packages": []}'\n""")
    old.chmod(0o755)
    with pytest.raises(ValueError, match=r"is Python 3\.10, and the sandbox needs 3\.11 or newer"):
        find_python(str(old), SETTING)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        python = make_venv(Path(folder) / "env")
        with pytest.raises(ValueError, match=r"site-packages lies in /tmp, where programs see"):
            find_python(str(python), SETTING)
