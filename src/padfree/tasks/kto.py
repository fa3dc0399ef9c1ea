"""`padfree kto`: single answers with a label, desirable or not (KTO, https://arxiv.org/abs/2402.01306).

    x       Σ over an answer's tokens of log π − log π_ref; π is the policy, π_ref the reference model
    z₀      max(0, mean of x over mismatched pairs), without gradient: an estimate of KL(π ‖ π_ref)
    loss    desirable_weight · (1 − σ(beta · (x − z₀)))       of a desirable answer; σ is the sigmoid
            undesirable_weight · (1 − σ(beta · (z₀ − x)))     of an undesirable answer

A mismatched pair joins a prompt and the answer of the previous sample in the global batch. Policy and reference score
these pairs before the update, so all micro-batches and ranks use the same z₀.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.config import LossConfig
from padfree.config.loss_settings import KTOSettings
from padfree.cp.ranges import to_device
from padfree.cp.shard import sum_over_context
from padfree.data import SFTDataSettings, TokenizedDataset
from padfree.data.encode import Encoded, Passage, Piece
from padfree.data.fields import Fields
from padfree.data.formats import LABEL_SCHEMA
from padfree.data.prepare import load_rows
from padfree.data.records import RowError, shown, string
from padfree.data.tokenize import PairTokenizer
from padfree.losses import LossOutput, segment_sum, spread
from padfree.sample import Sample
from padfree.tasks.measures import PackMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss, scored_inputs
from padfree.tasks.reading import ReadSettings, TrainingData, of_store
from padfree.tasks.task import Models, Task

# Data


class LabelTokenizer(PairTokenizer):
    """Makes one sample from a row with a prompt, an answer and its label. Only the answer is trained."""

    def _samples(self, row: Mapping[str, Any], fields: Fields) -> Sequence[Passage | Encoded]:
        if self.renders_chat:
            return [self._answered(self.reader.completed(row, fields), fields["response"])]
        prompt, response = self.reader.plain_prompt(row, fields), string(row, fields["response"])
        return [Passage(pieces=(Piece(prompt, False), Piece(response, True)))]

    def _number(self, row: Mapping[str, Any], fields: Fields) -> float:
        value = row.get(fields["label"])
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise RowError(f"{fields['label']!r} is {shown(value)}; expected true or false")
        return float(value)


class LabelledDataset(TokenizedDataset):
    """Dataset of answers with a label, which becomes the sample's `reward`: 1 for desirable, 0 for undesirable."""

    samples_per_row: ClassVar[int | None] = 1

    @cached_property
    def _longest(self) -> float:
        return float(self.lengths.max(initial=0))

    def __getitem__(self, index: SupportsIndex) -> Sample:
        return replace(super().__getitem__(index), reward=self.number(index), terms={"longest": self._longest})


# The KL term


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample per prompt, with the answer of the previous sample. The first prompt gets the last answer."""
    starts = [int(np.argmax(sample.mask)) for sample in samples]  # where the answers begin
    longest = max((int((sample.terms or {}).get("longest", 0)) for sample in samples), default=0)
    found = []
    for i, sample in enumerate(samples):
        pair = _spliced(sample, starts[i], samples[i - 1], starts[i - 1], uid=i)
        found.append(pair.truncated(_outside_images(pair, longest)) if longest else pair)
    return found


def _spliced(asked: Sample, end: int, answered: Sample, start: int, *, uid: int) -> Sample:
    """Join the prompt of one sample and the answer of another one, with their images.

    The prompt is the tokens of the sample `asked` before index `end`. The answer is the tokens of the sample `answered`
    from index `start` on.
    """
    shown = [image for image in asked.images if image.positions[0] < end]
    later = [image for image in answered.images if image.positions[0] >= start]
    return Sample(
        tokens=np.concatenate([asked.tokens[:end], answered.tokens[start:]]),
        loss_mask=np.concatenate([np.zeros(end, np.bool_), answered.mask[start:]]),
        uid=uid,
        images=(*shown, *(replace(image, positions=image.positions + end - start) for image in later)),
        rotary_positions=_spliced_positions(asked, end, answered, start),
    )


def _spliced_positions(asked: Sample, end: int, answered: Sample, start: int) -> NDArray[np.int64] | None:
    """Return the rotary positions [P, n] of a prompt and the answer to another prompt, joined to n tokens (`_spliced`).

    P is the number of dimensions of a position, e.g. 3 (time, height, width). Return None if neither sample has
    `rotary_positions`.
    """
    given = next((one.rotary_positions for one in (asked, answered) if one.rotary_positions is not None), None)
    if given is None:
        return None
    before, after = (
        np.broadcast_to(np.arange(len(one)), (len(given), len(one)))
        if one.rotary_positions is None
        else one.rotary_positions
        for one in (asked, answered)
    )
    # A prompt ends with text, whose tokens have the same position in all dimensions. The answer continues there.
    shift = before[:, end - 1 : end] - after[:, start - 1 : start]
    return np.concatenate([before[:, :end], after[:, start:] + shift], axis=1)


def _outside_images(sample: Sample, length: int) -> int:
    """Return the largest number of tokens, at most `length`, that a cut can keep without dividing an image."""
    divided = (int(image.positions[0]) for image in sample.images if image.positions[0] < length <= image.positions[-1])
    return next(divided, length)


def answer_sums(logprobs: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the log-probability of each of B answers, [B].

    `logprobs`: for each sample an array [n], which is 0 at tokens outside of the answer. Each array is summed.
    """
    return np.array([own.sum(dtype=np.float64) for own in logprobs], dtype=np.float64)


def with_reference_point(
    samples: Sequence[Sample], own: NDArray[np.float64], theirs: NDArray[np.float64]
) -> list[Sample]:
    """Return the samples, each with the reference point z₀ of the KTO loss: an estimate of KL(policy ‖ reference).

    `own`, `theirs` [B]: the log-probabilities that policy and reference give to the answers of mismatched pairs, in
    which each prompt has the answer of another sample.
    """
    point = max(0.0, float(np.mean(own - theirs)))
    return [replace(sample, terms={**(sample.terms or {}), "kl": point}) for sample in samples]


# The loss


def kto_loss(
    logratios: Tensor, labels: Tensor, point: Tensor, settings: KTOSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four tensors [B]: losses, their derivatives with respect to the log-ratios, rewards, and correctness as
    bools.

    `logratios` [B]: log π − log π_ref of each answer. `labels` [B]: 1 for desirable, 0 for undesirable. `point` [B]:
    z₀, an estimate of KL(π ‖ π_ref).
    """
    desirable = labels > 0
    sign = torch.where(desirable, 1.0, -1.0).to(logratios)
    weight = torch.where(desirable, settings.desirable_weight, settings.undesirable_weight).to(logratios)
    margin = sign * settings.beta * (logratios - point)
    losses = weight * torch.sigmoid(-margin)
    slopes = -weight * sign * settings.beta * torch.sigmoid(margin) * torch.sigmoid(-margin)
    return losses, slopes, settings.beta * logratios, margin > 0


class KTOMicroBatchLoss(MicroBatchLoss):
    """The KTO loss of the answers of a pack.

    Under context parallelism, a rank holds only some tokens of an answer. The rank returns its share of the answer's
    loss, and for its own tokens the gradient of the whole loss.
    """

    settings: KTOSettings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        inputs = scored_inputs(model, batch, self.temperature, self.memory)
        logprobs = inputs.need("logprobs", "the KTO loss")
        moved = logprobs - inputs.need("ref_logprobs", "the KTO loss")
        local = segment_sum(moved, inputs.sample_index, inputs.num_samples)
        held = segment_sum(inputs.mask, inputs.sample_index, inputs.num_samples)
        sums = sum_over_context(torch.stack([local.detach(), held], dim=1), batch.context)
        totals, all_held = sums.unbind(1)
        share = held / all_held.clamp(min=1.0)
        labels, point = _known(batch)
        losses, slopes, rewards, right = kto_loss(totals, labels, point, self.settings)
        losses, weight = share * losses, 1.0 / batch.batch_samples
        # The value of `attached` is this rank's share of the losses, but its gradient is that of the whole losses.
        attached = losses + slopes * (local - local.detach())
        by_label = {"desirable": share * labels, "undesirable": share * (1.0 - labels)}
        return LossOutput(
            loss=(weight * attached).sum().to(logprobs.dtype),
            token_losses=spread(weight * losses, inputs.sample_index).to(logprobs.dtype),
            statistics={
                "accuracy": ((share * right).sum(), share.sum()),
                "kl": ((share * point).sum(), share.sum()),
                **{name: ((own * rewards).sum(), own.sum()) for name, own in by_label.items()},
            },
            pair_statistics={
                "count": share,
                "loss": losses,
                "accuracy": share * right,
                "kl": share * point,
                "desirables": by_label["desirable"],
                **{name: own * rewards for name, own in by_label.items()},
            },
        )


def _known(batch: LocalBatch) -> tuple[Tensor, Tensor]:
    """Return two float64 tensors [B]: the label (1 desirable, 0 undesirable) and the reference point z₀ of each sample.

    z₀ estimates KL(policy ‖ reference). The KTO loss compares the log-ratio of an answer with it.
    """
    labels = np.array([info.reward for info in batch.samples], dtype=np.float64)
    point = np.array([(info.terms or {})["kl"] for info in batch.samples], dtype=np.float64)
    return to_device(labels, batch.labels.device), to_device(point, batch.labels.device)


class AnswerMeasure:
    """Measures the loss, the accuracy, the KL divergence and the margin on held-out answers.

    An answer is correct if its log-ratio is above z₀ (desirable) or below z₀ (undesirable). The margin is the mean
    reward of desirable answers minus the mean reward of undesirable answers.
    """

    names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "kl", "desirables", "desirable", "undesirable")
    keeps_groups: ClassVar[bool] = False

    def __init__(self, micro_batch_loss: MicroBatchLoss) -> None:
        self.micro_batch_loss = micro_batch_loss

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> Tensor:
        shares = self.micro_batch_loss(model, batch).pair_statistics
        assert shares is not None
        return torch.stack([shares[name] for name in ("count", *self.names)], 1)

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        found = {name: means[name] for name in ("loss", "accuracy", "kl")}
        part = means["desirables"]
        if 0.0 < part < 1.0:  # otherwise one of the labels is missing
            found["margin"] = means["desirable"] / part - means["undesirable"] / (1.0 - part)
        return found


class KTO(Task):
    loss = KTOMicroBatchLoss

    def read(self, settings: ReadSettings) -> TrainingData:
        classes = LabelledDataset, LabelTokenizer, LABEL_SCHEMA
        text, progress = SFTDataSettings(**settings.text), settings.progress
        return of_store(load_rows(settings.paths, settings.tokenizer, text, *classes, progress=progress))

    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        return AnswerMeasure(micro_batch_loss)

    def prepare(self, samples: list[Sample], models: Models, loss: LossConfig) -> tuple[list[Sample], dict[str, float]]:
        return self.evaluation(samples, models, loss)(), {}

    def waits_for_updates(self, loss: LossConfig, *, asks: bool) -> bool:
        return True

    def evaluation(self, samples: list[Sample], models: Models, loss: LossConfig) -> Callable[[], list[Sample]]:
        assert models.reference is not None
        samples, _ = super().prepare(samples, models, loss)
        others = mismatched(samples)
        theirs = answer_sums(models.reference(others))
        return partial(self._with_present_point, samples, others, theirs, models)

    def _with_present_point(
        self, samples: list[Sample], others: list[Sample], theirs: NDArray[np.float64], models: Models
    ) -> list[Sample]:
        return with_reference_point(samples, answer_sums(models.policy(others)), theirs)


TASK = KTO()
