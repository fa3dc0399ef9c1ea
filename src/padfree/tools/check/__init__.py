"""Check on the user's own model, data, backend and layout that packing does not change results.

    report = check_model("my-model", samples)
    assert report.passed, report.verdict

`check_model` compares packed training with plain Hugging Face code that runs one sample at a time. `check_sampler`
compares the sampler with the trainer bit by bit, and names the operator that differs.
"""

from padfree.tools.check.check_report import CheckReport, CheckResult, Skipped
from padfree.tools.check.model_check import check_model
from padfree.tools.check.sampler_check import SamplerReport, check_sampler, check_sampler_of
from padfree.tools.check.samples import chosen_samples, random_samples

__all__ = [
    "CheckReport",
    "CheckResult",
    "SamplerReport",
    "Skipped",
    "check_model",
    "check_sampler",
    "check_sampler_of",
    "chosen_samples",
    "random_samples",
]
