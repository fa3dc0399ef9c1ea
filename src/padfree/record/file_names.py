"""Names of the files of a run folder."""

from __future__ import annotations

# `run.json` marks the folder as a run folder. `run.holder.json` names the process that has locked `run.lock`.
MARKER, LOCK, HOLDER = "run.json", "run.lock", "run.holder.json"
CONFIG = "config.json"  # the settings
METRICS = "metrics.jsonl"  # one line per step
EVALUATION = "evaluation.jsonl"  # one line per evaluation, whose `step` is the number of steps made before it
EVENTS = "events.jsonl"  # see `padfree.record.events`
ROWS = "rows.jsonl"  # data rows that were skipped, dropped or truncated
END = "end.json"  # how the run ended, if it ended without a checkpoint of its last step
ROLLOUTS = "rollouts.jsonl"  # a few responses of each sampled batch
FAILURES = "failures.jsonl"  # episodes and rewards that raised an error or hung
TENSORBOARD, TRACKERS = "tensorboard", "trackers.json"  # files of TensorBoard; the run's ids at W&B, trackio and MLflow
# The files of an earlier run in this folder, until the run ends (`checkpoint.resume=false`). The second name is that of
# the folder while the files are moved.
REPLACED, STARTING_OVER = "replaced", "starting-over"
# The samples of a step whose loss or gradient was not finite. `step`: eight digits, or * to match all files.
NONFINITE = "nonfinite-step-{step}.jsonl"
CHECKPOINTS, RESPONSE_LOG, MODEL, BEST_MODEL, CRITIC_MODEL = (
    "checkpoints",  # folders step-* to resume from
    "response_log",  # responses that were sampled after the last checkpoint
    "model",  # the exported trained model
    "model-best",  # the exported model of the best evaluation (`checkpoint.best`)
    "critic",  # the exported critic
)
