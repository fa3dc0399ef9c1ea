"""The balance of context ranks, compared with hand-computed work."""

from __future__ import annotations

import numpy as np
import pytest

from padfree.tools.planner.context import KINDS, context_balance, long_pack


def test_one_long_document_over_two_ranks() -> None:
    """Contiguous: the second half of 8 tiles reads all earlier keys. Cost in tiles, and per key 240 and 400 pairs."""
    tile, length = 128 * 128, 1024
    first = 10 * tile + 400 * 512  # 1 + 2 + 3 + 4 tiles, and its own keys
    second = 26 * tile + (240 + 400) * 512  # 5 + 6 + 7 + 8 tiles, 512 earlier keys and its own
    found = context_balance([np.array([length])], 2, "contiguous")
    mean = (first + second) / 2
    np.testing.assert_allclose(found.shares, [first / mean, second / mean])
    assert found.mean == found.worst == pytest.approx(second / mean)
    assert found.key_tokens == pytest.approx((512 + 1024) / 1024)


def test_balanced_is_the_most_even() -> None:
    rows = [np.array([3000, 500, 400, 100]), np.array([1000, 1000, 1000, 1000])]
    found = {kind: context_balance(rows, 4, kind) for kind in KINDS}
    assert min(found.values(), key=lambda each: each.mean).kind == "balanced"
    assert all(each.worst >= each.mean >= 1 for each in found.values())
    assert all(each.shares.shape == (4,) for each in found.values())


def test_rows_that_are_no_multiple_of_the_ranks_get_a_pad() -> None:
    assert context_balance([np.array([5, 3, 5])], 4, "balanced").shares.mean() == pytest.approx(1.0)


def test_long_row() -> None:
    assert long_pack(np.array([3, 9, 4, 2, 20]), 16).tolist() == [9, 3, 4]
    assert long_pack(np.array([30, 40]), 16).tolist() == [16]
    assert long_pack(np.array([1] * 5000 + [10]), 12).tolist() == [10, 1, 1]
