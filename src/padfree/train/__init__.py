"""Training: SFT and RL share one loop, on any number of processes.

The modules of a training step, in the order in which a sample passes through them:

trainer         Trainer: the loop over batches, updates, metrics, evaluations and checkpoints
batcher         forms global batches of whole data rows (SFT) or of whole groups of rollouts of one prompt (RL)
batch_preparer  adds advantages and log-probabilities to the samples of a global batch
global_batch    the samples of a batch, divided into updates; a checkpoint between two of these updates stores both
engine          one optimizer step: divides the samples into packs, computes gradients, updates the weights
microbatch      builds this rank's packs (the micro-batches: samples laid end to end, without padding between them)
router_balance  lets the experts of a mixture-of-experts model receive about equally many tokens
step            the states of a step: prepared, pending, reported
step_pipeline   finishes steps, and writes their metrics

Models and measurements:

scorer          scores without gradients: log-probabilities, values, rewards
critic          PPO's value model, its loss and its advantages
evaluate        metrics on held-out data
rl              the reference model, reward models, and the log of sampled responses
finite_checks   errors for losses, metrics, scores and weights that are NaN or infinite
float8_budget   chooses the layers that stay in bfloat16 when the others multiply in float8
batch_times     seconds of each phase of a batch
rank_imbalance_timer    forward seconds of each rank's layers, which show a slow rank

The start and the end of a run:

run             train: a whole run, from its settings to the exported model
preflight       checks a run's settings and data, and refuses the run before anything is written or loaded
check_data      refuses data that a run cannot train on
vocabulary      checks that all models of a run use the same token ids
training_data   loads the tokenizer and the samples, and prepares the reading of images
shared_turns    counts the tokens that the samples of one data row share
resolve_auto    the values that `auto` settings take on this device
disk            checks whether the disk can hold the checkpoint and the model that a run writes
setup           builds loss, models and engine from the settings
precomputed     log-probabilities of the reference, computed once
start_run       opens the run's files, restores its checkpoint, and creates its trainer
resume          settings that may change between a checkpoint and the run that resumes from it
finished        whether an earlier start has finished the run, or has ended it without a checkpoint
early_imports   imports the packages that the first GPU step needs, while the data is read
determinism     switches to deterministic algorithms; saves and restores random states
failures        turns failures that a user can fix (lost process, memory, disk, NaN) into a `UserError`
data_view       rows of the data as `padfree data` shows them
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
