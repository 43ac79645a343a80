"""Attention of packed rows: each span attends to itself and to the spans above it alone.

transformers calls the function registered here instead of its own, with the borders of the
sequences in the names that it uses for flash attention. Its own ways to packed rows either need the
flash-attn package or build a mask of [L, L], whose pairs are all computed: 15 times the time of the
sequences one by one for 20 of 200 tokens on a CPU.

    GPU, bfloat16     torch's variable-length flash attention
    otherwise         SDPA, a call for all spans of a length

Without shared prefixes a span is a sequence. With them, the keys of a span are gathered from the
row: those of its whole sequence so far. Causal attention is then that of the last queries.

Ranks that split a row (`sequence.py`) exchange tokens for heads before it, and back after it.

Letters: L tokens of the row, H heads, K heads of keys and values, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trainer_pool.data.packing import PackedRow, packed_row
from trainer_pool.model.sequence import RowPart

PACKED = "leash_packed"
"""The name under which transformers knows it, as `attn_implementation`."""


def arguments(row: PackedRow, part: RowPart | None = None) -> dict[str, object]:
    """Keyword arguments of a model's `forward` that reach `packed_attention`; `part`: this rank's
    of the row, if it is split."""
    return {
        "cu_seq_lens_q": row.starts,
        "cu_seq_lens_k": row.key_starts,
        "max_length_q": row.longest,
        "max_length_k": row.longest_keys,
        "key_places": row.key_places,
        "row_part": part,
    }


def packable(model_path: str, build: Callable[[], Any]) -> Any:
    """The model that `build` makes with `PACKED`.

    Raises ValueError if it does not take its attention from transformers' interface.
    """
    try:
        model = build()
    except KeyError as error:  # older models look their own classes of attention up by its name
        if error.args != (PACKED,):
            raise
        model = None
    if model is None or not model._supports_attention_backend:
        raise ValueError(
            f"model.path={model_path!r}: the model computes its attention by itself, so its "
            "sequences cannot be packed into one row; choose a model that takes its attention from "
            "transformers' AttentionInterface"
        )
    return model


@torch.no_grad()
def sliding_windows(model: Any) -> set[int | None]:
    """The sliding windows of the layers of a model on the meta device; None: a layer attends to
    all that came before.

    Raises ValueError for attention that `packed_attention` is not.
    """
    row, windows = packed_row([torch.arange(2)]), set[int | None]()
    try:
        model(
            input_ids=row.tokens_L.unsqueeze(0).to("meta"),
            position_ids=row.position_ids_L.unsqueeze(0).to("meta"),
            use_cache=False,
            windows=windows,
            **arguments(row),
        )
    except (RuntimeError, TypeError):  # it reads numbers, which this device does not have
        # Qwen2-MoE writes 0 for no window.
        return {getattr(model.config, "sliding_window", None) or None}
    return windows


@torch.no_grad()
def check_model(
    model_path: str, logits: Callable[[PackedRow, Tensor], Tensor], device: torch.device
) -> None:
    """Raises ValueError if a sequence has other logits behind another one than by itself.

    A model whose layers carry a state along the row, or that counts positions by itself, would
    otherwise train on numbers of other trajectories without any sign of it. `logits` takes a row
    and positions in it, and draws no random numbers.
    """
    other, own = torch.arange(1, 6, device=device), torch.arange(6, 10, device=device)
    alone_NV = logits(packed_row([own]), torch.arange(4, device=device))
    behind_NV = logits(packed_row([other, own]), torch.arange(5, 9, device=device))
    rounding = 0.001 if alone_NV.dtype == torch.float32 else 0.03
    largest = float(alone_NV.abs().max())
    if not torch.allclose(behind_NV.float(), alone_NV.float(), rtol=0, atol=rounding * largest):
        raise ValueError(
            f"model.path={model_path!r}: a sequence has other logits behind another one in a "
            "packed row than by itself, so the model's layers mix them; choose a model whose "
            "layers are all attention"
        )


def packed_attention(
    module: torch.nn.Module,
    query_1HLD: Tensor,
    key_1KLD: Tensor,
    value_1KLD: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    key_places: Tensor | None = None,
    row_part: RowPart | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    windows: set[int | None] | None = None,
    **_: Any,  # dropout, which is 0, and what other implementations need
) -> tuple[Tensor, None]:
    """[1, L, H, D]; the signature is transformers' `AttentionInterface`. Adds the layer's window
    to `windows`. With `row_part`, L are this rank's tokens of the row.

    Raises ValueError for attention that this is not.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(
            f"model.path: {type(module).__name__} did not receive the borders of the packed row's "
            "sequences, since its model does not pass them to its layers; choose a model that "
            "transformers itself has, without trust_remote_code"
        )
    for name, value in (("softcap", softcap), ("sinks", s_aux)):
        if value is not None:
            raise ValueError(
                f"model.path: {type(module).__name__} has attention with {name}, which the "
                "trainer does not compute; choose a model without"
            )
    if windows is not None:
        windows.add(sliding_window)
    if row_part is not None:
        query_1HLD, key_1KLD, value_1KLD = row_part.whole_rows(query_1HLD, key_1KLD, value_1KLD)
    output_1LHD = _attention_of_spans(
        query_1HLD,
        key_1KLD,
        value_1KLD,
        cu_seq_lens_q,
        cu_seq_lens_k,
        (max_length_q, max_length_k),
        key_places,
        scaling,
        sliding_window,
    )
    return output_1LHD if row_part is None else row_part.own_tokens(output_1LHD), None


def _attention_of_spans(
    query_1HLD: Tensor,
    key_1KLD: Tensor,
    value_1KLD: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    key_places: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    if key_places is not None:
        key_1KLD, value_1KLD = key_1KLD[:, :, key_places], value_1KLD[:, :, key_places]
    is_half = query_1HLD.dtype in (torch.bfloat16, torch.float16)
    if not query_1HLD.is_cpu and is_half:
        output_LHD = varlen_attn(
            query_1HLD[0].transpose(0, 1),
            key_1KLD[0].transpose(0, 1),
            value_1KLD[0].transpose(0, 1),
            starts,
            key_starts,
            *longest,
            scale=scaling,
            # The window of transformers counts the token itself.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query_1HLD.shape[1] != key_1KLD.shape[1],
        )
        assert isinstance(output_LHD, Tensor)
        return output_LHD.unsqueeze(0)
    num_queries_per_key = query_1HLD.shape[1] // key_1KLD.shape[1]
    # Split and not sliced: the gradient of each slice would be as large as the whole row.
    lengths, key_lengths = starts.diff().tolist(), key_starts.diff().tolist()
    queries, keys, values = (
        torch.split(query_1HLD, lengths, dim=2),
        torch.split(key_1KLD.repeat_interleave(num_queries_per_key, dim=1), key_lengths, dim=2),
        torch.split(value_1KLD.repeat_interleave(num_queries_per_key, dim=1), key_lengths, dim=2),
    )
    # Those of equal lengths at once: of short sequences, each call costs more than its numbers.
    alike: dict[tuple[int, int], list[int]] = {}
    for place, of_span in enumerate(zip(lengths, key_lengths, strict=True)):
        alike.setdefault(of_span, []).append(place)
    outputs: dict[int, Tensor] = {}
    for (num_queries, num_keys), places in alike.items():
        mask = _mask(num_queries, num_keys, sliding_window, query_1HLD.device)
        output_SHTD = scaled_dot_product_attention(
            torch.cat([queries[place] for place in places]),
            torch.cat([keys[place] for place in places]),
            torch.cat([values[place] for place in places]),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
        outputs |= zip(places, torch.split(output_SHTD.transpose(1, 2), 1), strict=True)
    return torch.cat([outputs[place] for place in range(len(lengths))], dim=1)


def _mask(
    num_queries: int, num_keys: int, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """Bool [queries, keys] of the last queries of a sequence; None if it is plainly causal."""
    window = num_keys if sliding_window is None else sliding_window
    if num_queries == num_keys <= window:
        return None
    pairs = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    before = num_keys - num_queries
    return pairs.tril(before).triu(before + 1 - window)


AttentionInterface.register(PACKED, packed_attention)
