"""Check on the user's own model, data, backend and layout that packing does not change results.

    report = check_model("my-model", samples)      compares packed training with plain Hugging Face (HF) code that runs
    assert report.passed, report.verdict           one sample at a time

model_source    selects the model to check, or its first layers
samples         selects a few of the user's samples, or makes random ones
one_at_a_time   plain transformers code: one sample at a time, or two in a padded batch
exact           plain transformers code in float64
padded          padded batches and their loss
plain_losses    the losses of preference pairs, KTO, distillation, reward models and critics, by plain code
packed          the code path of training: plan, packs, prepared model, fused loss, FSDP2
compare         computes the largest differences, and defines the tolerances
check_report    the results and the verdict
model_check     check_model: runs the check with the modules above
sampler_check   check_sampler: compares the sampler with the trainer bit by bit, and names the operator that differs
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
