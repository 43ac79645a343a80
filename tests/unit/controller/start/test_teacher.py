"""A teacher that the run serves itself: what is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import Config, ScratchModelConfig
from controller.start.teacher import check_served_teacher, served_teacher
from trainer_pool.model.scratch import build_scratch_model, byte_tokenizer

STREAM = "algorithm.streams.teacher.loss=teacher_kl"


def config_with(folder: Path, *settings: str) -> Config:
    teacher = f"task.rewards.teacher={{kind: teacher, path: '{folder}'}}"
    return load_config([teacher, STREAM, "algorithm.policy_weight=0", *settings])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    config = ScratchModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )
    build_scratch_model(config, folder, seed=0)
    return folder


def test_model_of_the_same_vocabulary_can_be_served(folder: Path) -> None:
    config = config_with(folder)
    found = served_teacher(config)
    assert found is not None and found[0] == "teacher" and found[1].path == str(folder)
    check_served_teacher(config, uses_gpu=False, student=byte_tokenizer())  # type: ignore[arg-type]
    assert served_teacher(load_config([])) is None


class OtherTokenizer:
    def __len__(self) -> int:
        return len(byte_tokenizer())

    def encode(self, text: str) -> list[int]:
        return [ord(letter) ^ 1 for letter in text]


def test_teacher_that_cannot_be_served_is_refused_with_the_fix(
    folder: Path, tmp_path: Path
) -> None:
    config, student = config_with(folder), byte_tokenizer()
    named = rf"^task\.rewards\.teacher\.path='{folder}': "
    with pytest.raises(ValueError, match=named + r"with GPUs .* set task\.rewards\.teacher\.url"):
        check_served_teacher(config, uses_gpu=True, student=student)  # type: ignore[arg-type]
    cluster = config_with(folder, "cluster=ray")
    with pytest.raises(ValueError, match=named + "in a Ray cluster"):
        check_served_teacher(cluster, uses_gpu=False, student=student)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named + "its tokenizer is not the student's"):
        check_served_teacher(config, uses_gpu=False, student=OtherTokenizer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a folder with a Hugging Face model"):
        check_served_teacher(config_with(tmp_path), uses_gpu=False, student=student)  # type: ignore[arg-type]
