"""Checks by name that engines can load the published weights, and by log-probability that they did.

Engines load a published version by the names of the checkpoint. SGLang's loaders silently skip an
unknown name, and the engine keeps the old weight. So a model whose names in memory differ from
those in its files is rejected.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from trainer_pool.model.attention import PACKED, packable

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SAFETENSORS, _TORCH = "model.safetensors", "pytorch_model.bin"
_SHOWN = 8
"""Patterns of names in a message."""


def checkpoint_names(model_path: str) -> frozenset[str]:
    """Names of all weights in a folder or in a model of the Hugging Face cache.

    Raises ValueError if there is no file of weights.
    """
    for index in _INDEXES:
        if (path := _file(model_path, index)) is not None:
            return frozenset(json.loads(path.read_text())["weight_map"])
    if (path := _file(model_path, _SAFETENSORS)) is not None:
        try:
            with safe_open(path, framework="pt") as weights:
                return frozenset(weights.keys())
        except SafetensorError as error:
            raise ValueError(
                f"model.path={model_path!r}: {path.name} cannot be read ({error}); copy it again"
            ) from error
    if (path := _file(model_path, _TORCH)) is not None:
        return frozenset(torch.load(path, map_location="meta", weights_only=True, mmap=True))
    raise ValueError(
        f"model.path={model_path!r}: no weights: neither {_SAFETENSORS} nor {_TORCH}, "
        "in one file or sharded"
    )


def _file(model_path: str, name: str) -> Path | None:
    found = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def model_without_weights(model_path: str, *, trust_remote_code: bool) -> Any:
    """The model as the trainer builds it, on the meta device.

    Raises ValueError if the trainer cannot pack the model's sequences.
    """
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)

    def build() -> Any:
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED, trust_remote_code=trust_remote_code
        )

    with torch.device("meta"):
        model = packable(model_path, build).eval()
    model.tie_weights()
    return model


def parameter_names(model: Any) -> list[str]:
    """The names that the trainer will publish."""
    return [name for name, _ in model.named_parameters()]


def check_names(model_path: str, published: Iterable[str]) -> None:
    """Raises ValueError naming weights that are `published` but not in the checkpoint's files."""
    known = checkpoint_names(model_path)
    unknown = [name for name in published if name not in known]
    if unknown:
        raise ValueError(
            f"model.path={model_path!r}: the trainer holds {len(unknown)} weights by names that "
            f"the checkpoint does not have: {name_patterns(unknown)}. Engines load by the "
            "checkpoint's names and silently keep the old weight of any other. A mixture of "
            "experts whose experts transformers fuses is not supported yet: choose a dense model. "
            "If it is dense, save it again with save_pretrained of this transformers version"
        )


def check_tied_head(model_path: str, model: Any) -> None:
    """Raises ValueError if config.json ties the output head to the embeddings, but the files hold
    another head."""
    if not model.config.get_text_config().tie_word_embeddings:
        return
    known = checkpoint_names(model_path)
    for head, embeddings in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if not {head, embeddings} <= known:
            continue
        if not torch.equal(_read(model_path, head), _read(model_path, embeddings)):
            raise ValueError(
                f"model.path={model_path!r}: tie_word_embeddings=true in its config.json, but its "
                f"files hold a {head} that differs from {embeddings}. Engines and trainer would "
                "use the embeddings as the head, and this head would be lost: set "
                f"tie_word_embeddings=false there, or remove {head} from the files"
            )


def _read(model_path: str, name: str) -> torch.Tensor:
    files = [_SAFETENSORS, _TORCH]
    for index in _INDEXES:
        if (path := _file(model_path, index)) is not None:
            files = [json.loads(path.read_text())["weight_map"][name]]
            break
    found = [path for file in files if (path := _file(model_path, file)) is not None]
    if not found:
        raise ValueError(f"model.path={model_path!r}: {files[0]} is missing; copy it again")
    path = found[0]
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as weights:
            return cast(torch.Tensor, weights.get_tensor(name))
    return cast(torch.Tensor, torch.load(path, weights_only=True, mmap=True)[name])


def check_engines_agree(
    logprob_diff_mean: float, num_tokens: int, published: Iterable[str], most: float
) -> None:
    """Raises RuntimeError naming the `published` weights if engines serve others.

    `logprob_diff_mean`: |trainer - engine| over `num_tokens` tokens of the version being trained,
    which may be `most`.
    """
    if logprob_diff_mean > most:
        raise RuntimeError(
            "the engines do not serve the trainer's weights: the log-probabilities of "
            f"{num_tokens} tokens that they sampled with the version being trained differ by "
            f"{logprob_diff_mean:.2g} nats on average, more than {most:g}. Their "
            f"loader may skip published names ({name_patterns(published)}), or they compute the "
            "model differently: compare the log of engine-0 with the model's config"
        )


def name_patterns(names: Iterable[str]) -> str:
    """Merges names that differ only in a number: `model.layers.*.mlp.up_proj.weight (24)`."""
    counts = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    shown = [f"{name} ({n})" if n > 1 else name for name, n in counts.most_common(_SHOWN)]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
