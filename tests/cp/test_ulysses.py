"""Which heads can be divided over which ranks; the method itself runs in test_attend."""

from __future__ import annotations

import pytest

from padfree.cp.ulysses import check_heads


@pytest.mark.parametrize(("heads", "key_heads", "world"), [(8, 8, 4), (8, 2, 4), (8, 4, 4), (32, 8, 2), (4, 1, 4)])
def test_key_heads_are_divided_or_copied(heads: int, key_heads: int, world: int) -> None:
    check_heads(heads, key_heads, world)


@pytest.mark.parametrize(
    ("heads", "key_heads", "world", "message"),
    [
        (
            6,
            2,
            4,
            "method: 'ulysses' cannot divide 6 heads over 4 context ranks; choose a number of ranks that divides",
        ),
        (
            12,
            3,
            2,
            "method: 'ulysses' cannot divide 3 key heads over 2 context ranks; choose a number of ranks that divides",
        ),
        (24, 6, 4, "divide 6 key heads"),
    ],
)
def test_others_are_refused_with_a_fix(heads: int, key_heads: int, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_heads(heads, key_heads, world)
    assert "or method='allgather'" in str(caught.value)
