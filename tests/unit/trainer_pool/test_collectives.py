"""Small collectives of the ranks."""

from __future__ import annotations

import pytest

from trainer_pool.collectives import Collectives


@pytest.mark.parametrize("text", ["", "rank 0", "é" * 2046, "é" * 2047, "x" + "é" * 9000])
def test_text_comes_back_whole_whether_or_not_it_fits_into_one_message(
    ranks: Collectives, text: str
) -> None:
    assert ranks.gather_texts(text) == [text]
