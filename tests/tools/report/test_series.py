"""Thinned series keep the shape of the full series."""

from __future__ import annotations

import numpy as np
import pytest

from padfree.tools.report.series import mean_window, running_mean, stretch_means, thinned


def test_the_picture_of_the_module() -> None:
    values = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], dtype=np.float64)
    assert thinned(values, most=8).tolist() == [0, 1, 2, 5, 6, 9, 11]
    assert thinned(values, most=12).tolist() == list(range(12))


@pytest.mark.parametrize("count", [4, 5, 10, 11, 999, 1000, 1001, 12_345])
@pytest.mark.parametrize("most", [4, 5, 10, 1000])
def test_extremes_and_ends_are_kept(count: int, most: int, rng: np.random.Generator) -> None:
    values = rng.standard_normal(count)
    kept = thinned(values, most)
    assert len(kept) <= most
    assert np.all(np.diff(kept) > 0)
    assert {0, count - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())


def test_a_gap_stays_a_gap(rng: np.random.Generator) -> None:
    values = rng.standard_normal(10_000)
    values[4000:6000] = np.nan
    values[7000] = np.nan
    gap = np.isnan(values[thinned(values, 100)])
    assert 8 <= gap.sum() <= 10  # buckets of 49 inside the gap of 2,000 values
    assert np.all(np.diff(np.flatnonzero(gap)) == 1)
    assert 49 <= len(thinned(np.full(5000, np.nan), 100)) <= 51


def test_running_mean_is_the_mean_of_what_is_around(rng: np.random.Generator) -> None:
    values = rng.standard_normal(300)
    values[50:60] = np.nan
    at = np.arange(300)
    found = running_mean(values, at, 7)
    for index in (0, 2, 3, 49, 52, 150, 299):
        around = values[max(0, index - 3) : index + 4]
        assert found[index] == pytest.approx(np.nanmean(around))
    assert np.isnan(found[[53, 56]]).all()
    assert running_mean(values, np.array([150]), 7).tolist() == [found[150]]


def test_one_huge_value_spoils_only_its_neighbours() -> None:
    values = np.ones(500)
    values[100] = 1e30
    assert running_mean(values, np.array([99, 300]), 5).tolist() == pytest.approx([2e29, 1.0], rel=1e-12)


def test_windows_are_odd() -> None:
    assert [mean_window(count) for count in (201, 250, 1000, 100_000)] == [5, 5, 21, 2001]


def test_means_of_stretches() -> None:
    assert stretch_means(np.array([1, 3, 5, 7, 10]), 2).tolist() == [2.0, 6.0, 10.0]
    assert stretch_means(np.array([1.0, 2.0]), 1).tolist() == [1.0, 2.0]
    assert stretch_means(np.array([1.0, 2.0]), 5).tolist() == [1.5]
