"""Packed training as `padfree check` runs it, and variations of it that must not change the results.

    variation                        what differs
    one sample per pack              every pack has only one sample
    a few packs, samples reversed    a pack has about a third of the tokens, and the order of the samples is reversed
    pad after every pack             packs are padded with random tokens
    shared prefixes                  prefixes that samples share are computed once
    balanced ring, ...               context ranks divide packs, and compute attention, in another way

As in training, `padfree.train.Engine` computes the gradients, and `padfree.train.Scorer` the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from padfree.batch import IGNORE
from padfree.choices import Float8Product, LayoutKind, ModelHead
from padfree.config.loss_settings import DistillSettings, RewardModelSettings
from padfree.cp import gather_tokens, shard
from padfree.distributed import Mesh
from padfree.losses import SFTSettings
from padfree.model.load import load_model
from padfree.model.named_tensors import clean_name
from padfree.model.scalar_head import pad_token_of
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.packing.collate import prefixes_of
from padfree.sample import Sample
from padfree.sharding.parallelize import inside, parallelize, transformations
from padfree.tasks.distill import DistillationMicroBatchLoss
from padfree.tasks.reward import RewardMicroBatchLoss
from padfree.tools.check.compare import Extent, extent
from padfree.tools.check.image_inputs import with_other_images
from padfree.tools.check.model_source import ModelSource
from padfree.tools.check.plain_losses import DPO, KTO, SCALAR, VALUE, CheckedLoss, make_teacher
from padfree.train.critic import ValueMicroBatchLoss
from padfree.train.engine import Engine, LossSettings
from padfree.train.float8_budget import Float8Distance, Float8Layers, measure_distances
from padfree.train.microbatch import MicroBatch, PackSettings
from padfree.train.scorer import ScalarScorer, Scorer
from padfree.train.step import PreparedStep

Logprobs = list[NDArray[np.float32]]

PAD = 7
"""Number of padding tokens per context rank in the check of padding: deliberately not a power of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """One way to arrange the samples in packs. Results must be the same with every variation."""

    name: str
    max_tokens: int  # maximum tokens of a pack per device
    pack_settings: PackSettings = field(default_factory=PackSettings)
    reverse: bool = False
    may_be_refused: bool = False  # whether a model, backend or number of ranks may not support it


def variations(samples: Sequence[Sample], context: int) -> list[Variation]:
    """Return the variations to check: other packs, another order of samples, shared prefixes, and other methods of
    context parallelism.

    `context`: number of ranks that divide each pack among them (context parallelism).
    """
    total = sum(len(sample) for sample in samples)
    found = [
        Variation(name="one sample per pack", max_tokens=1),
        Variation(name="a few packs, samples reversed", max_tokens=-(-total // (3 * context)), reverse=True),
    ]
    if prefixes_of(samples, True).is_shared:
        found.append(
            Variation(
                name="shared prefixes",
                max_tokens=total,
                pack_settings=PackSettings(share_prefixes=True),
                may_be_refused=True,
            )
        )
    if context > 1:
        kinds: tuple[tuple[LayoutKind, str], ...] = (
            ("contiguous", "allgather"),
            ("headtail", "allgather"),
            ("balanced", "ring"),
            ("contiguous", "ulysses"),
        )
        found += [
            Variation(
                name=f"{kind} {method}",
                max_tokens=total,
                pack_settings=PackSettings(layout=kind, method=method),
                may_be_refused=True,
            )
            for kind, method in kinds
        ]
    return found


class PackedPath:
    """Computes log-probabilities, loss and gradients of samples as packed training does, with a training engine.

    Every rank must call each method.
    """

    def __init__(
        self,
        source: ModelSource,
        mesh: Mesh,
        *,
        loss: CheckedLoss = "nll",
        dtype: torch.dtype,
        backend: str = "auto",
        seed: int = 0,
        trust_remote_code: bool = False,
        float8: bool = False,
    ) -> None:
        def load(head: ModelHead, *, frozen: bool = False) -> PreTrainedModel:
            products = get_args(Float8Product) if float8 and not frozen else ()
            steps = transformations(mesh, attention=backend, dtype=dtype, frozen=frozen, float8=products)
            return load_model(
                source.source,
                device=mesh.device,
                shard=lambda model: parallelize(model, steps),
                seed=seed,
                trust_remote_code=trust_remote_code,
                head=head,
                vision=source.vision,
            )

        scalar = loss in SCALAR
        model = load("scalar" if scalar else "tokens")
        model.train(False)  # without dropout, which would differ between runs
        teacher = load("tokens", frozen=True) if loss == "distill" else None
        if teacher is not None:
            make_teacher(teacher)
        self.mesh, self.model, self.checked = mesh, model, loss
        self.scorer = (ScalarScorer if scalar else Scorer)(model, mesh, max_tokens=1, overlong="alone")
        self.engine = _engine(loss, self.scorer, teacher)
        self._float8 = Float8Layers(model)
        self._float8.use(())  # no layer uses float8, except in `float8_distances`

    def lay_out(self, variation: Variation) -> None:
        """Set how all later calls of other methods arrange samples in packs."""
        packer = self.scorer.packer
        packer.max_tokens, packer.pack_settings = variation.max_tokens, variation.pack_settings
        if self.checked == "reward":
            packer.pack_settings = replace(packer.pack_settings, ends=True, pad_token=pad_token_of(self.model))

    def logprobs(self, samples: Sequence[Sample]) -> Logprobs:
        """Return log-probabilities [n] of all tokens of each sample, trained or not, on every rank.

        The log-probability of the first token of a sample is 0.
        """
        return self.scorer.logprobs(_all_scored(samples))

    def loss(self, samples: Sequence[Sample]) -> float:
        """Return the loss of the samples. Its gradients are left in the parameters."""
        return self._loss(self.engine.prepare(samples))

    def _loss(self, prepared: PreparedStep) -> float:
        loss = self.engine.gradients(prepared).loss
        dist.all_reduce(loss, group=self.mesh.loss.group)
        return float(loss)

    def extents(self, reference: Mapping[str, Tensor]) -> dict[str, Extent]:
        """Compare the gradients in the model's parameters with those in `reference`.

        Return the differences by parameter name on rank 0, and {} on other ranks. The gradients in the parameters are
        deleted.
        """
        found: dict[str, Extent] = {}
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            if self.mesh.loss.rank == 0:
                found[clean_name(name)] = extent(gradient, reference.get(clean_name(name)))
        self.engine.optimizer.zero_grad(set_to_none=True)
        return found

    def float8_distances(self, samples: Sequence[Sample]) -> tuple[Float8Distance, ...]:
        """Measure how much float8 changes the gradients of the decoder layers.

        The changes are measured with float8 in all layers, and then with float8 in one layer at a time.
        """
        self._float8.use(self._float8.layers)
        found = measure_distances(self.model, self._float8, lambda: self.loss(samples), group=self.mesh.loss.group)
        self._float8.use(())
        self.engine.optimizer.zero_grad(set_to_none=True)
        return found

    # With a pad after every pack

    def padded_logprobs(self, samples: Sequence[Sample], fill: Callable[[int], Tensor]) -> Logprobs:
        """Append padding tokens to every pack, and return the log-probabilities [n] of the n tokens of each sample.

        `fill(length)` returns the ids of `length` padding tokens.
        """
        starts = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
        found = torch.zeros(int(starts[-1]), device=self.mesh.device)
        scores = partial(self.scorer._scores, self.scorer.temperature)
        with torch.no_grad():
            for batch, indices in self._padded(_all_scored(samples), fill).packs:
                pack = gather_tokens(inside(self.model, scores, batch.local), batch.local.context)
                if batch.is_filler or self.mesh.context.rank:
                    continue
                for index, values in zip(indices, batch.packed.unpack(pack), strict=True):
                    found[starts[index] + 1 : starts[index + 1]] = values[:-1]
        dist.all_reduce(found, group=self.mesh.loss.group)
        host = found.cpu().numpy()
        return [host[start:end] for start, end in pairwise(starts)]

    def padded_loss(self, samples: Sequence[Sample], fill: Callable[[int], Tensor]) -> float:
        """Append padding tokens to every pack, and return the loss of the samples.

        The gradients of the loss are left in the parameters.

        `fill(length)` returns the ids of `length` padding tokens.
        """
        return self._loss(self._padded(samples, fill))

    def _padded(self, samples: Sequence[Sample], fill: Callable[[int], Tensor]) -> PreparedStep:
        prepared = self.engine.prepare(samples)
        return replace(prepared, packs=[(self._with_pad(batch, fill), indices) for batch, indices in prepared.packs])

    def _with_pad(self, batch: MicroBatch, fill: Callable[[int], Tensor]) -> MicroBatch:
        context, settings = self.mesh.context, self.scorer.packer.pack_settings
        packed = batch.packed.padded_to(batch.packed.num_tokens + PAD * context.size)
        real = packed.num_tokens - packed.pad_length
        packed = replace(packed, input_ids=torch.cat([packed.input_ids[:real], fill(packed.num_tokens - real)]))
        local = shard(
            packed.to(self.mesh.device),
            world=context.size,
            rank=context.rank,
            group=context.group if context.size > 1 else None,
            kind=settings.layout,
            method=settings.method,
        )
        local = replace(
            local,
            num_labels=int((local.labels != IGNORE).sum()),
            is_filler=batch.is_filler,
            batch_samples=batch.local.batch_samples,
        )
        return replace(batch, packed=packed, local=local)


def _engine(loss: CheckedLoss, scorer: Scorer, teacher: PreTrainedModel | None) -> Engine:
    """Return a training engine that computes the loss `loss`, e.g. "dpo", with the model that `scorer` holds."""
    optimizer = make_optimizer(scorer.model, OptimizerConfig(lr=0.0))
    if loss == "reward":
        rewards = RewardModelSettings()
        return Engine(scorer, optimizer, LossSettings(loss=rewards), RewardMicroBatchLoss(rewards))
    if loss == "value":
        return Engine(scorer, optimizer, LossSettings(loss=VALUE), ValueMicroBatchLoss(VALUE))
    if teacher is not None:
        settings = DistillSettings()
        return Engine(scorer, optimizer, LossSettings(loss=settings), DistillationMicroBatchLoss(settings, teacher))
    return Engine(scorer, optimizer, LossSettings(loss={"dpo": DPO, "kto": KTO}.get(loss, SFTSettings())))


def _all_scored(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(sample, loss_mask=None) for sample in samples]


def with_other_tokens(samples: Sequence[Sample], vocabulary: int, first: int) -> list[Sample]:
    """Replace all tokens of every second sample, starting with sample `first`. Return all samples.

    The placeholder tokens of images stay, and the images are replaced by others of the same size.
    """
    rng = np.random.default_rng(first)

    def other(sample: Sample) -> Sample:
        tokens = (sample.tokens + rng.integers(1, vocabulary, len(sample))) % vocabulary
        if sample.images:
            positions = np.concatenate([image.positions for image in sample.images])
            placeholder = sample.tokens[positions[0]]
            tokens[tokens == placeholder] = (placeholder + 1) % vocabulary
            tokens[positions] = placeholder
        return with_other_images(replace(sample, tokens=tokens))

    return [other(sample) if index % 2 == first % 2 else sample for index, sample in enumerate(samples)]
