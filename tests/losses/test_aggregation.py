"""Token weights: worked examples, both implementations, every mode against a loop, and samples without labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padfree.losses import (
    WEIGHT_MODES,
    WeightMode,
    batch_weights,
    group_token_counts,
    scored_counts,
    token_weights,
    weight_divisor,
)
from padfree.packing.collate import collate
from padfree.sample import Sample
from tests.refused import refused

MASKS = [np.array(m, dtype=bool) for m in ([0, 1, 1, 0], [0, 1, 1], [0, 1, 1, 1, 1])]
X = [np.array(x) for x in ([0.5, 0.3, 0.2], [0.8, 0.1], [0.4, 0.6, 0.2, 0.3])]
"""The worked example of the module: one value per prediction."""


def total(weights: list[np.ndarray[Any, Any]], values: list[np.ndarray[Any, Any]]) -> float:
    return float(sum((w[:-1] * x).sum() for w, x in zip(weights, values, strict=True)))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sum-of-sample-mean", 0.4 + 0.45 + 0.375),
        ("sample-mean", (0.4 + 0.45 + 0.375) / 3),
        ("token-mean", 3.2 / 8),
        ("sample-sum", 3.2 / 3),
        ("constant", 3.2 / 20),
        ("group-mean", (1.7 / 4 + 1.5 / 4) / 2),
    ],
)
def test_worked_example(mode: WeightMode, expected: float) -> None:
    more: dict[str, Any] = {"constant": {"constant": 20.0}, "group-mean": {"groups": ["a", "a", "b"]}}.get(mode, {})
    weights = token_weights(mode, MASKS, **more)
    assert total(weights, X) == pytest.approx(expected, rel=1e-6)
    assert all(w.dtype == np.float32 and w[-1] == 0 for w in weights)


def test_sum_of_sample_means_is_1_225() -> None:
    assert total(token_weights("sum-of-sample-mean", MASKS), X) == pytest.approx(1.225, rel=1e-6)


def settings_for(mode: str, groups: list[int]) -> dict[str, Any]:
    return {"constant": {"constant": 7.5}, "group-mean": {"groups": groups}}.get(mode, {})


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    lengths = draw(st.lists(st.integers(0, 6), max_size=7))
    masks = [np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool) for n in lengths]
    return masks, [draw(st.integers(0, 2)) for _ in lengths]


@given(batches(), st.sampled_from(WEIGHT_MODES))
def test_against_the_loop(batch: tuple[list[np.ndarray[Any, Any]], list[int]], mode: WeightMode) -> None:
    masks, groups = batch
    counts = [int(mask[1:].sum()) for mask in masks]
    samples_with_any = [i for i, count in enumerate(counts) if count]
    groups_with_any = {groups[i] for i in samples_with_any}
    weights = token_weights(mode, masks, **settings_for(mode, groups))
    assert [len(w) for w in weights] == [len(m) for m in masks]
    for i, (mask, array) in enumerate(zip(masks, weights, strict=True)):
        for t in range(len(mask)):
            if t + 1 == len(mask) or not mask[t + 1]:
                assert array[t] == 0
                continue
            in_group = sum(c for c, g in zip(counts, groups, strict=True) if g == groups[i])
            expected = {
                "token-mean": 1 / sum(counts),
                "sample-mean": 1 / (len(samples_with_any) * counts[i]),
                "sum-of-sample-mean": 1 / counts[i],
                "sample-sum": 1 / len(samples_with_any),
                "constant": 1 / 7.5,
                "group-mean": 1 / (len(groups_with_any) * in_group),
            }[mode]
            assert array[t] == pytest.approx(expected, rel=1e-6)


@given(batches(), st.sampled_from(WEIGHT_MODES))
def test_on_the_device_from_global_counts(
    batch: tuple[list[np.ndarray[Any, Any]], list[int]], mode: WeightMode
) -> None:
    masks, groups = batch
    if not masks:
        return
    more = settings_for(mode, groups)
    expected = np.concatenate(token_weights(mode, masks, **more))
    packed = collate([Sample(tokens=np.arange(len(mask)), loss_mask=mask) for mask in masks]).padded_to(40)
    counts = scored_counts(masks)
    weights = batch_weights(
        mode,
        packed.labels,
        packed.sample_index,
        packed.num_samples,
        divisor=weight_divisor(mode, counts, **more),
        group_counts=torch.from_numpy(group_token_counts(counts, groups)) if mode == "group-mean" else None,
    )
    assert weights.dtype == torch.float32
    np.testing.assert_allclose(weights.numpy()[: len(expected)], expected, rtol=1e-6)
    assert not weights[len(expected) :].any()


@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_a_sample_without_labels_changes_no_other_weight(mode: WeightMode) -> None:
    groups = [0, 0, 1]
    without = token_weights(mode, MASKS, **settings_for(mode, groups))
    silent = [np.zeros(4, dtype=bool), np.ones(1, dtype=bool), np.zeros(0, dtype=bool)]
    with_them = token_weights(mode, [*MASKS, *silent], **settings_for(mode, [*groups, 1, 2, 3]))
    for first, second in zip(without, with_them[:3], strict=True):
        np.testing.assert_array_equal(first, second)
    assert all(not weights.any() for weights in with_them[3:])


@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_nothing_scored_at_all_is_zero_not_nan(mode: WeightMode) -> None:
    weights = token_weights(mode, [np.zeros(3, dtype=bool)] * 2, **settings_for(mode, [0, 1]))
    assert all(np.array_equal(w, np.zeros(3)) for w in weights)
    assert token_weights(mode, [], **settings_for(mode, [])) == []


def test_weights_go_through_pack() -> None:
    samples = [Sample(tokens=np.arange(len(mask)), loss_mask=mask) for mask in MASKS]
    packed = collate(samples, weights=token_weights("sum-of-sample-mean", [s.mask for s in samples]))
    values = np.concatenate([np.append(x, 99.0) for x in X])
    assert float((packed.weights.numpy() * values).sum()) == pytest.approx(1.225, rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "more", "message"),
    [
        ("median", {}, "unknown mode 'median'"),
        ("constant", {}, "constant: None"),
        ("constant", {"constant": 0.0}, "constant: 0.0"),
        ("token-mean", {"constant": 3.0}, "leave it out"),
        ("group-mean", {}, "groups: is None for 3 samples"),
        ("group-mean", {"groups": [1, 2]}, "groups: has 2 entries for 3 samples"),
        ("group-mean", {"groups": [1, None, 2]}, "groups: is None at index 1"),
    ],
)
def test_refusals(mode: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_weights(mode, MASKS, **more)


def test_group_counts_are_asked_for() -> None:
    labels, index = torch.tensor([1, -100]), torch.zeros(2, dtype=torch.int32)
    with refused("group_counts"):
        batch_weights("group-mean", labels, index, 1, divisor=1.0)


@given(
    counts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=6),
    mode=st.sampled_from([mode for mode in WEIGHT_MODES if mode != "group-mean"]),
)
def test_a_conversation_in_parts_weighs_as_it_does_in_one(counts: list[list[int]], mode: WeightMode) -> None:
    """Each entry: trained tokens of each part. A token has the same weight as in one long sample."""
    whole = [np.array([0] + [1] * sum(conversation), dtype=bool) for conversation in counts]
    parts = [np.array([0] + [1] * part, dtype=bool) for conversation in counts for part in conversation]
    # A conversation of one sample has no unit name, as in a data set.
    units = [
        None if len(conversation) == 1 else f"conversation {number}"
        for number, conversation in enumerate(counts)
        for _ in conversation
    ]
    expected = token_weights(mode, whole, **settings_for(mode, []))
    found = iter(token_weights(mode, parts, units=units, **settings_for(mode, [])))
    for conversation, weights in zip(counts, expected, strict=True):
        together = np.concatenate([part[:-1] for part in (next(found) for _ in conversation)])
        np.testing.assert_array_equal(together, weights[:-1])


def test_units_are_given_for_every_sample() -> None:
    with refused("units"):
        token_weights("sample-mean", MASKS, units=["a", "a"])
    plain = token_weights("sample-mean", MASKS)
    for one, other in zip(token_weights("sample-mean", MASKS, units=[None] * 3), plain, strict=True):
        np.testing.assert_array_equal(one, other)
