"""Log-probabilities of samples under a model, without gradient: old policy and reference.

    samples of the global batch   3 samples, 9 tokens        every rank has them all
    rows of this rank             score -> [T/cp] -> [T]     as a training step would lay them out
    back                          [9] summed over ranks      every rank has all: later steps divide them differently

Entry j of a sample's array belongs to its token j; it is 0 where token j is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import Sample, at_tokens
from padfree.config.choices import PackOverlong
from padfree.cp.shard import gather_tokens
from padfree.distributed import Mesh
from padfree.head import score
from padfree.model import hidden_states, lm_head_of
from padfree.packing import CostModel, StepPlan, plan_step
from padfree.train.masters import computing
from padfree.train.microbatch import MicroBatch, RowSettings, make_micro_batch
from padfree.train.parallelize import inside


class Scorer:
    """A parallelized model, and how rows are made for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        *,
        max_tokens: int,
        rows: RowSettings | None = None,
        temperature: float = 1.0,
        overlong: PackOverlong = "error",
        cost: CostModel | None = None,
    ) -> None:
        lm_head_of(model)  # refused here rather than in the first step
        self.model, self.mesh, self.temperature = model, mesh, temperature
        self.rows = rows or RowSettings()
        self.max_tokens, self.overlong = max_tokens, overlong
        self.cost = cost or CostModel.from_config(model.config)

    def plan(self, samples: Sequence[Sample], *, keep_groups: bool = False) -> StepPlan:
        """Which sample runs where. A row may hold `max_tokens` for each of its context ranks.

        With `keep_groups` samples of a group are on one row.
        """
        return plan_step(
            [len(sample) for sample in samples],
            groups=[sample.group for sample in samples] if keep_groups else None,
            ranks=self.mesh.data.size,
            max_tokens=self.max_tokens * self.mesh.context.size,
            cost=self.cost,
            overlong=self.overlong,
        )

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[NDArray[np.float32]]:
        """[n] for each sample, on every rank; at the scorer's own temperature, or at another."""
        scores = partial(self._scores, self.temperature if temperature is None else temperature)
        training = self.model.training
        self.model.train(False)  # a model's own dropout would make a noise of the ratio
        starts = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
        found = torch.zeros(int(starts[-1]), device=self.mesh.device)
        with computing(self.model):
            for indices in self.plan(samples).micro_batches[self.mesh.data.rank]:
                batch = make_micro_batch(samples, indices, self.mesh, self.rows)
                row = gather_tokens(inside(self.model, scores, batch), batch.local.context)
                if batch.is_filler or self.mesh.context.rank:
                    continue
                # The head scores exactly 0 where there is no label, so also at the last position of each sample.
                for i, values in zip(indices, batch.packed.unpack(at_tokens(row)), strict=True):
                    found[starts[i] : starts[i + 1]] = values
        self.model.train(training)
        dist.all_reduce(found, group=self.mesh.loss.group)
        host = found.cpu().numpy()
        return [host[start:end] for start, end in pairwise(starts)]

    def _scores(self, temperature: float, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """[T/cp]"""
        return score(
            hidden_states(model, batch.local),
            lm_head_of(model),
            batch.local.labels,
            temperature=temperature,
            num_labels=batch.num_labels,
        ).logprobs
