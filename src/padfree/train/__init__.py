"""Training: SFT and RL share one loop, on any number of processes. The main modules:

run             train: a whole run, from its settings to the exported model
preflight       checks settings, data and model before weights are loaded
run_notes       names unusual facts that are not errors, before the first step
setup           builds loss, models and engine from the settings
trainer         Trainer: the loop over batches
batcher         forms global batches
batch_preparer  adds advantages and log-probabilities to a global batch
engine          one optimizer step
microbatch      builds this rank's packs
scorer          computes log-probabilities, values and rewards without gradients
evaluate        metrics on held-out data
rl              reference and reward models
resume          compares a checkpoint with the run that resumes from it
"""

from padfree.optim.optimizer import make_optimizer
from padfree.sharding.parallelize import parallelize, transformations
from padfree.train.engine import Engine, LossSettings
from padfree.train.finite_checks import NonFiniteError
from padfree.train.run import train
from padfree.train.scorer import Scorer
from padfree.train.step import StepReport
from padfree.train.trainer import RunResult, Trainer

__all__ = [
    "Engine",
    "LossSettings",
    "NonFiniteError",
    "RunResult",
    "Scorer",
    "StepReport",
    "Trainer",
    "make_optimizer",
    "parallelize",
    "train",
    "transformations",
]
