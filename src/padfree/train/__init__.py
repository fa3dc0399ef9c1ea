"""Training: one loop for SFT and RL, on any number of processes.

training_data  tokenizer, samples, and the global batches they come in
decide         what cannot be run is refused, before anything is written or loaded
limits         what a model can be given: token ids and positions
settle         what the settings that are `auto` stand for on this device
setup          settings to loss, models and engine
microbatch     samples to one rank's rows
scorer         log-probabilities without gradient: old policy and reference
engine         one optimizer step over a global batch
busy_clock     how long each rank's own layers take
determinism    algorithms that give the same bits again, and random states
rl             rewards to advantages, the reference model, a batch between its updates
metrics        the numbers of a step, by name
updates        an update from its begin to its line of metrics
loop           Loop: batches, updates, metrics, checkpoints
resume         what may change between a checkpoint and the run that goes on from it
early_imports  packages of the first step on a GPU, imported while the data is read
failures       what ends a run, as a line for its user
run            train: a whole run, from its settings to the exported model
signals        SIGTERM and SIGINT
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
