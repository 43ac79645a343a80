"""Exported models have the configs and the tokenizer of the model that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from buffer.types import PromptRef
from configs.schema import ScratchModelConfig
from tensors.layout import Layout, TensorSpec
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.state.checkpoint import CheckpointStore, TrainState
from trainer_pool.state.export import export_checkpoint, write_model
from trainer_pool.state.shards import shard_file, write_layout, write_pieces

SMALL = ScratchModelConfig(
    hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16
)
NOT_SAVED_BY_TRANSFORMERS = {"eos_token_id": 258, "temperature": 0.6, "top_p": 0.9}
TWO_ENDS = {"eos_token_id": [258, 257], "do_sample": True, "temperature": 0.7, "top_k": 20}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    build_scratch_model(SMALL, folder, seed=0)
    return folder


@pytest.fixture
def model_path(base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base, tmp_path / "model")


def checkpoint_of(model: Any, folder: Path) -> Path:
    """A checkpoint of one rank with the model's weights, each a step further."""
    weights = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
    specs = [TensorSpec(name=n, dtype="float32", shape=tuple(w.shape)) for n, w in weights.items()]
    layout, store = Layout.of(specs, 1), CheckpointStore(folder)
    store.begin(3)
    stream = torch.cat([weights[spec.name].flatten() for spec in layout.tensors])
    write_pieces(store.writing_folder(3), layout, 0, [stream])
    write_layout(store.writing_folder(3), layout)
    return store.commit(
        TrainState(
            step=3,
            version=3,
            num_updates=3,
            lineage="one",
            consumed_group_ids=(),
            task_positions={},
            untrained_prompts=(PromptRef(task="sums", index=7),),
        )
    )


def written_both_ways(model_path: Path, folder: Path) -> list[Path]:
    """At the end of a run, and by `make export`."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    checkpoint = checkpoint_of(model, folder / "checkpoints")
    weights = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
    final, exported = folder / "final_model", folder / "exported"
    write_model(final, model, weights, str(model_path), trust_remote_code=False)
    export_checkpoint(checkpoint, str(model_path), exported)
    return [final, exported]


@pytest.mark.parametrize("settings", [NOT_SAVED_BY_TRANSFORMERS, TWO_ENDS, None])
def test_generation_config_of_the_model_is_copied_as_it_is(
    model_path: Path, tmp_path: Path, settings: dict[str, Any] | None
) -> None:
    file = model_path / "generation_config.json"
    file.unlink(missing_ok=True)
    if settings is not None:
        file.write_text(json.dumps(settings))
    if settings is NOT_SAVED_BY_TRANSFORMERS:
        with pytest.raises(ValueError, match="GenerationConfig is invalid"):
            GenerationConfig.from_pretrained(model_path).save_pretrained(tmp_path)
    for folder in written_both_ways(model_path, tmp_path):
        copy = folder / "generation_config.json"
        assert copy.exists() == (settings is not None)
        assert settings is None or copy.read_text() == file.read_text()


def test_model_of_a_run_and_that_of_its_checkpoint_are_the_same_files(
    model_path: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    (model_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model_path / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
    settings["chat_template"] = template  # where older folders have it
    (model_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (model_path / "modeling_own.py").write_text("# code of a model")
    final, exported = written_both_ways(model_path, tmp_path)
    names = sorted(path.name for path in final.iterdir())
    assert names == sorted(path.name for path in exported.iterdir())
    for name in names:
        assert (final / name).read_bytes() == (exported / name).read_bytes(), name
    again = AutoTokenizer.from_pretrained(final)
    said = [{"role": "user", "content": "Größe?"}]
    assert again.apply_chat_template(said, tokenize=False) == "<user>Größe?"
    assert again.encode("Größe? <|eos|>") == tokenizer.encode("Größe? <|eos|>")
    before = AutoModelForCausalLM.from_pretrained(model_path)
    after = AutoModelForCausalLM.from_pretrained(final)
    assert after.config.to_dict().keys() == before.config.to_dict().keys()
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(old + 1, new), name


def test_failed_export_leaves_the_folder_as_it_was(model_path: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    folder = tmp_path / "final_model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (model_path / "tokenizer.json").write_text("{")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with pytest.raises(Exception, match=r".+"):
        write_model(folder, model, weights, str(model_path), trust_remote_code=False)
    assert [path.name for path in tmp_path.iterdir() if "final" in path.name] == ["final_model"]
    assert (folder / "config.json").read_text() == "{}"


def test_damaged_checkpoint_is_not_exported(model_path: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    checkpoint = checkpoint_of(model, tmp_path / "checkpoints")
    file = shard_file(checkpoint, 0)
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        export_checkpoint(checkpoint, str(model_path), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
