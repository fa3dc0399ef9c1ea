"""`check_loss`: the losses of pairs, teachers, reward models and critics, packed against one at a time.

    1  reference   `plain_losses`, one pair or sample at a time, float64   rank 0; the others wait
    2  noise       the same in the dtype, in padded pairs                  rank 0; against 1
    3  packed      loss and gradients of every part, by training's path  against 1, in units of 2
    4  layouts     other micro-batches, another order, shared prefixes, other context methods

Whether samples leak into each other, and what a pad does, `check_model` finds on the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.batch import Sample
from padfree.check.compare import TOLERANCES, Gap, extent, gradient_gaps, loss_gap, parts_of
from padfree.check.exact import exact, make_float64, reference_line
from padfree.check.model_source import ModelSource, model_source
from padfree.check.one_at_a_time import Outcome, one_at_a_time
from padfree.check.packed import PackedPath, Variation, variations
from padfree.check.plain_losses import DPO, OF_PAIRS, SCALAR, VALUE, CheckedLoss, in_pairs, plain_loss, prepared
from padfree.check.report import MAIN, CheckReport, CheckRow, Skipped
from padfree.check.run import RANDOM_SAMPLES, TIMEOUT, check_samples, longest_of, shared_report
from padfree.check.samples import LONGEST, random_samples
from padfree.config.choices import ModelHead
from padfree.config.loss_settings import DistillSettings, RewardModelSettings
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.errors import UserError
from padfree.model.load import load_model, local_part, local_region, named_tensors
from padfree.train.distillation import DistillationRowLoss
from padfree.train.engine import Engine, LossSettings
from padfree.train.optimizer import make_optimizer
from padfree.train.parallelize import parallelize, transformations
from padfree.train.scalar import RewardRowLoss, ScalarScorer, ValueRowLoss
from padfree.train.scorer import Scorer

Say = Callable[[str], None]
_Computed = tuple[list[Sample], Outcome]
"""The samples with what the loss needs of them, and what it gives."""


def check_loss(
    source: str | Path | PreTrainedConfig,
    loss: CheckedLoss,
    samples: Sequence[Sample] | int = RANDOM_SAMPLES,
    *,
    origin: str = "given samples",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    context: int = 1,
    layers: int | None = None,
    full: bool = False,
    device: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    on_progress: Say | None = None,
) -> CheckReport:
    """Compare a loss and its gradients with plain HF code. The arguments are those of `check_model`.

    For "dpo" and "reward" neighbouring `samples` are pairs.
    """
    say = on_progress or (lambda _: None)
    with distributed(device=device, timeout=TIMEOUT) as chosen:
        mesh = make_mesh(chosen, context=context, timeout=TIMEOUT)
        dtype = dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)
        with model_source(
            source, layers=layers, full=full, backend=backend, trust_remote_code=trust_remote_code
        ) as found:
            if isinstance(samples, int):
                longest = longest_of(found.config, LONGEST)
                samples = random_samples(found.limits.vocabulary, samples, longest=longest)
                origin = "samples of random tokens"
            check_samples(samples, found)
            samples = in_pairs(samples) if loss in OF_PAIRS else list(samples)
            check = _LossCheck(found, loss, mesh, dtype, backend, seed, trust_remote_code, say)
            rows, skipped = check.run(samples)
        return shared_report(
            found,
            samples,
            mesh,
            dtype=dtype,
            backend=backend,
            samples_from=origin,
            reference=reference_line(
                dtype,
                check.obstacle,
                f"the {loss} loss of one {'pair' if loss in OF_PAIRS else 'sample'} at a time",
                "its own",
            ),
            rows=rows,
            skipped=skipped,
        )


class _LossCheck:
    """The reference, the packed path and its variations, of one loss."""

    def __init__(
        self,
        source: ModelSource,
        loss: CheckedLoss,
        mesh: Mesh,
        dtype: torch.dtype,
        backend: str,
        seed: int,
        trust_remote_code: bool,
        say: Say,
    ) -> None:
        self.source, self.loss, self.mesh, self.dtype, self.say = source, loss, mesh, dtype, say
        self.backend, self.seed, self.code = backend, seed, trust_remote_code
        self.tolerance = TOLERANCES[dtype]
        self.obstacle: str | None = None  # why the reference is not float64

    def run(self, samples: Sequence[Sample]) -> tuple[list[CheckRow], list[Skipped]]:
        expected, noise, parts, samples = self._reference(samples)
        self.say("loading the model as training does")
        path = LossPath(self.source, self.loss, self.mesh, self.dtype, self.backend, self.seed, self.code)
        rows: list[CheckRow] = []
        skipped: list[Skipped] = []
        base = Variation(name=MAIN, max_tokens=sum(len(sample) for sample in samples))
        for variation in (base, *variations(samples, self.mesh.context.size)):
            self.say(f"{self.loss}: {variation.name}")
            path.lay_out(variation)
            try:
                value = path.loss(list(reversed(samples)) if variation.reverse else samples)
            except UserError as error:  # alike on all ranks
                if not variation.may_be_refused:
                    raise
                skipped.append(Skipped(check=variation.name, reason=str(error)))
                continue
            extents = path.extents(expected.gradients)
            if self.mesh.loss.rank == 0:
                rows += self._rows(variation.name, value, expected, noise, gradient_gaps(extents, parts))
        return rows, skipped

    def _rows(
        self, check: str, value: float, expected: Outcome, noise: dict[str, float], gaps: dict[str, Gap]
    ) -> list[CheckRow]:
        gap = loss_gap(value, expected.loss)
        scale = max(abs(expected.loss), 1.0)
        found = CheckRow(
            check=check,
            quantity="loss",
            difference=gap.difference,
            noise=noise["loss"],
            tolerance=self.tolerance.loss * scale,
            where=gap.where,
        )
        gradients = [
            CheckRow(
                check=check,
                quantity="gradients",
                part=part,
                difference=gap.difference,
                noise=noise[part],
                tolerance=self.tolerance.gradients,
                where=gap.where,
            )
            for part, gap in gaps.items()
        ]
        worst = max(gradients, key=lambda row: row.excess)
        return [found, replace(worst, part=None), *gradients] if check == MAIN else [found, worst]

    def _reference(self, samples: Sequence[Sample]) -> tuple[Outcome, dict[str, float], dict[str, str], list[Sample]]:
        teachers: list[PreTrainedModel] = []

        def load(dtype: torch.dtype) -> PreTrainedModel:
            """The model, and a teacher where the loss has one; every rank loads both."""
            options: dict[str, Any] = {"seed": self.seed, "trust_remote_code": self.code, "device": self.mesh.device}
            head: ModelHead = "scalar" if self.loss in SCALAR else "tokens"
            model: PreTrainedModel = load_model(self.source.source, head=head, dtype=dtype, **options).train(False)
            teachers[:] = []
            if self.loss == "distill":
                teachers[:] = [load_model(self.source.source, dtype=dtype, **options).train(False)]
                make_teacher(teachers[0])
            return model

        def compute(model: PreTrainedModel, given: list[Sample] | None = None, **how: bool) -> _Computed:
            if model.dtype == torch.float64:
                for teacher in teachers:
                    make_float64(teacher)
            if given is None:
                own = one_at_a_time(model, samples).logprobs if self.loss == "dpo" else None
                given = prepared(self.loss, samples, own)
            return given, plain_loss(model, given, self.loss, teacher=next(iter(teachers), None), **how)

        self.say(f"reference: the {self.loss} loss of {len(samples)} samples by plain code, in float64")
        found, self.obstacle = exact(samples, self.mesh, self.dtype, lambda: load(torch.float32), compute)
        model = load(self.dtype)
        parts = parts_of(model)
        outcome, noise = Outcome(logprobs=[], loss=0.0, gradients={}), {}
        box: list[list[Sample]] = [[]]
        if self.mesh.loss.rank == 0:
            box[0], outcome = found or compute(model)
            _, other = compute(model, box[0], padded=True)
            extents = {name: extent(other.gradients.get(name), outcome.gradients.get(name)) for name in parts}
            noise = {part: gap.difference for part, gap in gradient_gaps(extents, parts).items()}
            noise["loss"] = loss_gap(other.loss, outcome.loss).difference
        dist.broadcast_object_list(box, src=0, group=self.mesh.loss.group, device=torch.device("cpu"))
        return outcome, noise, parts, box[0]


@torch.no_grad()
def make_teacher(model: PreTrainedModel) -> None:
    """Another model of the same sizes: norms and biases times numbers between a half and one and a half."""
    for number, (_, tensor) in enumerate(sorted(named_tensors(model).items())):
        if tensor.ndim == 1 and tensor.is_floating_point():
            factors = 0.5 + torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number))
            local: Tensor = local_part(tensor)
            local.mul_(factors[local_region(tensor)].to(local))


class LossPath(PackedPath):
    """An engine of this loss as training builds it."""

    def __init__(
        self,
        source: ModelSource,
        loss: CheckedLoss,
        mesh: Mesh,
        dtype: torch.dtype,
        backend: str,
        seed: int,
        trust_remote_code: bool,
    ) -> None:
        self.checked, self._options = loss, {"seed": seed, "trust_remote_code": trust_remote_code}
        self._source, self._steps = source, {"attention": backend, "dtype": dtype}
        super().__init__(
            source,
            mesh,
            dtype=dtype,
            backend=backend,
            seed=seed,
            trust_remote_code=trust_remote_code,
            head="scalar" if loss in SCALAR else "tokens",
        )

    def _scorer(self, model: PreTrainedModel, mesh: Mesh) -> Scorer:
        kind = ScalarScorer if self.checked in SCALAR else Scorer
        return kind(model, mesh, max_tokens=1, overlong="alone")

    def _engine(self, scorer: Scorer) -> Engine:
        optimizer = make_optimizer(scorer.model, lr=0.0)
        if self.checked == "reward":
            rewards = RewardModelSettings()
            return Engine(scorer, optimizer, LossSettings(loss=rewards), RewardRowLoss(rewards))
        if self.checked == "value":
            return Engine(scorer, optimizer, LossSettings(loss=VALUE), ValueRowLoss(VALUE))
        if self.checked == "distill":
            settings = DistillSettings()
            row_loss = DistillationRowLoss(settings, self._teacher(scorer.mesh))
            return Engine(scorer, optimizer, LossSettings(loss=settings), row_loss)
        return Engine(scorer, optimizer, LossSettings(loss=DPO))

    def _teacher(self, mesh: Mesh) -> PreTrainedModel:
        steps = transformations(mesh, frozen=True, **self._steps)  # type: ignore[arg-type]
        teacher = load_model(
            self._source.source,
            device=mesh.device,
            shard=lambda model: parallelize(model, steps),
            **self._options,  # type: ignore[arg-type]
        )
        make_teacher(teacher)
        return teacher

    def lay_out(self, variation: Variation) -> None:
        super().lay_out(variation)
        if self.checked == "reward":
            pad_token = self.model.config.pad_token_id
            self.scorer.rows = replace(self.scorer.rows, ends=True, pad_token=pad_token)
