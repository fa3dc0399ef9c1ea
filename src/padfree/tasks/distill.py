"""`padfree distill`: train the student towards the distributions of a teacher, on texts or on the student's responses.

Both models get the same pack. The loss computes the divergence of each prediction in chunks, from the hidden states and
the heads of both models. The FSDP2 root units hold the heads, so these units are gathered while the loss is computed.

The loss also computes the gradient of the student's hidden states. Backward therefore does not need the teacher.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from padfree.batch import IGNORE, LocalBatch
from padfree.config.loss_settings import DistillSettings
from padfree.head import DistillationLoss, distillation_loss
from padfree.losses import LossOutput
from padfree.model import hidden_states, lm_head_of
from padfree.optim.master_weights import compute_copies
from padfree.sharding.parallelize import inside
from padfree.tasks import rl, sft
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.tasks.reading import ReadSettings, TrainingData


class DistillationMicroBatchLoss(MicroBatchLoss):
    """The loss of a pack: the divergence between student and teacher at each prediction, times its token weight."""

    settings: DistillSettings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        hidden, head, settings = hidden_states(model, batch), lm_head_of(model), self.settings

        def compare(teacher: PreTrainedModel) -> DistillationLoss:
            taught = hidden_states(teacher, batch)
            with torch.enable_grad():
                return distillation_loss(
                    hidden,
                    head,
                    taught,
                    lm_head_of(teacher),
                    batch.labels,
                    divergence=settings.divergence,
                    beta=settings.beta,
                    top_k=settings.top_k,
                    weights=batch.weights,
                    temperature=self.temperature,
                    num_labels=batch.num_labels,
                    memory=self.memory,
                )

        assert self.teacher is not None
        with torch.no_grad(), compute_copies(self.teacher):
            found = inside(self.teacher, compare)
        count = (batch.labels != IGNORE).sum()
        statistics = {
            "divergence": found.divergences,
            "cross_entropy": -found.logprobs,
            "teacher_cross_entropy": -found.teacher_logprobs,
        }
        return LossOutput(
            loss=found.loss,
            token_losses=batch.weights * found.divergences,
            statistics={name: (values.sum(dtype=torch.float64), count) for name, values in statistics.items()},
        )


class Distill(sft.SFT):
    """The task of `padfree distill`. It reads the same data as SFT, or, with `[rollout]`, prompts that the student
    answers.
    """

    loss = DistillationMicroBatchLoss

    def read(self, settings: ReadSettings) -> TrainingData:
        return super().read(settings) if settings.rollout.source is None else rl.TASK.read(settings)


TASK = Distill()
