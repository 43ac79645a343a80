"""Attention of packed rows: each span attends to itself and to the spans above it alone.

transformers calls the function registered here instead of its own, with the borders of the
sequences in the names that it uses for flash attention. Its own ways to packed rows either need the
flash-attn package or build a mask of [L, L], whose pairs are all computed: 15 times the time of the
sequences one by one for 20 of 200 tokens on a CPU.

    GPU, bfloat16     torch's variable-length flash attention
    otherwise         SDPA, a call for all spans of about a length

Without shared prefixes a span is a sequence. With them, the keys of a span are gathered from the
row: those of its whole sequence so far. Causal attention is then that of the last queries.

Ranks that split a row (`sequence.py`) exchange tokens for heads before it, and back after it.

Letters: L tokens of the row, H heads, K heads of keys and values, D size of a head; in a call of
SDPA, S spans with room for Q queries and T keys each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trainer_pool.data.packing import PackedRow, packed_row
from trainer_pool.model.sequence import RowPart

PACKED = "leash_packed"
"""The name under which transformers knows it, as `attn_implementation`."""
SHORT = 64
"""Spans of at most so many keys share a call with others of about their length: of short ones, a
call costs more than its numbers."""


def arguments(row: PackedRow, part: RowPart | None = None) -> dict[str, object]:
    """Keyword arguments of a model's `forward` that reach `packed_attention`; `part`: this rank's
    of the row, if it is split."""
    return {
        "cu_seq_lens_q": row.starts,
        "cu_seq_lens_k": row.key_starts,
        "max_length_q": row.longest,
        "max_length_k": row.longest_keys,
        "calls": SpanCalls(row),
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
    calls: SpanCalls | None = None,
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
    if cu_seq_lens_q is None or cu_seq_lens_k is None or calls is None:
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
    query_LHD, key_LKD, value_LKD = (
        x_1HLD[0].transpose(0, 1) for x_1HLD in (query_1HLD, key_1KLD, value_1KLD)
    )
    if not query_LHD.is_cpu and query_LHD.dtype in (torch.bfloat16, torch.float16):
        if (places := calls.row.key_places) is not None:
            key_LKD, value_LKD = key_LKD[places], value_LKD[places]
        output_LHD = varlen_attn(
            query_LHD,
            key_LKD,
            value_LKD,
            cu_seq_lens_q,
            cu_seq_lens_k,
            max_length_q,
            max_length_k,
            scale=scaling,
            # The window of transformers counts the token itself.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query_LHD.shape[1] != key_LKD.shape[1],
        )
        assert isinstance(output_LHD, Tensor)
    else:
        output_LHD = calls.attend(query_LHD, key_LKD, value_LKD, scaling, sliding_window)
    output_1LHD = output_LHD.unsqueeze(0)
    return output_1LHD if row_part is None else row_part.own_tokens(output_1LHD), None


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """Spans of about a length; a shorter one has its last query and key again in what is left."""

    num_keys: int
    places_SQ: Tensor
    """The place of each query in its sequence."""
    is_causal: bool
    """All spans begin their sequence."""
    masks: dict[int | None, Tensor]
    """By sliding window."""

    def mask(self, window: int | None) -> Tensor | None:
        """Bool [S, 1, Q, T], or [1, 1, Q, T] for all; None if it is plainly causal."""
        if self.is_causal and (window is None or self.num_keys <= window):
            return None
        if window not in self.masks:
            key_T = torch.arange(self.num_keys, device=self.places_SQ.device)
            places_SQ = self.places_SQ
            if (places_SQ == places_SQ[0]).all():  # long spans: each layer keeps its mask
                places_SQ = places_SQ[:1]
            back_SQT = places_SQ[:, :, None] - key_T
            is_seen = (back_SQT >= 0) & (back_SQT < (window or self.num_keys))
            self.masks[window] = is_seen[:, None]
        return self.masks[window]


class SpanCalls:
    """The calls of SDPA for a row, the same in all its layers; planned when the first one asks."""

    def __init__(self, row: PackedRow) -> None:
        self.row = row
        self._calls: list[_Call] = []

    def attend(
        self,
        query_LHD: Tensor,
        key_LKD: Tensor,
        value_LKD: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """[L, H, D]"""
        if not self._calls:
            self._plan(query_LHD.device)
        times = query_LHD.shape[1] // key_LKD.shape[1]
        # Each tensor is gathered once for all calls: the gradient of a slice would be as large as
        # the whole row, and pieces of each span are hundreds of small tensors.
        sizes = [call.places_SQ.numel() for call in self._calls]
        queries = torch.split(_rows(query_LHD, self._queries), sizes)
        sizes = [len(call.places_SQ) * call.num_keys for call in self._calls]
        keys, values = (
            torch.split(_rows(x, self._keys).repeat_interleave(times, dim=1), sizes)
            for x in (key_LKD, value_LKD)
        )
        outputs = []
        for call, *parts in zip(self._calls, queries, keys, values, strict=True):
            mask, num_spans = call.mask(window), len(call.places_SQ)
            query, key, value = (x.view(num_spans, -1, *x.shape[1:]).transpose(1, 2) for x in parts)
            output_SHQD = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
            outputs.append(output_SHQD.transpose(1, 2).flatten(0, 1))
        return _rows(torch.cat(outputs), self._back)

    def _plan(self, device: torch.device) -> None:
        starts, key_starts = self.row.starts.cpu().numpy(), self.row.key_starts.cpu().numpy()
        lengths, key_lengths = np.diff(starts), np.diff(key_starts)
        places = np.arange(starts[-1])
        key_places = places if self.row.key_places is None else self.row.key_places.cpu().numpy()
        alike: dict[tuple[int, int], list[int]] = {}
        for span, size in enumerate(zip(lengths.tolist(), key_lengths.tolist(), strict=True)):
            if size[1] <= SHORT:  # powers of two
                size = 1 << (size[0] - 1).bit_length(), 1 << (size[1] - 1).bit_length()
            alike.setdefault(size, []).append(span)
        queries, keys, back, num_before = [], [], np.zeros(len(places), np.int64), 0
        for (num_queries, num_keys), spans in alike.items():
            own_S1, keys_S1 = lengths[spans, None], key_lengths[spans, None]
            query_SQ = np.minimum(np.arange(num_queries), own_S1 - 1)
            key_ST = np.minimum(np.arange(num_keys), keys_S1 - 1)
            queries.append((starts[spans, None] + query_SQ).ravel())
            keys.append(key_places[key_starts[spans, None] + key_ST].ravel())
            is_own = (np.arange(num_queries) < own_S1).ravel()
            back[queries[-1][is_own]] = num_before + np.flatnonzero(is_own)
            num_before += is_own.size
            call = _Call(
                num_keys=num_keys,
                places_SQ=torch.from_numpy(keys_S1 - own_S1 + query_SQ).to(device),
                is_causal=bool((own_S1 == keys_S1).all()),
                masks={},
            )
            self._calls.append(call)
        self._queries, self._keys, self._back = (
            torch.from_numpy(own).to(device)
            for own in (np.concatenate(queries), np.concatenate(keys), back)
        )


def _rows(x: Tensor, places: Tensor) -> Tensor:
    # Gradients must be the same in each run: those of index_select are on a CPU, and take less.
    return x.index_select(0, places) if x.is_cpu else x[places]


AttentionInterface.register(PACKED, packed_attention)
