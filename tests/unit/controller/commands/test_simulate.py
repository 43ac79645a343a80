"""`leash simulate` from its command line to its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from controller.commands.simulate import lognormal_lengths, recorded_lengths
from controller.main import main
from controller.run_dir import RunDir
from tests.support.controller.records import record_groups, recorded_group

MODEL = ("--parameters", "8e9", "--kv", "65536", "model=pretrained", "model.path=some/name")
SMALL = (
    *("--gpus", "16", "--steps", "4", "--lengths", "100,400"),
    *("trainer=gpu", "rollout=gpu", "trainer.groups_per_step=8", "rollout.max_response_tokens=512"),
)


def test_table_recommendation_and_picture_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "simulation.png"
    assert main(["simulate", *SMALL, "--plot", str(picture), "--price", "3", *MODEL]) == 0
    printed = capsys.readouterr().out
    assert "16 GPUs" in printed and "rollout.num_engines=" in printed
    assert "max_staleness" in printed and "trainer" in printed and "…" not in printed
    assert "groups are then in flight: rollout.num_workers=" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "failures" not in printed
    failing = ("--mtbf-h", "0.02", "--restart-s", "1", "trainer.checkpoint_every=1")
    assert main(["simulate", *SMALL, *failing, *MODEL]) == 0
    [said] = re.findall(r"(\d+) failures in the simulated time", capsys.readouterr().out)
    assert int(said) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "100,600"), "rollout.max_response_tokens=512 would cut more than one"),
        (("trainer.gradient_accumulation_steps=2",), "gradient_accumulation_steps=2: is not sim"),
        (("buffer.on_stale=mask_tokens",), "buffer.on_stale=mask_tokens: is not simulated"),
        (("rollout.tail=postpone",), "rollout.tail=postpone: is not simulated"),
        (("--lengths", "10"), "LENGTHS='10': must be the median and the 99th percentile"),
        (("--lengths", "10,5"), "LENGTHS='10,5'"),
        (("--gpu", "TPU"), "GPU='TPU': must be one of A100, H100"),
        (("--gpus", "1"), "GPUS=1: must be at least 2"),
        (("--mtbf-h", "1e-6"), "MTBF_H=1e-06: after 0 steps ranks have failed 100 times"),
        (("--mtbf-h", "-1"), "MTBF_H=-1.0: must be hours, or 0"),
        (("--restart-s", "-1"), "RESTART_S=-1.0: must be seconds, at least 0"),
        (("--mfu", "0"), "MFU=0.0: must be above 0"),
        (("--lengths-of", "nowhere"), "LENGTHS_OF=nowhere: no groups are recorded"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *SMALL, *MODEL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_model_of_unknown_size_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "model=pretrained", "model.path=some/name"]) == 2
    assert "say PARAMETERS=8e9 KV=65536" in capsys.readouterr().err


def test_lengths_have_the_percentiles_that_were_given_and_are_cut() -> None:
    draw = lognormal_lengths("100,1000", 1000, 5000)()
    drawn = sorted(draw())
    assert 90 <= drawn[500] <= 110 and 700 <= drawn[990] <= 1500
    assert max(lognormal_lengths("100,250", 1000, 250)()()) == 250


def test_lengths_of_a_run_are_those_of_its_recorded_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [recorded_group("a", length=7), recorded_group("b", length=4)]
    record_groups(RunDir(path=tmp_path), groups)
    file = next((tmp_path / "rollouts").glob("*.jsonl"))
    whole = file.read_text()
    noise, half = "\0" * 9 + "\n", whole.replace('"tokens":[', '"tokens":[x', 1)
    file.write_text(noise + half.partition("\n")[0] + "\n" + whole + '{"group')  # being written
    draw = recorded_lengths(tmp_path)()
    assert re.match(
        r"Left out damaged lines: 2. The first: .*\.jsonl:1 is damaged: ", capsys.readouterr().out
    )
    assert {draw() for _ in range(50)} == {(7, 7), (4, 4)}
