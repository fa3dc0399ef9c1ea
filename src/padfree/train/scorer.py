"""Compute log-probabilities, critic values and rewards of samples, under `torch.no_grad`.

Samples are packed as in a training step. Every rank gets the results for all samples of the global batch, because a
later step may assign a sample to another rank.

A sample of n tokens gets an array [n] of log-probabilities or values. Entry j belongs to token j, and is 0 if token j
is not in the loss. The value of a token is the reward that the critic expects before it has seen this token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import LocalBatch, at_tokens
from padfree.choices import PackOverlong
from padfree.cp.ranges import to_device
from padfree.cp.shard import gather_tokens
from padfree.distributed import Mesh
from padfree.head import score
from padfree.losses import segment_sum
from padfree.model import hidden_states, lm_head_of
from padfree.model.scalar_head import pad_token_of, scalar_head_of
from padfree.model.sharing import sharing_obstacle
from padfree.model.vision.tower_cost import TowerCost, tower_cost
from padfree.optim.master_weights import compute_copies
from padfree.packing import CostModel
from padfree.sample import Sample
from padfree.sharding.parallelize import inside
from padfree.tasks.reward import pack_scores
from padfree.train.finite_checks import check_scores
from padfree.train.microbatch import MicroBatch, Packer, PackSettings


def _image_cost(model: PreTrainedModel, cost: CostModel | None) -> TowerCost | None:
    """Return the cost of an image, in the unit of the cost model `cost`; None if the model reads no images.

    An image costs as much as the tokens that take the same number of FLOPs. If `cost` is None, the unit is a FLOP.
    """
    flops = tower_cost(model)
    if flops is None or cost is None:
        return flops
    unit = cost.linear / CostModel.from_config(model.config).linear
    return TowerCost(linear=unit * flops.linear, quadratic=unit * flops.quadratic)


PackScores = Callable[[PreTrainedModel, LocalBatch], Tensor]
"""Computes one score, e.g. a log-probability, for each of this rank's positions of a pack (one micro-batch).

The score is 0 at a position without a label. If samples share prefixes, a position can have several labels. The result
then has one score per label.
"""


class Scorer:
    """Packs samples, and computes their log-probabilities with a parallelized model."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        *,
        max_tokens: int,
        pack_settings: PackSettings | None = None,
        temperature: float = 1.0,
        overlong: PackOverlong = "error",
        cost: CostModel | None = None,
        setting: str = "model.path",
    ) -> None:
        """`setting`: the setting that names the model, for error messages. Other arguments: see `Packer`."""
        self.setting = setting
        self._check_head(model)  # raise an error now rather than in the first step
        self.model, self.mesh, self.temperature = model, mesh, temperature
        self.packer = Packer(
            mesh,
            max_tokens=max_tokens,
            pack_settings=pack_settings or PackSettings(),
            overlong=overlong,
            cost=cost or CostModel.from_config(model.config),
            unshared_reason=sharing_obstacle(model),
            image_cost=_image_cost(model, cost),
        )

    def _check_head(self, model: PreTrainedModel) -> None:
        lm_head_of(model)

    @torch.no_grad()
    def logprobs(
        self, samples: Sequence[Sample], temperature: float | None = None, *, replay: bool = True
    ) -> list[NDArray[np.float32]]:
        """Return log-probabilities on every rank: one array [n] per sample of n tokens.

        `temperature`, if given, replaces the constructor's. With `replay=False`, routers choose the experts, even if
        the samples record the experts that the sampler used.
        """
        scores = partial(self._scores, self.temperature if temperature is None else temperature)
        return self._score_tokens(samples, scores, "log-probability", replay=replay)

    def _score_tokens(
        self, samples: Sequence[Sample], scores: PackScores, what: str, *, replay: bool = True
    ) -> list[NDArray[np.float32]]:
        """Call the function `scores` on each pack. Return one array [n] for each sample of n tokens, on every rank.

        `what`: the kind of score, such as "log-probability", for error messages.
        """
        settings = self.packer.pack_settings if replay else replace(self.packer.pack_settings, routes=False)
        training = self.model.training
        self.model.train(False)  # dropout would add noise to the probability ratio
        starts = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
        found = torch.zeros(int(starts[-1]), device=self.mesh.device)
        with compute_copies(self.model):
            for batch, indices in self.packer.packs(samples, self.packer.plan(samples), settings):
                if batch.local.entries is not None:
                    # This context rank computes only some of the scores. The all-reduce adds those of the other ranks.
                    tokens = to_device(scored_tokens(batch, starts, indices), self.mesh.device)
                    found[tokens] = inside(self.model, scores, batch.local).float()
                    continue
                pack_scores = gather_tokens(inside(self.model, scores, batch.local), batch.local.context)
                if batch.is_filler or batch.local.context.rank:
                    continue
                # The head gives exactly 0 at positions without a label, e.g. at the last position of each sample.
                for i, values in zip(indices, batch.packed.unpack(at_tokens(pack_scores)), strict=True):
                    found[starts[i] : starts[i + 1]] = values
        self.model.train(training)
        dist.all_reduce(found, group=self.mesh.loss.group)
        host = found.cpu().numpy()
        found_scores = [host[start:end] for start, end in pairwise(starts)]
        check_scores(found_scores, samples, setting=self.setting, what=what)
        return found_scores

    def _scores(self, temperature: float, model: PreTrainedModel, batch: LocalBatch) -> Tensor:
        """Return the log-probabilities [T/cp] of the labels on this context rank of a pack (one micro-batch)."""
        return score(
            hidden_states(model, batch),
            lm_head_of(model),
            batch.labels,
            temperature=temperature,
            num_labels=batch.num_labels,
            kept=batch.kept,
        ).logprobs


class ScalarScorer(Scorer):
    """Computes values or rewards of samples with a parallelized model that has a scalar head."""

    def _check_head(self, model: PreTrainedModel) -> None:
        scalar_head_of(model)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return critic values on every rank: one array [n] per sample of n tokens, 0 for tokens not in the loss."""
        return self._score_tokens(samples, pack_scores, "value")

    @torch.no_grad()
    def rewards(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        """Return the reward of each of B samples, [B], on every rank: the score at the sample's last token."""
        training = self.model.training
        self.model.train(False)
        found = torch.zeros(len(samples), dtype=torch.float64, device=self.mesh.device)
        pack_settings = replace(self.packer.pack_settings, ends=True, pad_token=pad_token_of(self.model))
        with compute_copies(self.model):
            for batch, indices in self.packer.packs(samples, self.packer.plan(samples), pack_settings):
                scores = inside(self.model, pack_scores, batch.local)
                if not batch.is_filler:
                    sums = segment_sum(scores, batch.local.sample_index, batch.local.num_samples)
                    found[torch.from_numpy(indices).to(self.mesh.device)] = sums
        self.model.train(training)
        dist.all_reduce(found, group=self.mesh.loss.group)
        ends: NDArray[np.float32] = found.float().cpu().numpy()
        check_scores([np.asarray(reward) for reward in ends], samples, setting=self.setting, what="reward")
        return ends


def scored_tokens(batch: MicroBatch, starts: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices [e] of the tokens that this rank scores in a pack whose samples share prefixes.

    The indices refer to the concatenated samples of the global batch. `starts`: the index of each sample's first token.
    `indices`: the samples of the pack.
    """
    entries, local = batch.packed.entries, batch.local.entries
    assert entries is not None
    assert local is not None
    lengths = np.array(batch.packed.lengths, dtype=np.int64)
    shift = starts[indices] - (np.cumsum(lengths) - lengths)  # from token indices in the pack to those in all samples
    tokens = entries.tokens[local.numbers]
    return tokens + shift[np.searchsorted(np.cumsum(lengths), tokens, side="right")]
