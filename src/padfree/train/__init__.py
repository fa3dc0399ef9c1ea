"""Training: SFT and RL share one loop, on any number of processes.

A step, in the order in which a sample passes it:

trainer         Trainer: the loop over batches, updates, metrics, evaluations and checkpoints
batcher         data rows and groups, and the batcher that forms global batches of them
batch_preparer  global batches with advantages and log-probabilities
global_batch    the samples of a batch, its updates, and both in a checkpoint
engine          plan, packs, gradients and update of one optimizer step
microbatch      builds the packs of one rank from samples
router_balance  balances the load of experts
step            the states of a step: prepared, pending, reported
step_pipeline   finishes steps, and writes their metrics

Models and measurements:

scorer          scores without gradients: log-probabilities, values, rewards
critic          PPO's value model, its loss and its advantages
evaluate        metrics on held-out data
rl              the reference model, reward models, and the log of sampled responses
finite_checks   errors for numbers that are not finite
float8_budget   the layers that stay in bfloat16
batch_times, rank_imbalance_timer    seconds of phases, and of each rank

The start and the end of a run:

run             train: a whole run, from its settings to the exported model
preflight       checks a run's settings and data, and refuses the run before anything is written or loaded
check_data      refuses data that a run cannot train on
vocabulary      checks that all models of a run use the same token ids
training_data   tokenizer, samples, and what reads images
shared_turns    tokens that the samples of a row share
resolve_auto    the values that `auto` settings take on this device
disk            whether the disk can hold what a run writes
setup           builds loss, models and engine from the settings
precomputed     log-probabilities of the reference, computed once
start_run       opens the run's files, restores its checkpoint, and creates its trainer
resume          settings that may change between a checkpoint and the run that resumes from it
finished        whether an earlier start has finished the run, or left it without a checkpoint
early_imports   imports the packages that the first GPU step needs, while the data is read
determinism     deterministic algorithms, and random states
failures        failures that a user can fix, as a `UserError`
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
