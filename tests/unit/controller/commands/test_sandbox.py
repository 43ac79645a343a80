"""Sandboxes that `leash sandbox` refuses to serve, and a launch to start with."""

from __future__ import annotations

import socket

import pytest

from configs.load import CONFIG_DIR, load_config
from controller.commands.sandbox import serve_sandbox
from controller.start.preflight import check_services
from rollout_pool.tasks.registry import build_task
from trainer_pool.model.scratch import byte_tokenizer

OTHER_PYTHON = "task.rewards.more={kind: code_tests, wall_time_s: 3}"


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        (["task=code"], {"host": "0.0.0.0"}, r"--host='0\.0\.0\.0': other machines could run prog"),
        (["task=code"], {"host": "some.host"}, r"--host='some\.host': other machines could run"),
        (
            ["task=code"],
            {"key_env": "LEASH_NO_SUCH"},
            "--key-env='LEASH_NO_SUCH': there is no such",
        ),
        (["task=capitals"], {}, r"task\.rewards: no part has kind=code_tests, so no program would"),
        (
            ["task=code", "task.rewards.tests.url=http://host"],
            {},
            r"task\.rewards\.tests\.url='http://host': this sandbox runs the programs; le",
        ),
        (
            ["task=code", OTHER_PYTHON],
            {},
            r"task\.rewards\.more\.languages: python is the name of another reward's language too",
        ),
        (
            ["task=code", "task.rewards.tests={command: [no-sh, '{file}'], languages: [sh]}"],
            {},
            r"task\.rewards\.tests\.command=\['no-sh', '{file}'\]: there is no executable 'no-sh'",
        ),
    ],
)
def test_sandbox_that_cannot_be_served_is_refused(
    overrides: list[str], changes: dict[str, str], message: str
) -> None:
    settings: dict[str, str | None] = {"host": "127.0.0.1", "key_env": None, **changes}
    with pytest.raises(ValueError, match=message):
        serve_sandbox(overrides, "quickstart", port=0, **settings)  # type: ignore[arg-type]


def test_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"address \('127\.0\.0\.1', {port}\)"):
            serve_sandbox(["task=code"], "quickstart", host="127.0.0.1", port=port, key_env=None)


PROGRAMS = CONFIG_DIR / "data" / "programs.jsonl"
NOBODY = "http://127.0.0.1:9"
"""Port 9 is reserved; nothing listens there."""
REMOTE = f"{{kind: code_tests, url: '{NOBODY}', max_retries: 0}}"
PART = (
    r"task\.rewards\.tests\.url: http://127\.0\.0\.1:9/run_code: Connect.*start the sandbox there"
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=code", f"task.rewards.tests={REMOTE}"], PART),
        (
            [
                "task=mixed",
                f"task.tasks.programs={{kind: code, path: {PROGRAMS}, eval_size: 4, "
                f"rewards: {{tests: {REMOTE}}}}}",
            ],
            PART.replace("task", "task.tasks.programs", 1),
        ),
    ],
)
def test_service_that_does_not_answer_is_found_before_a_launch(
    overrides: list[str], message: str
) -> None:
    config = load_config(overrides, "quickstart").task
    with pytest.raises(ValueError, match=message):
        check_services(config, build_task(config), byte_tokenizer())
