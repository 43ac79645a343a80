"""A teacher that the run serves itself: what is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import Config, ScratchModelConfig
from controller.start.gpus import num_servers
from controller.start.plan import make_plan
from controller.start.teacher import check_served_teacher, with_url
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
    check_served_teacher(config, byte_tokenizer())  # type: ignore[arg-type]
    served = with_url(config.task, "http://10.0.0.7:1").rewards["teacher"]
    assert (served.url, served.path) == ("http://10.0.0.7:1", None)
    assert load_config([]).task.served_teacher is None


@pytest.mark.parametrize(("num_gpus", "each"), [(0, 0), (4, 1)])
def test_teacher_has_the_place_of_one_more_engine(folder: Path, num_gpus: int, each: int) -> None:
    config = config_with(folder, "trainer.num_ranks=1", "rollout.num_engines=2")
    plan = make_plan(config, num_gpus, num_cpus=8, gpu_bytes=80 * 2**30)
    (teacher,) = (process for process in plan.processes if process.what == "teacher")
    assert (teacher.count, teacher.num_gpus, num_servers(config)) == (1, each, 3)
    with pytest.raises(
        ValueError, match=r"num_engines=2 .* and a teacher need 4 GPUs, and Ray has"
    ):
        make_plan(config, 2, num_cpus=8, gpu_bytes=80 * 2**30)


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
    with pytest.raises(ValueError, match=named + "its tokenizer is not the student's"):
        check_served_teacher(config, OtherTokenizer())  # type: ignore[arg-type]
    policy = "model.scratch.max_position_embeddings=4096"
    long = config_with(folder, policy, "rollout.max_prompt_tokens=4000")
    with pytest.raises(ValueError, match=named + r"it takes 2048 tokens .*=4008; lower them"):
        check_served_teacher(long, student)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a folder with a Hugging Face model"):
        check_served_teacher(config_with(tmp_path), student)  # type: ignore[arg-type]
