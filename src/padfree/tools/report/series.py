"""Reduce a long series to few points for a plot.

    values    3 1 4 1 5 9 2 6 5 3 5 8        12 points in 3 buckets of 4
    kept      3 1 4 . . 9 2 . . 3 . 8        the minimum and maximum of each bucket, and the first and last point

A spike of a single step therefore stays visible. A bucket without any finite value keeps one NaN, which is a gap in the
line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SMOOTH_ABOVE = 200
"""If a metric has more values than this, its plot also shows their running mean."""

MOST_POINTS = 1000
"""Maximum number of points of one series on the page."""


def thinned(values: NDArray[np.float64], most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Return ascending indices of at most `most` of the N values, chosen so that a plot of them keeps all spikes.

    `most` must be 4 or more.
    """
    assert most >= 4
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    edges = np.linspace(0, len(values), most // 2, dtype=np.int64)  # one bucket fewer: the two ends are points too
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        bucket = values[begin:end]
        if np.isnan(bucket).all():
            kept.add(begin)
        else:
            kept |= {begin + int(np.nanargmin(bucket)), begin + int(np.nanargmax(bucket))}
    return np.array(sorted(kept), dtype=np.int64)


def mean_window(count: int) -> int:
    """Return the window of the running mean of a series of `count` values: an odd number near a fiftieth of `count`."""
    return count // 50 | 1


def running_mean(values: NDArray[np.float64], at: NDArray[np.int64], window: int) -> NDArray[np.float64]:
    """Return the mean of the finite values in a window around each index in `at`, as an array [len(at)].

    At the ends of the series the window is smaller.
    """
    assert window % 2 == 1
    # With differences of cumulative sums, the rounding error of one huge value would spoil all later means.
    around = [values[max(index - window // 2, 0) : index + window // 2 + 1] for index in at.tolist()]
    finite = [part[np.isfinite(part)] for part in around]
    return np.array([part.mean() if len(part) else np.nan for part in finite])


def stretch_means(values: NDArray[Any], stretch: int) -> NDArray[np.float64]:
    """Return the mean of each `stretch` consecutive values out of N, as an array [ceil(N / stretch)].

    The last mean is over the values that remain, which can be fewer than `stretch`.
    """
    starts = np.arange(0, len(values), stretch)
    counts = np.diff(starts, append=len(values))
    return np.add.reduceat(values.astype(np.float64), starts) / counts
