"""Host arrays from user input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from padfree.arrays import concatenated_ranges, host_array, integer_array, number_array, single_number
from tests.refused import refused


@pytest.mark.parametrize(
    "values",
    [
        [1, 0],
        (1, 0),
        np.array([1, 0]),
        torch.tensor([1, 0]),
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 0.0], requires_grad=True),
        [torch.tensor(1), torch.tensor(0)],
    ],
    ids=lambda values: type(values).__name__,
)
def test_lists_arrays_and_tensors_are_the_same(values: Any) -> None:
    assert number_array(values, "values").tolist() == [1, 0]


def test_an_array_is_not_copied() -> None:
    values = np.arange(3)
    assert host_array(values, "values") is values
    assert integer_array(values, "values") is values


@pytest.mark.parametrize("values", [[[1], [2, 3]], ["a"], [None], [1j], {"a": 1}])
def test_values_that_are_not_numbers_are_refused(values: Any) -> None:
    with refused("lengths") as caught:
        number_array(values, "lengths")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [[1.5], [1.0], [True], [[1]], ["1"], 3])
def test_only_integers_are_integers(values: Any) -> None:
    with refused("lengths"):
        integer_array(values, "lengths")


def test_an_empty_list_is_accepted_as_integers() -> None:
    assert integer_array([], "lengths").dtype == np.int64
    assert integer_array(torch.tensor([]), "lengths").shape == (0,)


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1), torch.tensor(1.0, dtype=torch.bfloat16)])
def test_one_number_is_a_float(value: Any) -> None:
    found = single_number(value, "reward")
    assert type(found) is float
    assert found == 1.0


@pytest.mark.parametrize("value", ["1", [1.0], None, 1j])
def test_what_is_not_one_number_is_refused(value: Any) -> None:
    with refused("reward"):
        single_number(value, "reward")


def test_ranges_one_after_the_other() -> None:
    assert concatenated_ranges(np.array([5, 7, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    nothing = np.array([], dtype=np.int64)
    assert concatenated_ranges(nothing, nothing).tolist() == []
