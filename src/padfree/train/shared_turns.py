"""Count the tokens that the samples of one data row share. The memory estimate and `padfree plan` need the count.

For example, a conversation of two turns gives two samples, which branch at `|`:

    turn 1   system user-1 | thought-1 answer-1
    turn 2   system user-1 | answer-1 user-2 thought-2 answer-2

If prefixes are shared, `system user-1` is computed once. `answer-1` is computed twice: after its thought, where
it is trained, and without the thought, as context of turn 2.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from padfree.config import BatchConfig, LossConfig, RolloutConfig
from padfree.data import StoredSamples
from padfree.estimate.cost_file import read_cost
from padfree.model.sharing import sharing_obstacle
from padfree.packing import CostModel, PrefixTree
from padfree.packing.collate import prefixes_of
from padfree.packing.fill import Indices
from padfree.tasks.reading import Samples
from padfree.train.batcher import in_rows

MOST_ROWS = 64
"""The maximum number of data rows that `copied_keys` examines."""


def rows_with_several(batch: BatchConfig, loss: LossConfig, rollout: RolloutConfig, samples: Samples) -> Indices:
    """Return the indices of the data rows with several samples, which may share prefixes.

    Preference pairs, rollouts and prompts give an empty result.
    """
    if not isinstance(samples, StoredSamples) or not in_rows(loss, rollout) or loss.task.group_size > 1:
        return np.zeros(0, dtype=np.int64)
    if batch.share_prefixes is False:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.diff(samples.row_starts) > 1)


def run_cost(batch: BatchConfig, model: PreTrainedModel) -> CostModel:
    """Return the run's cost model (what a sample of n tokens costs), which decides which prefixes are shared."""
    return CostModel.from_config(model.config) if batch.cost is None else read_cost(batch.cost)


def tree_of_row(batch: BatchConfig, samples: StoredSamples, row: int, cost: CostModel) -> PrefixTree:
    """Return the tree of the prefixes that the samples of data row `row` share."""
    first, end = samples.row_starts[row : row + 2].tolist()
    return prefixes_of([samples[index] for index in range(first, end)], batch.share_prefixes, cost)


def copied_keys(
    batch: BatchConfig, loss: LossConfig, rollout: RolloutConfig, samples: Samples, model: PreTrainedModel
) -> float:
    """Return the number of keys that attention copies for shared prefixes, divided by the number of computed tokens.

    Samples of one data row can share prefixes. The result is the maximum over at most `MOST_ROWS` rows. It is 0 if
    nothing is shared.
    """
    several = rows_with_several(batch, loss, rollout, samples)
    if not len(several) or sharing_obstacle(model) is not None:
        return 0.0
    assert isinstance(samples, StoredSamples)
    starts = samples.row_starts[:-1]
    tokens, longest = np.add.reduceat(samples.lengths, starts), np.maximum.reduceat(samples.lengths, starts)
    # Begin with the rows that probably copy the most keys: many tokens in total, relative to the longest sample.
    order = np.argsort(-(tokens / np.maximum(longest, 1))[several], kind="stable")
    cost = run_cost(batch, model)
    trees = [tree_of_row(batch, samples, row, cost) for row in several[order[:MOST_ROWS]].tolist()]
    return max((float(tree.end.sum()) / tree.num_tokens for tree in trees if tree.is_shared), default=0.0)
