"""`check_model`: the reference, the noise, the packed path, and every way to vary it.

    1  reference     plain HF code, one sample at a time, in float64            rank 0; the others wait
    2  noise         plain HF code in the dtype, padded pairs, eager attention  rank 0; against 1
    3  packed        log-probabilities, loss, gradients of every part           against 1, in units of 2
    4  leak          other tokens in every second sample                        the others' log-probabilities, against 3
    5  pad           a tail of random tokens behind every row                   against 1; another tail against that one
    6  layouts       other micro-batches, another order, other context methods  against 1

Models are in evaluation mode, without dropout. The reference runs as a whole on one device. Without the memory for
float64, or where a model does not run in it, the reference is in the dtype that is checked, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.batch import Sample
from padfree.check.compare import (
    TOLERANCES,
    Gap,
    Tolerance,
    extent,
    gradient_gaps,
    logprob_gap,
    loss_gap,
    normaliser_gap,
    parts_of,
)
from padfree.check.exact import exact, reference_line
from padfree.check.model_source import ModelSource, model_source
from padfree.check.one_at_a_time import Outcome, one_at_a_time, padded_pairs
from padfree.check.packed import Logprobs, PackedPath, Variation, variations, with_other_tokens
from padfree.check.report import MAIN, CheckReport, CheckRow, Skipped
from padfree.check.samples import LONGEST, random_samples
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.errors import UserError
from padfree.model.load import load_model
from padfree.train.limits import check_fits

TIMEOUT = 3600.0
"""Seconds that processes wait for the reference."""

RANDOM_SAMPLES = 8

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Reference:
    """What rank 0 compares with; the other ranks have the names only."""

    outcome: Outcome
    noise: dict[str, float]  # by quantity, gradients by part
    parts: dict[str, str]  # of each parameter
    attention: str
    obstacle: str | None  # why it is not float64
    experts: bool


def check_model(
    source: str | Path | PreTrainedConfig,
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
    """Compare packed training of a model with plain HF code, one sample at a time.

    `source` is what `load_model` takes. A number of `samples` means random ones; `origin` says in the report where
    given ones are from. `dtype` is float32 or bfloat16 (None: float32 on a CPU, bfloat16 on a GPU). Of a deep model the
    first `layers` layers are checked (None: a few), or all (`full`). Under torchrun the processes are data x `context`
    ranks, every one calls this alike, and every one returns the same report.
    """
    say = on_progress or (lambda _: None)
    if dtype is not None and dtype not in TOLERANCES:
        raise UserError("dtype", "", f"choose one of {', '.join(str(known) for known in TOLERANCES)}", value=dtype)
    with distributed(device=device, timeout=TIMEOUT) as chosen:
        mesh = make_mesh(chosen, context=context, timeout=TIMEOUT)
        dtype = dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)
        with model_source(
            source, layers=layers, full=full, backend=backend, trust_remote_code=trust_remote_code
        ) as found:
            vocabulary = found.limits.vocabulary
            if isinstance(samples, int):
                samples = random_samples(vocabulary, samples, longest=longest_of(found.config, LONGEST))
                origin = "samples of random tokens"
            check_samples(samples, found)
            reference = _reference(found, samples, mesh, dtype, seed, trust_remote_code, say)
            say("loading the model as training does")
            path = PackedPath(found, mesh, dtype=dtype, backend=backend, seed=seed, trust_remote_code=trust_remote_code)
            rows, skipped = _Check(path, reference, samples, vocabulary, TOLERANCES[dtype], say).run()
        return shared_report(
            found,
            samples,
            mesh,
            dtype=dtype,
            backend=backend,
            samples_from=origin,
            reference=reference_line(dtype, reference.obstacle, "one sample at a time", reference.attention),
            rows=rows,
            skipped=skipped,
            remark="experts near a tie are chosen differently in bfloat16; check it in float32 as well"
            if reference.experts and dtype == torch.bfloat16
            else "",
        )


def longest_of(config: PreTrainedConfig, wanted: int) -> int:
    """`wanted` tokens, or as many as the model has positions."""
    return min(wanted, int(getattr(config, "max_position_embeddings", None) or wanted))


def check_samples(samples: Sequence[Sample], source: ModelSource) -> None:
    """Refuse what the model cannot take, or what would make the comparison empty."""
    if len(samples) < 2:
        raise UserError("samples", "", "give 2 or more, one of which must not see the other", value=len(samples))
    if not any(sample.num_labels for sample in samples):
        raise UserError("samples", f"none of the {len(samples)} has a trained token", "give some that do")
    check_fits(
        samples,
        source.limits,
        place=lambda index: index if samples[index].uid is None else samples[index].uid,
        setting="samples",
        vocabulary_cure="use the tokenizer of this model",
        positions_cure=f"cut them, as in --max-length {source.limits.positions}",
    )


def shared_report(
    source: ModelSource,
    samples: Sequence[Sample],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    backend: str,
    samples_from: str,
    reference: str,
    rows: Sequence[CheckRow],
    skipped: Sequence[Skipped],
    remark: str = "",
) -> CheckReport:
    """What was found on rank 0, on every rank."""
    report = CheckReport(
        model=source.name,
        num_layers=source.num_layers,
        total_layers=source.total_layers,
        random_weights=source.random_weights,
        dtype=str(dtype).removeprefix("torch."),
        device=mesh.device.type,
        backend=backend,
        data_ranks=mesh.data.size,
        context_ranks=mesh.context.size,
        samples=samples_from,
        lengths=tuple(len(sample) for sample in samples),
        num_labels=sum(sample.num_labels for sample in samples),
        reference=reference,
        noise=f"transformers in {str(dtype).removeprefix('torch.')}, in padded pairs with eager attention",
        rows=tuple(rows),
        skipped=tuple(skipped),
        remark=remark,
    )
    box = [report]
    dist.broadcast_object_list(box, src=0, group=mesh.loss.group, device=torch.device("cpu"))
    return box[0]


def _reference(
    source: ModelSource,
    samples: Sequence[Sample],
    mesh: Mesh,
    dtype: torch.dtype,
    seed: int,
    trust_remote_code: bool,
    say: Say,
) -> _Reference:
    def load(kind: torch.dtype) -> PreTrainedModel:
        model = load_model(
            source.source, dtype=kind, device=mesh.device, seed=seed, trust_remote_code=trust_remote_code
        )
        model.train(False)
        return model

    say(f"reference: {len(samples)} samples, one at a time, in float64")
    exact_outcome, obstacle = exact(
        samples, mesh, dtype, lambda: load(torch.float32), lambda model: one_at_a_time(model, samples)
    )
    model = load(dtype)
    parts = parts_of(model)
    attention = str(model.config._attn_implementation)
    experts = any("experts" in name for name, _ in model.named_modules())
    outcome, noise = Outcome(logprobs=[], loss=0.0, gradients={}), {}
    if mesh.loss.rank == 0:
        if exact_outcome is None:
            say(f"reference: {len(samples)} samples, one at a time")
        outcome = exact_outcome or one_at_a_time(model, samples)
        say("noise: the same in padded pairs")
        other = padded_pairs(model, samples)
        extents = {name: extent(other.gradients.get(name), outcome.gradients.get(name)) for name in parts}
        noise = {part: gap.difference for part, gap in gradient_gaps(extents, parts).items()}
        noise["log-probabilities"] = logprob_gap(other.logprobs, outcome.logprobs, samples).difference
        noise["loss"] = loss_gap(other.loss, outcome.loss).difference
    finite = [math.isfinite(outcome.loss) and math.isfinite(noise.get("loss", 0.0))]
    dist.broadcast_object_list(finite, src=0, group=mesh.loss.group, device=torch.device("cpu"))
    if not finite[0]:
        raise UserError(
            "model", f"{source.name} itself gives no finite loss for these samples in {dtype}", "look at the weights"
        )
    del model
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    return _Reference(
        outcome=outcome, noise=noise, parts=parts, attention=attention, obstacle=obstacle, experts=experts
    )


class _Check:
    """Runs the packed path in all its variations. Every rank runs the same; what rank 0 finds counts."""

    def __init__(
        self,
        path: PackedPath,
        reference: _Reference,
        samples: Sequence[Sample],
        vocabulary: int,
        tolerance: Tolerance,
        say: Say,
    ) -> None:
        self.path, self.reference, self.samples, self.say = path, reference, samples, say
        self.vocabulary, self.tolerance = vocabulary, tolerance
        self.first = path.mesh.loss.rank == 0
        self.repeated = 0.0  # what running the same again changes
        self.rows: list[CheckRow] = []
        self.skipped: list[Skipped] = []

    def run(self) -> tuple[list[CheckRow], list[Skipped]]:
        base = Variation(name=MAIN, max_tokens=sum(len(sample) for sample in self.samples))
        self.say("packed: log-probabilities, loss and gradients")
        self.path.lay_out(base)
        logprobs = self._compare(base)
        self.repeated = logprob_gap(self.path.logprobs(self.samples), logprobs, self.samples).difference
        self._leak(logprobs)
        self._pad()
        for variation in variations(self.samples, self.path.mesh.context.size):
            self.say(f"layout: {variation.name}")
            self.path.lay_out(variation)
            try:
                self._compare(variation)
            except UserError as error:  # alike on all ranks
                if not variation.may_be_refused:
                    raise
                self.skipped.append(Skipped(check=variation.name, reason=str(error)))
        return self.rows, self.skipped

    def _compare(self, variation: Variation) -> Logprobs:
        """All three quantities against the reference."""
        samples = list(reversed(self.samples)) if variation.reverse else self.samples
        logprobs = self.path.logprobs(samples)
        if variation.reverse:
            logprobs.reverse()
        loss = self.path.loss(samples)
        self._add(variation.name, logprobs, loss)
        return logprobs

    def _add(self, check: str, logprobs: Logprobs, loss: float) -> None:
        """Rows for these and for the gradients that are in the parameters."""
        expected, noise, tolerance = self.reference.outcome, self.reference.noise, self.tolerance
        extents = self.path.extents(expected.gradients)
        if not self.first:
            return
        gap = logprob_gap(logprobs, expected.logprobs, self.samples)
        self.rows.append(_row(check, "log-probabilities", gap, noise["log-probabilities"], tolerance.logprobs))
        gap = loss_gap(loss, expected.loss)
        self.rows.append(_row(check, "loss", gap, noise["loss"], tolerance.loss))
        gap = normaliser_gap(loss, logprobs, self.samples)
        self.rows.append(_row(check, "normaliser", gap, None, tolerance.normaliser))
        gradients = [
            _row(check, "gradients", gap, noise[part], tolerance.gradients, part)
            for part, gap in gradient_gaps(extents, self.reference.parts).items()
        ]
        worst = max(gradients, key=lambda row: row.excess)
        self.rows.append(replace(worst, part=None) if check == MAIN else worst)
        if check == MAIN:
            self.rows += gradients

    def _leak(self, logprobs: Logprobs) -> None:
        self.say("leak: other tokens in every second sample")
        for changed in (0, 1):
            others = self.path.logprobs(with_other_tokens(self.samples, self.vocabulary, changed))
            kept = slice(1 - changed, None, 2)
            gap = logprob_gap(others[kept], logprobs[kept], self.samples[kept])
            self._add_exact(f"leak from {('even', 'odd')[changed]} to {('odd', 'even')[changed]} samples", gap)

    def _pad(self) -> None:
        self.say("pad: a tail of random tokens behind every row")
        generator = torch.Generator().manual_seed(0)

        def random(length: int) -> Tensor:
            return torch.randint(self.vocabulary, (length,), generator=generator)

        logprobs = self.path.padded_logprobs(self.samples, random)
        zeros = self.path.padded_logprobs(self.samples, lambda length: torch.zeros(length, dtype=torch.int64))
        loss = self.path.padded_loss(self.samples, random)
        self._add("pad behind every row", logprobs, loss)
        self._add_exact("pad of other tokens", logprob_gap(zeros, logprobs, self.samples))

    def _add_exact(self, check: str, gap: Gap) -> None:
        """A row whose difference must be exactly 0 where repeating a run gives the same bits.

        No row of a matmul depends on another, but the shapes of the experts' matmuls depend on all tokens.
        """
        if not self.first:
            return
        if self.reference.experts:
            noise, tolerance = self.reference.noise["log-probabilities"], self.tolerance.logprobs
        else:
            noise, tolerance = self.repeated, 0.0
        self.rows.append(_row(check, "log-probabilities", gap, noise, tolerance))


def _row(
    check: str, quantity: str, gap: Gap, noise: float | None, tolerance: float, part: str | None = None
) -> CheckRow:
    return CheckRow(
        check=check,
        quantity=quantity,
        part=part,
        difference=gap.difference,
        noise=noise,
        tolerance=tolerance,
        where=gap.where,
    )
