"""Names of the files of a run folder.

run.json                 marks the folder as a run folder of padfree, with the id of the run
run.lock                 locked by the process that writes to the folder
run.holder.json          the process that holds the lock
config.json              the settings
metrics.jsonl            one line per step
evaluation.jsonl         one line per evaluation; its `step` is the number of steps made before it
events.jsonl             starts, resolved `auto` settings, resumes, compilations, ends
rows.jsonl               data rows that were skipped, dropped or truncated
rollouts.jsonl           a few responses of each sampled batch
failures.jsonl           episodes and rewards that raised an error or hung
nonfinite-step-*.jsonl   the samples of a step whose loss or gradient was not finite
end.json                 how the run ended, if it ended without a checkpoint of its last step
response_log/step-*      responses that were sampled after the last checkpoint
checkpoints/step-*       checkpoints to resume from
model/                   the exported trained model
model-best/              the exported model of the best evaluation (`checkpoint.best`)
critic/                  the exported critic
tensorboard/             files of TensorBoard
trackers.json            the ids of the run at W&B, trackio and MLflow
replaced/                the files of an earlier run in this folder, until the run ends (`checkpoint.resume=false`)
starting-over/           the name of replaced/ while the files are moved
"""

from __future__ import annotations

MARKER, LOCK, HOLDER = "run.json", "run.lock", "run.holder.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
EVENTS = "events.jsonl"
ROWS = "rows.jsonl"
END = "end.json"
ROLLOUTS = "rollouts.jsonl"
FAILURES = "failures.jsonl"
TENSORBOARD, TRACKERS = "tensorboard", "trackers.json"
REPLACED, STARTING_OVER = "replaced", "starting-over"
NONFINITE = "nonfinite-step-{step}.jsonl"  # `step`: eight digits, or * to match all files
CHECKPOINTS, RESPONSE_LOG, MODEL, BEST_MODEL, CRITIC_MODEL = (
    "checkpoints",
    "response_log",
    "model",
    "model-best",
    "critic",
)
