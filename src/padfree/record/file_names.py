"""Names of the files of a run folder.

run.json                 that padfree made the folder, and which run it is
run.lock                 locked by the process that writes
run.holder.json          which process that is
config.json              the settings
metrics.jsonl            one line a step
evaluation.jsonl         one line an evaluation; its `step` is the number of steps made before it
events.jsonl             starts, resolved `auto` settings, resumes, compilations, ends
rows.jsonl               rows of the data that were skipped, dropped or cut
rollouts.jsonl           a few responses of each batch that was sampled
failures.jsonl           episodes and rewards that raised or hung
nonfinite-step-*.jsonl   the samples of a step whose loss or gradient was no finite number
journal/step-*           responses that were sampled after the last checkpoint
checkpoints/step-*       what can be resumed from
model/                   the trained model, exported
model-best/              the one of the best evaluation (`checkpoint.best`)
critic/                  the critic that was trained beside it
"""

from __future__ import annotations

MARKER, LOCK, HOLDER = "run.json", "run.lock", "run.holder.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
EVENTS = "events.jsonl"
ROWS = "rows.jsonl"
ROLLOUTS = "rollouts.jsonl"
FAILURES = "failures.jsonl"
NONFINITE = "nonfinite-step-{step}.jsonl"  # eight digits, or * to find them all
CHECKPOINTS, RESPONSE_LOG, MODEL, BEST_MODEL, CRITIC_MODEL = (
    "checkpoints",
    "response_log",
    "model",
    "model-best",
    "critic",
)
