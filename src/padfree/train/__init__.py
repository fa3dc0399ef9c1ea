"""Training: SFT and RL share one loop, on any number of processes.

The modules of a training step, in the order in which a sample passes through them:

trainer         Trainer: the loop over batches, updates, metrics, evaluations and checkpoints
batcher         forms global batches of whole data rows (SFT) or of whole groups of rollouts of one prompt (RL)
batch_preparer  adds advantages and log-probabilities to the samples of a global batch
global_batch    the samples of a batch, divided into updates; a checkpoint between two updates stores the samples
engine          one optimizer step: divides the samples into packs, computes gradients, updates the weights
microbatch      builds this rank's packs (the micro-batches: samples laid end to end, without padding between them)
router_balance  lets the experts of a mixture-of-experts model receive about equally many tokens
step            an optimizer step before, during and after its computation: PreparedStep, PendingStep, StepReport
step_pipeline   finishes steps, and writes their metrics

Models and measurements:

scorer          computes log-probabilities, values and rewards without gradients
critic          PPO's value model, its loss and its advantages
evaluate        metrics on held-out data
rl              the reference model, reward models, and the log of sampled responses
finite_checks   raises errors for losses, metrics, scores and weights that are NaN or infinite
float8_budget   chooses the layers that stay in bfloat16 when the other layers multiply in float8
batch_times     measures the seconds of each phase of a batch
rank_imbalance_timer    measures the forward time of the layers on each rank, to find a slow rank

The start and the end of a run:

run             train: a whole run, from its settings to the exported model
preflight       checks settings, data and model before anything is written and before weights are loaded
run_notes       names unusual facts that are not errors, before the first step
check_data      refuses data that a run cannot train on
vocabulary      checks that all models of a run use the same token ids
training_data   loads the tokenizer and the samples, and prepares the reading of images
shared_turns    counts the tokens that the samples of one data row share
resolve_auto    replaces `auto` settings by values for this device
disk            checks whether the disk can hold the checkpoint and the model that a run writes
setup           builds loss, models and engine from the settings
precomputed     computes the log-probabilities of the reference model once, and stores them on disk
start_run       opens the run's files, restores its checkpoint, and creates its trainer
resume          compares settings, model and data of a checkpoint with those of the run that resumes from it
finished        finds out whether the run in a folder is complete and, if not, whether it can continue
early_imports   imports the packages that the first GPU step needs, while the data is read
determinism     switches to deterministic algorithms; saves and restores random states
failures        turns failures that a user can fix (lost process, memory, disk, NaN) into a `UserError`
data_view       shows rows of the data as the model sees them (`padfree data show`)
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
