"""`make show`: a group in colours and in marks, and the command on a real folder and buffer."""

from __future__ import annotations

import asyncio
import io
from math import log
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from configs.load import load_config, to_yaml
from controller.commands.show import column_line, cut, group_lines, headline, marked, token_texts
from controller.main import EXIT_BAD_INPUT
from controller.run_dir import RunDir
from rollout_pool.worker.record import RolloutLog
from tests.support.buffer.groups import make_group
from tests.support.controller.buffers import Command, fill
from trainer_pool.model.scratch import byte_tokenizer

WORDS = ["3 + 4 =", " 7", " and", " not", " 8", "<tool>", " so", " 7."]
LOGPROBS = [0, log(0.5), log(0.4), log(0.009), log(0.05), 0, log(0.9), log(0.9)]


class Words:
    """A tokenizer whose tokens are places in `WORDS`."""

    eos_token_id = None

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(WORDS[token] for token in token_ids)


class Bytes:
    """A tokenizer with a token a byte."""

    eos_token_id = None

    def decode(self, token_ids, *, skip_special_tokens=False):
        return bytes(token_ids).decode("utf-8", "replace")


def trajectory(**changes: object) -> Trajectory:
    values: dict[str, object] = {
        "tokens": np.arange(8, dtype=np.int32),
        "loss_mask": np.array([0, 1, 1, 1, 1, 0, 1, 1], np.uint8),
        "rollout_logprobs": np.array(LOGPROBS, np.float32),
        "version_spans": (
            VersionSpan(version=7, start=1, end=2),
            VersionSpan(version=8, start=2, end=8),
        ),
        "prompt_length": 1,
        "reward": 0.75,
        "finish_reason": "stop",
        "reward_parts": {"right": 1.0, "short": -0.5},
    }
    return Trajectory(**{**values, **changes})  # type: ignore[arg-type]


def group() -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id="w0-17", prompt=PromptRef(task="sums", index=5), trajectories=(trajectory(),)
    )


def test_marks_show_versions_the_mask_and_unlikely_tokens() -> None:
    texts = token_texts(Words().decode, range(8))
    assert texts == WORDS
    assert marked(cut(trajectory(), texts)) == (
        "3 + 4 =⟦v7⟧ 7⟦v8⟧ and not⟦-4.7⟧ 8⟦-3.0⟧⟦-⟧<tool>⟦v8⟧ so 7."
    )


def test_further_columns_are_summarized() -> None:
    column = np.array([0, -1, -2, -3, -4, -90, -5, -9], np.float32)
    one = trajectory(columns={"teacher_logprobs": column})
    line = "  teacher_logprobs: mean -4.00 over the trained tokens, from -9.00 to -1.00"
    assert column_line("teacher_logprobs", one) == line
    output = group_lines(
        TrajectoryGroup(group_id="g", prompt=PromptRef(task="sums", index=5), trajectories=(one,)),
        "here",
        Words(),
        has_colours=False,
    )
    assert line in [text.plain for text in output]
    untrained = trajectory(columns={"a": column}, loss_mask=np.zeros(8, np.uint8))
    assert column_line("a", untrained) == "  a: no token is trained"


def test_headline_describes_the_trajectory() -> None:
    # Logarithms of 0.5, 0.4, 0.009, 0.05, 0.9 and 0.9: their mean is -1.59.
    assert headline(2, trajectory(episode=1)) == (
        "trajectory 2, episode 1: reward 0.75 (right 1, short -0.5), stop, 8 tokens of which 6 are "
        "trained (v7: 1, v8: 5), mean log-probability -1.59"
    )
    nothing = trajectory(loss_mask=np.zeros(8, np.uint8), reward_parts={})
    assert headline(0, nothing).endswith("0 are trained (none), mean log-probability 0.00")


def test_colours_are_those_of_versions_and_the_mask_is_dim() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=200)
    for line in group_lines(group(), "here", Words(), has_colours=True):
        console.print(line, highlight=False)
    shown = file.getvalue()
    assert "\x1b[2m3 + 4 =\x1b[0m" in shown and "\x1b[2m<tool>\x1b[0m" in shown
    assert "\x1b[94m 7\x1b[0m" in shown  # bright blue: version 7
    assert "\x1b[92m and\x1b[0m" in shown  # bright green: version 8
    assert "\x1b[4;92m 8\x1b[0m" in shown  # underlined: 5%
    assert "\x1b[4;7;92m not\x1b[0m" in shown  # reversed: 0.9%
    assert "version 7" in shown and "p < 10%" in shown
    assert "⟦" not in shown


def test_character_of_several_tokens_belongs_to_the_last_one() -> None:
    assert token_texts(Bytes().decode, "aé€".encode()) == ["a", "", "é", "", "", "€"]
    broken = token_texts(Bytes().decode, b"a\xff" + 9 * b"\xff" + b"b")
    assert "".join(broken).count("\ufffd") == 10 and broken[-1].endswith("b")
    assert token_texts(Bytes().decode, "é".encode()[:1]) == ["\ufffd"]


def test_text_of_a_model_cannot_control_the_terminal() -> None:
    texts = ["\x1b[2J", *7 * ["a\r\n"]]
    assert marked(cut(trajectory(), texts)).startswith("␛[2J⟦v7⟧a␍\n⟦v8⟧")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show") / "model"
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def shown_run(live_run: RunDir, model: Path) -> RunDir:
    live_run.model.symlink_to(model)
    return live_run


def test_command_shows_a_recorded_group_and_without_an_id_the_last_one(
    shown_run: RunDir, leash: Command
) -> None:
    log_of_worker = RolloutLog(shown_run.path, "worker-3", 1.0, 0)
    for group_id in ("first", "second"):
        asyncio.run(log_of_worker.write(make_group(group_id), "3 + 4 =", {}))
    logprobs = [None] * 3 + [-0.5, -0.5, -0.25, -1.0, -0.5]
    one = {"place": 1, "advantage": -1.5, "logprobs": logprobs}
    line = {"group_id": "first", "step": 4, "version": 3, "at": 1.0, "trajectories": [one]}
    (shown_run.path / "trained").mkdir()
    (shown_run.path / "trained/rank-0.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    printed = leash("show", "first")
    apart = "advantage -1.5; trainer's log-probabilities differ by 0.15 on average, at most 0.5"
    assert apart in printed and printed.count("advantage") == 1
    printed = printed.replace(", trained in step 4", "")
    assert printed.startswith("first: prompt 0 of sums, temperature 1\nrecorded by worker-3\n")
    assert printed.count("reward 1, stop, 8 tokens of which 5 are trained (v0: 5)") == 2
    assert "trajectory 1, episode 1" in printed and "⟦v0⟧" in printed
    assert leash("show").startswith("second: ")


def test_command_shows_a_group_that_only_the_buffer_has(
    shown_run: RunDir, redis_url: str, leash: Command
) -> None:
    asyncio.run(fill(redis_url, shown_run.name, pushed=1))
    printed = leash("show", "group-0")
    assert "in the buffer" in printed and "⟦v0⟧" in printed
    error = leash("show", "nobody", exit_code=EXIT_BAD_INPUT)
    assert "rollout.log_rate=0.01" in error
    assert "has recorded no group yet" in leash("show", exit_code=EXIT_BAD_INPUT)


def test_model_is_the_one_of_the_run(run_dir: RunDir, leash: Command, tmp_path: Path) -> None:
    config = to_yaml(load_config([f"model.path={tmp_path}/nowhere", "model.scratch=null"]))
    (run_dir.path / "config.yaml").write_text(config)
    asyncio.run(RolloutLog(run_dir.path, "worker-0", 1.0, 0).write(make_group("g"), "", {}))
    assert "model.path=" in leash("show", "g", exit_code=EXIT_BAD_INPUT)
