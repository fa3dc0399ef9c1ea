"""Proves on a user's own model, data, backend and layout that packing changes nothing.

    report = check_model("my-model", samples)          one sample at a time with plain HF code, against training's path
    assert report.passed, report.verdict

model_source    the model to load, or its first layers
samples         a few of the user's samples, or random tokens
one_at_a_time   plain transformers code: one sample at a time, and in padded pairs
padded          padded rows and their loss
packed          the path of training: plan, rows, attached model, fused loss, FSDP2
compare         largest differences, and what they are measured by
report          rows, verdict
run             check_model: all of the above
plain_losses    the losses of pairs, teachers, reward models and critics, one at a time
"""

from padfree.tools.check.check_model import check_model
from padfree.tools.check.check_report import CheckReport, CheckRow, Skipped
from padfree.tools.check.samples import chosen_samples, random_samples

__all__ = ["CheckReport", "CheckRow", "Skipped", "check_model", "chosen_samples", "random_samples"]
