"""Training: SFT and RL share one loop, on any number of processes.

run             train: a whole run, from its settings to the exported model
start_run       opens the run's files, restores its checkpoint, and creates its trainer
trainer         Trainer: the loop over batches, updates, metrics, evaluations and checkpoints
batch_preparer  global batches with advantages and log-probabilities
engine          one optimizer step over a global batch
step_pipeline   runs updates, and writes their metrics
microbatch      builds the packs of one rank from samples
image_settings  what reads the images of a run's data: placeholder token, processor, positions
scorer          log-probabilities without gradients: old policy and reference
critic          PPO's value model and its advantages
evaluate        metrics on held-out data
setup           builds loss, models and engine from the settings
training_data   tokenizer, samples and the batcher that groups them into global batches
preflight       checks a run's settings and data, and refuses the run before anything is written or loaded
check_data      refuses data that a run cannot train on
count_steps     the number of optimizer steps of a run
resolve_auto    the values that `auto` settings take on this device
limits          the token ids and positions that a model accepts
resume          settings that may change between a checkpoint and the run that resumes from it
rl              the reference model, reward models, and batches of sampled responses
step_metrics    the metrics of a step, by name
early_imports   imports the packages that the first GPU step needs, while the data is read
determinism     deterministic algorithms, and random states
signals         agreement between ranks to stop after SIGTERM or SIGINT
"""

from padfree.optim.optimizer import make_optimizer
from padfree.sharding.parallelize import parallelize, transformations
from padfree.train.engine import Engine, LossSettings, StepReport
from padfree.train.finite_checks import NonFiniteError
from padfree.train.run import train
from padfree.train.scorer import Scorer
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
