"""Log-probabilities of samples under a model, without gradient: old policy and reference.

    samples of the global batch   3 samples, 9 tokens        every rank has them all
    rows of this rank             score -> [T/cp] -> [T]     as a training step would lay them out
    back                          [9] summed over ranks      every rank has all: later steps divide them differently

Entry j of a sample's array belongs to its token j; it is 0 where token j is not scored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import Sample, at_tokens
from padfree.config.choices import PackOverlong
from padfree.cp.ranges import to_device
from padfree.cp.shard import gather_tokens
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.head import score
from padfree.model import hidden_states, lm_head_of
from padfree.model.sharing import sharing_obstacle
from padfree.packing import CostModel, PrefixTree, StepPlan, plan_shared_step, plan_step
from padfree.packing.collate import prefixes_of
from padfree.train.finite import check_scores
from padfree.train.masters import computing
from padfree.train.microbatch import MicroBatch, RowSettings, make_micro_batch
from padfree.train.parallelize import inside
from padfree.warning import PadfreeWarning

RowScores = Callable[[PreTrainedModel, MicroBatch], Tensor]
"""[T/cp] numbers of this rank's tokens, exactly 0 where there is no label; or [e] of its entries."""


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
        setting: str = "model.path",
    ) -> None:
        """`setting`: what names the model, for messages."""
        self.setting = setting
        self._check_head(model)  # refused here rather than in the first step
        self.model, self.mesh, self.temperature = model, mesh, temperature
        self.rows = rows or RowSettings()
        self.max_tokens, self.overlong = max_tokens, overlong
        self.cost = cost or CostModel.from_config(model.config)
        self.unshared_reason, self._said_unshared = sharing_obstacle(model), False
        self._check_sharing()

    def _check_head(self, model: PreTrainedModel) -> None:
        lm_head_of(model)

    def plan(self, samples: Sequence[Sample], *, keep_groups: bool = False) -> StepPlan:
        """Which sample runs where. A row may hold `max_tokens` for each of its context ranks.

        With `keep_groups` samples of a group are on one row.
        """
        return plan_samples(
            samples,
            self._prefixes(samples),
            keep_groups=keep_groups,
            ranks=self.mesh.data.size,
            max_tokens=self.max_tokens * self.mesh.context.size,
            cost=self.cost,
            overlong=self.overlong,
            contexts=tuple(self.mesh.contexts) or (1,),
        )

    def _check_sharing(self) -> None:
        if self.rows.share_prefixes is True and self.unshared_reason is not None:
            raise UserError(
                "batch.share_prefixes", f"True, but {self.unshared_reason}", "set batch.share_prefixes=false"
            )

    def _prefixes(self, samples: Sequence[Sample]) -> PrefixTree | None:
        """What the samples of a step share; None where nothing is to be shared. A model that cannot says so once."""
        self._check_sharing()
        if self.rows.share_prefixes is False or not len(samples):
            return None
        if self.unshared_reason is None:
            return prefixes_of(samples, self.rows.share_prefixes, self.cost)
        if not self._said_unshared and prefixes_of(samples, self.rows.share_prefixes, self.cost).is_shared:
            self._said_unshared = True
            if self.mesh.loss.rank == 0:
                message = f"batch.share_prefixes: samples share prefixes, but each is computed: {self.unshared_reason}"
                warnings.warn(message, PadfreeWarning, stacklevel=2)
        return None

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[NDArray[np.float32]]:
        """[n] for each sample, on every rank; at the scorer's own temperature, or at another."""
        scores = partial(self._scores, self.temperature if temperature is None else temperature)
        return self._of_tokens(samples, scores, "log-probability")

    def _of_tokens(self, samples: Sequence[Sample], scores: RowScores, what: str) -> list[NDArray[np.float32]]:
        """[n] for each sample, on every rank, of what `scores` gives for the entries of a row; `what` they are."""
        training = self.model.training
        self.model.train(False)  # a model's own dropout would make a noise of the ratio
        starts = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
        found = torch.zeros(int(starts[-1]), device=self.mesh.device)
        with computing(self.model):
            plan = self.plan(samples)
            for indices, width in plan.rows_of(self.mesh.data.rank):
                batch = make_micro_batch(samples, indices, self.mesh, self.rows, prefixes=plan.prefixes, width=width)
                if batch.local.entries is not None:
                    # Every context rank has entries of its own, and the sum over ranks puts them together.
                    tokens = to_device(scored_tokens(batch, starts, indices), self.mesh.device)
                    found[tokens] = inside(self.model, scores, batch).float()
                    continue
                row = gather_tokens(inside(self.model, scores, batch), batch.local.context)
                if batch.is_filler or batch.local.context.rank:
                    continue
                # The head scores exactly 0 where there is no label, so also at the last position of each sample.
                for i, values in zip(indices, batch.packed.unpack(at_tokens(row)), strict=True):
                    found[starts[i] : starts[i + 1]] = values
        self.model.train(training)
        dist.all_reduce(found, group=self.mesh.loss.group)
        host = found.cpu().numpy()
        found_scores = [host[start:end] for start, end in pairwise(starts)]
        check_scores(found_scores, samples, setting=self.setting, what=what)
        return found_scores

    def _scores(self, temperature: float, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """[T/cp]"""
        return score(
            hidden_states(model, batch.local),
            lm_head_of(model),
            batch.local.labels,
            temperature=temperature,
            num_labels=batch.num_labels,
        ).logprobs


def plan_samples(
    samples: Sequence[Sample], prefixes: PrefixTree | None, *, keep_groups: bool = False, **options: Any
) -> StepPlan:
    """The plan of one step over these samples, which share `prefixes`; `options` as for `plan_step`."""
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    plan = plan_step if prefixes is None else partial(plan_shared_step, prefixes)
    return plan(lengths, groups=[sample.group for sample in samples] if keep_groups else None, **options)


def scored_tokens(batch: MicroBatch, starts: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """[e] the tokens that this rank's entries predict, in all samples laid end to end; `starts` is where each begins.

    `indices` are the samples of the row.
    """
    entries, local = batch.packed.entries, batch.local.entries
    assert entries is not None
    assert local is not None
    lengths = np.array(batch.packed.lengths, dtype=np.int64)
    shift = starts[indices] - (np.cumsum(lengths) - lengths)  # from the samples of the row to all samples
    tokens = entries.tokens[local.numbers]
    return tokens + shift[np.searchsorted(np.cumsum(lengths), tokens, side="right")]
