"""`check_model`: compare packed training, and variations of it, with plain Hugging Face code.

1. Reference: plain code runs one sample at a time, in float64 if possible.
2. Noise: plain code runs padded batches in the dtype of the check. Its difference from the reference is the noise.
3. Packed: packed training may differ from the reference by a tolerance, or by `FACTOR` times the noise.
4. Leak and pad: other tokens in other samples or in the padding must not change a sample's log-probabilities.
5. Layouts: step 3 is repeated with other layouts of the samples in packs.

For losses other than "nll", log-probabilities are not compared, and step 4 is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.choices import ModelHead
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.errors import UserError
from padfree.layers.float8 import check_float8_device
from padfree.model.load import load_model
from padfree.sample import Sample
from padfree.tools.check.check_report import MAIN, CheckReport, CheckResult, Skipped
from padfree.tools.check.compare import (
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
from padfree.tools.check.exact import exact, make_float64, reference_line
from padfree.tools.check.image_inputs import has_images, share_images
from padfree.tools.check.model_source import ModelSource, model_source
from padfree.tools.check.one_at_a_time import CheckOutcome, one_at_a_time
from padfree.tools.check.packed import Logprobs, PackedPath, Variation, variations, with_other_tokens
from padfree.tools.check.plain_losses import (
    OF_PAIRS,
    REFERENCED,
    SCALAR,
    CheckedLoss,
    in_pairs,
    make_teacher,
    plain_loss,
    prepared,
)
from padfree.tools.check.samples import LONGEST, random_samples
from padfree.train.check_data import check_fits
from padfree.train.float8_budget import Float8Distance

TIMEOUT = 3600.0
"""Maximum seconds for which the other ranks wait while rank 0 computes the results of plain Hugging Face code."""

RANDOM_SAMPLES = 8

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Reference:
    """The reference: the results of plain transformers code, with which packed training is compared.

    Only rank 0 has the results. On other ranks, only the samples and the parameter names are set.
    """

    samples: list[Sample]  # the samples with the extra inputs of the loss
    outcome: CheckOutcome
    noise: dict[str, float]  # noise of each quantity; for gradients, of each part of the model
    parts: dict[str, str]  # parameter -> part of the model
    attention: str
    obstacle: str | None  # why the reference is not in float64
    experts: bool


def check_model(
    source: str | Path | PreTrainedConfig,
    samples: Sequence[Sample] | int = RANDOM_SAMPLES,
    *,
    loss: CheckedLoss = "nll",
    origin: str = "given samples",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    context: int = 1,
    layers: int | None = None,
    full: bool = False,
    device: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    float8: bool = False,
    float8_budget: float | None = None,
    vision: bool = False,
    on_progress: Say | None = None,
) -> CheckReport:
    """Compare packed training of a model with plain Hugging Face code that runs one sample at a time.

    - `source`: a folder, Hub id or config.
    - `samples`: samples, or a number of random samples.
    - `origin`: where the samples come from.
    - `layers`: number of layers to check, by default a few. `full` checks all layers.
    - `float8`: also measure how much float8 changes the gradient of each layer.
    - `float8_budget`: the report names the layers that stay in bfloat16 with this `parallel.float8_budget`.
    - `context`: number of context ranks.
    - `vision`: check a vision-language model with samples that have images.

    Under torchrun the call is collective and returns the same report on every rank.
    """
    say = on_progress or (lambda _: None)
    if dtype is not None and dtype not in TOLERANCES:
        raise UserError(
            "dtype", "cannot be checked", f"choose one of {', '.join(str(known) for known in TOLERANCES)}", value=dtype
        )
    with distributed(device=device, timeout=TIMEOUT) as chosen:
        if float8:
            check_float8_device(chosen)
        mesh = make_mesh(chosen, context=context, timeout=TIMEOUT)
        dtype = dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)
        with model_source(
            source, layers=layers, full=full, backend=backend, trust_remote_code=trust_remote_code, vision=vision
        ) as found:
            vocabulary = found.limits.vocabulary
            if isinstance(samples, int):
                samples = random_samples(vocabulary, samples, longest=longest_of(found.config, LONGEST))
                origin = "samples of random tokens"
            check_samples(samples, found)
            samples = in_pairs(samples) if loss in OF_PAIRS else samples
            options: dict[str, Any] = {"seed": seed, "trust_remote_code": trust_remote_code}
            reference = _reference(found, loss, samples, mesh, dtype, options, say)
            say("loading the model as training does")
            path = PackedPath(found, mesh, loss=loss, dtype=dtype, backend=backend, float8=float8, **options)
            check = _Check(path, reference, vocabulary, TOLERANCES[dtype], say)
            rows, skipped = check.run()
            distances = check.float8_distances() if float8 else ()
        name = str(dtype).removeprefix("torch.")
        batches = "one sample at a time" if vision else "in padded pairs"
        experts = reference.experts and loss == "nll" and dtype == torch.bfloat16
        report = CheckReport(
            model=found.name,
            num_layers=found.num_layers,
            total_layers=found.total_layers,
            random_weights=found.random_weights,
            dtype=name,
            device=mesh.device.type,
            backend=backend,
            data_ranks=mesh.data.size,
            context_ranks=mesh.context.size,
            samples=origin,
            lengths=tuple(len(sample) for sample in samples),
            num_labels=sum(sample.num_labels for sample in samples),
            reference=reference_line(dtype, reference.obstacle, _what(loss), reference.attention),
            noise=f"transformers in {name}, {batches} with eager attention",
            rows=tuple(rows),
            skipped=tuple(skipped),
            float8=distances,
            float8_budget=float8_budget,
            remark="in bfloat16, near ties between experts can be decided differently; check in float32 as well"
            if experts
            else "",
        )
        box = [report]  # to be broadcast from rank 0
        dist.broadcast_object_list(box, src=0, group=mesh.loss.group, device=torch.device("cpu"))
        return box[0]


def _what(loss: CheckedLoss) -> str:
    unit = f"one {'pair' if loss in OF_PAIRS else 'sample'} at a time"
    return unit if loss == "nll" else f"the {loss} loss of {unit}"


def longest_of(config: PreTrainedConfig, wanted: int) -> int:
    """Return the maximum length of samples: `wanted` tokens, or the model's number of positions if that is smaller."""
    return min(wanted, int(getattr(config, "max_position_embeddings", None) or wanted))


def check_samples(samples: Sequence[Sample], source: ModelSource) -> None:
    """Raise an error if the model cannot process the samples, or if there is nothing to compare."""
    if len(samples) < 2:
        raise UserError(
            "samples",
            "is too few to check for leaks between samples",
            "give 2 samples or more",
            value=len(samples),
        )
    if not any(sample.num_labels for sample in samples):
        raise UserError(
            "samples", f"none of the {len(samples)} samples has a trained token", "give samples with trained tokens"
        )
    if has_images(samples) != source.vision:
        raise UserError(
            "samples",
            f"none of the {len(samples)} samples has an image" if source.vision else "have images",
            "give samples with images, or set model.vision=false" if source.vision else "set model.vision=true",
        )
    check_fits(
        samples,
        source.limits,
        place=lambda index: index if samples[index].uid is None else samples[index].uid,
        setting="samples",
        vocabulary_cure="use the tokenizer of this model",
        positions_cure=f"truncate them, for example with --max-length {source.limits.positions}",
    )


def _reference(
    source: ModelSource,
    loss: CheckedLoss,
    samples: Sequence[Sample],
    mesh: Mesh,
    dtype: torch.dtype,
    options: dict[str, Any],
    say: Say,
) -> _Reference:
    teachers: list[PreTrainedModel] = []

    def load(kind: torch.dtype) -> PreTrainedModel:
        """Return the model, loaded in the dtype `kind`. If the loss needs a teacher, load it into `teachers`.

        Every rank must call this.
        """

        def loaded(head: ModelHead) -> PreTrainedModel:
            model = load_model(
                source.source, head=head, dtype=kind, device=mesh.device, vision=source.vision, **options
            )
            model.train(False)
            return model

        teachers[:] = [loaded("tokens")] if loss == "distill" else []
        for teacher in teachers:
            make_teacher(teacher)
        return loaded("scalar" if loss in SCALAR else "tokens")

    def compute(
        model: PreTrainedModel, given: list[Sample] | None = None, *, padded: bool = False
    ) -> tuple[list[Sample], CheckOutcome]:
        """Return the samples with the extra inputs of the loss, and the results of plain Hugging Face code for them.

        `given`: samples that already have the extra inputs. `padded`: run padded batches of two samples instead of one
        sample at a time.
        """
        if model.dtype == torch.float64:
            for teacher in teachers:
                make_float64(teacher)
        if given is None:
            own = one_at_a_time(model, samples).logprobs if loss in REFERENCED else None
            given = prepared(loss, samples, own)
        return given, plain_loss(model, given, loss, teacher=next(iter(teachers), None), padded=padded)

    say(f"reference: {len(samples)} samples, {_what(loss)}, in float64")
    found, obstacle = exact(samples, mesh, dtype, lambda: load(torch.float32), compute)
    model = load(dtype)
    parts = parts_of(model)
    attention = str(model.config._attn_implementation)
    experts = any("experts" in name for name, _ in model.named_modules())
    outcome, noise = CheckOutcome(logprobs=[], loss=0.0, gradients={}), {}
    box: list[Any] = [[], True]
    if mesh.loss.rank == 0:
        if found is None:
            say(f"reference: {len(samples)} samples, {_what(loss)}")
        given, outcome = found or compute(model)
        say("noise: measuring the rounding error of transformers, with eager attention")
        _, other = compute(model, given, padded=True)
        extents = {name: extent(other.gradients.get(name), outcome.gradients.get(name)) for name in parts}
        noise = {part: gap.difference for part, gap in gradient_gaps(extents, parts).items()}
        noise["loss"] = loss_gap(other.loss, outcome.loss).difference
        if loss == "nll":
            noise["log-probabilities"] = logprob_gap(other.logprobs, outcome.logprobs, samples).difference
        box = [given, math.isfinite(outcome.loss) and math.isfinite(noise["loss"])]
    dist.broadcast_object_list(box, src=0, group=mesh.loss.group, device=torch.device("cpu"))
    if not box[1]:
        raise UserError(
            "model",
            f"plain transformers code of {source.name} gives a non-finite loss for these samples in {dtype}",
            "check the weights for NaN",
        )
    del model
    teachers.clear()
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    return _Reference(
        samples=box[0],
        outcome=outcome,
        noise=noise,
        parts=parts,
        attention=attention,
        obstacle=obstacle,
        experts=experts,
    )


class _Check:
    """Compares packed training with plain transformers code (the reference).

    The comparison is repeated with other layouts of the samples in packs, and with other tokens around a sample. Every
    rank takes part, but only rank 0 has the results.
    """

    def __init__(
        self, path: PackedPath, reference: _Reference, vocabulary: int, tolerance: Tolerance, say: Say
    ) -> None:
        self.path, self.reference, self.samples, self.say = path, reference, reference.samples, say
        self.vocabulary, self.tolerance = vocabulary, tolerance
        self.first = path.mesh.loss.rank == 0
        self.repeated = 0.0  # the largest difference between two identical runs, which is 0 if runs give the same bits
        self.rows: list[CheckResult] = []
        self.skipped: list[Skipped] = []

    def run(self) -> tuple[list[CheckResult], list[Skipped]]:
        base = Variation(name=MAIN, max_tokens=sum(len(sample) for sample in self.samples))
        self.say("packed: log-probabilities, loss and gradients")
        self.path.lay_out(base)
        logprobs = self._compare(base)
        if logprobs is not None:
            self.repeated = logprob_gap(self.path.logprobs(self.samples), logprobs, self.samples).difference
            self._leak(logprobs)
            self._pad()
        for variation in variations(self.samples, self.path.mesh.context.size):
            self.say(f"layout: {variation.name}")
            self.path.lay_out(variation)
            try:
                self._compare(variation)
            except UserError as error:  # raised on all ranks
                if not variation.may_be_refused:
                    raise
                self.skipped.append(Skipped(check=variation.name, reason=str(error)))
        return self.rows, self.skipped

    def float8_distances(self) -> tuple[Float8Distance, ...]:
        self.say("float8: measuring its effect in all layers, then in one layer at a time")
        self.path.lay_out(Variation(name=MAIN, max_tokens=sum(len(sample) for sample in self.samples)))
        return self.path.float8_distances(self.samples)

    def _compare(self, variation: Variation) -> Logprobs | None:
        """Compare packed training with the reference, for one layout of the samples in packs.

        Return the log-probabilities, or None for losses other than "nll".
        """
        samples = list(reversed(self.samples)) if variation.reverse else self.samples
        logprobs = self.path.logprobs(samples) if self.path.checked == "nll" else None
        if logprobs is not None and variation.reverse:
            logprobs.reverse()
        loss = self.path.loss(samples)
        self._add(variation.name, logprobs, loss)
        return logprobs

    def _add(self, check: str, logprobs: Logprobs | None, loss: float) -> None:
        """Compare results of packed training with the reference, and add the comparisons to the report.

        The gradients are those that the last backward pass has left in the parameters. `check`: the name of the
        comparisons in the report.
        """
        expected, noise, tolerance = self.reference.outcome, self.reference.noise, self.tolerance
        extents = self.path.extents(expected.gradients)
        if not self.first:
            return
        bound = tolerance.loss
        if logprobs is not None:
            gap = logprob_gap(logprobs, expected.logprobs, self.samples)
            self.rows.append(_result(check, "log-probabilities", gap, noise["log-probabilities"], tolerance.logprobs))
        else:
            bound *= max(abs(expected.loss), 1.0)
        self.rows.append(_result(check, "loss", loss_gap(loss, expected.loss), noise["loss"], bound))
        if logprobs is not None:
            gap = normaliser_gap(loss, logprobs, self.samples)
            self.rows.append(_result(check, "normaliser", gap, None, tolerance.normaliser))
        gradients = [
            _result(check, "gradients", gap, noise[part], tolerance.gradients, part)
            for part, gap in gradient_gaps(extents, self.reference.parts).items()
        ]
        worst = max(gradients, key=lambda result: result.excess)
        self.rows.append(replace(worst, part=None) if check == MAIN else worst)
        if check == MAIN:
            self.rows += gradients

    def _leak(self, logprobs: Logprobs) -> None:
        self.say("leak between samples: replacing every second one must not change the others' log-probabilities")
        for changed in (0, 1):
            others = self.path.logprobs(with_other_tokens(self.samples, self.vocabulary, changed))
            kept = slice(1 - changed, None, 2)
            gap = logprob_gap(others[kept], logprobs[kept], self.samples[kept])
            self._add_exact(f"leak from {('even', 'odd')[changed]} to {('odd', 'even')[changed]} samples", gap)

    def _pad(self) -> None:
        self.say("pad: adding random tokens after every pack must not change the results")
        generator = torch.Generator().manual_seed(0)

        def random(length: int) -> Tensor:
            return torch.randint(self.vocabulary, (length,), generator=generator)

        logprobs = self.path.padded_logprobs(self.samples, random)
        zeros = self.path.padded_logprobs(self.samples, lambda length: torch.zeros(length, dtype=torch.int64))
        loss = self.path.padded_loss(self.samples, random)
        self._add("pad after every pack", logprobs, loss)
        self._add_exact("pad of other tokens", logprob_gap(zeros, logprobs, self.samples))

    def _add_exact(self, check: str, gap: Gap) -> None:
        """Add the result of a check that a sample's log-probabilities do not depend on other tokens in its pack.

        `gap`: the largest change of a log-probability after other tokens of the pack were replaced.
        """
        if not self.first:
            return
        # With experts or shared images, matmul shapes and rounding depend on other tokens: use the usual tolerance.
        if self.reference.experts or share_images(self.samples):
            noise, tolerance = self.reference.noise["log-probabilities"], self.tolerance.logprobs
        else:
            noise, tolerance = self.repeated, 0.0
        self.rows.append(_result(check, "log-probabilities", gap, noise, tolerance))


def _result(
    check: str, quantity: str, gap: Gap, noise: float | None, tolerance: float, part: str | None = None
) -> CheckResult:
    return CheckResult(
        check=check,
        quantity=quantity,
        part=part,
        difference=gap.difference,
        noise=noise,
        tolerance=tolerance,
        where=gap.where,
    )
