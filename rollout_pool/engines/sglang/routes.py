"""The experts that SGLang has chosen for the tokens of a request, as its last part has them.

With --enable-return-routed-experts SGLang keeps the experts of each token beside its KV cache,
where a prefix that is found there has them too. A request that was retracted has those of its last
computation, for tokens that were sampled before a commit by newer weights.
(Source: SGLang 0.5.20.)
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SETTING = "rollout.engine.routing_replay"


def read_routes(
    meta: Mapping[str, Any], num_tokens: int
) -> NDArray[np.uint8] | NDArray[np.uint16] | None:
    """[num_tokens, layers * experts of a token]; None if the engine has not returned any, as for a
    request that was ended while it was queued. Raises ValueError for what is no such table."""
    text = meta.get("routed_experts")
    if text is None:
        if meta["finish_reason"]["type"] == "abort":
            return None
        raise ValueError(
            f"returned a completion without the experts of its tokens; set {SETTING}=false"
        )
    numbers = np.frombuffer(base64.b64decode(text), "<i4")
    if num_tokens < 1 or not len(numbers) or len(numbers) % num_tokens:
        raise ValueError(f"returned {len(numbers)} numbers of experts for {num_tokens} tokens")
    experts = numbers.reshape(num_tokens, -1)
    # The experts of a token differ, so one of them is not 0; SGLang has 0 where it saw none.
    if experts.min() < 0 or experts.max() >= 2**16 or not experts.any(axis=1).all():
        raise ValueError(
            f"returned tokens without experts: its way of computing them does not say "
            f"which it has chosen; remove --moe-runner-backend, or set {SETTING}=false"
        )
    if experts.max() < 2**8:
        return experts.astype(np.uint8)
    return experts.astype(np.uint16)
