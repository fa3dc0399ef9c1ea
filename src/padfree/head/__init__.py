"""Scores of labels from hidden states: log-probabilities and entropies without stored logits."""

from padfree.head.fused import FusedLoss, TokenLoss, fused_loss
from padfree.head.likeliest import matches
from padfree.head.scores import Scores, score

__all__ = ["FusedLoss", "Scores", "TokenLoss", "fused_loss", "matches", "score"]
