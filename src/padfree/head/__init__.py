"""Scores of tokens from hidden states: log-probabilities of labels, entropies and divergences, without storing all
logits.
"""

from padfree.head.distillation import DistillationLoss, distillation_loss
from padfree.head.fused import FusedLoss, TokenLoss, fused_loss
from padfree.head.scores import Scores, score
from padfree.head.top1_accuracy import matches

__all__ = [
    "DistillationLoss",
    "FusedLoss",
    "Scores",
    "TokenLoss",
    "distillation_loss",
    "fused_loss",
    "matches",
    "score",
]
