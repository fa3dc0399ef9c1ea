"""Training: one loop for SFT and RL, on any number of processes.

sources        tokenizer, samples, and the global batches they come in
setup          settings to loss, models and engine
memory         what a run needs on each device, before any weight is loaded
parallelize    activation checkpointing, compile and sharding, applied to a plain model from outside
optimizer      AdamW, gradient norm and clipping over shards
schedule       the course of the learning rate
microbatch     samples to one rank's rows
scorer         log-probabilities without gradient: old policy and reference
reference      the model that the KL term compares with, and its refreshes
engine         one optimizer step over a global batch
credit         rewards to advantages
rollout_batch  a batch between its updates, and in a checkpoint
loop           train, and Loop: batches, updates, metrics, checkpoints
checkpoint     Checkpointer: complete or not there; manifest has the files of one
signals        SIGTERM and SIGINT
metrics        what is written of each step; flops finds part of it, trackers pass it on
events         what happened to a run besides its steps
"""

from padfree.train.checkpoint import Checkpointer
from padfree.train.engine import Engine, LossSettings, NonFiniteError, StepReport
from padfree.train.loop import Loop, RunResult
from padfree.train.optimizer import make_optimizer
from padfree.train.parallelize import parallelize, transformations
from padfree.train.run import train
from padfree.train.scorer import Scorer

__all__ = [
    "Checkpointer",
    "Engine",
    "Loop",
    "LossSettings",
    "NonFiniteError",
    "RunResult",
    "Scorer",
    "StepReport",
    "make_optimizer",
    "parallelize",
    "train",
    "transformations",
]
