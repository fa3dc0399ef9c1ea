"""The allowed values of every setting that has a fixed list of values, and other fixed names that several packages
use.
"""

from __future__ import annotations

from typing import Literal

# model, lora, checkpoint, run
Init = Literal["weights", "random"]
ModelHead = Literal["tokens", "scalar"]  # logits over the vocabulary, or one scalar
ComputeDtype = Literal["float32", "bfloat16"]
LoraExport = Literal["merged", "adapter"]
ExportDtype = Literal["base", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]

# data
LossOn = Literal["assistant", "last", "all"]
Turns = Literal["auto", "together", "apart"]
PromptFormat = Literal["auto", "chat", "plain"]
Overlong = Literal["error", "truncate", "drop"]
OnBadRow = Literal["error", "skip"]

ROLLOUT_ARRAYS = ("logprobs", "ref_logprobs", "advantages", "returns", "values")
"""Optional per-token arrays that a rollout file may contain; element j belongs to token j of its sample."""

# batch
RunOverlong = Literal["error", "alone"]
PackOverlong = Literal["error", "truncate", "drop", "alone"]
SharePrefixes = Literal["auto"] | bool

# loss
WeightMode = Literal["token-mean", "sample-mean", "sum-of-sample-mean", "sample-sum", "constant", "group-mean"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae", "teacher", "given"]
PreferenceLoss = Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"]
OldPolicy = Literal["trainer", "sampler", "current"]
OldPolicySetting = Literal["auto", "trainer", "sampler", "current"]
KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
KLWeighting = Literal["none", "ratio"]
SequenceStatistic = Literal["mean", "sum", "token"]
SkipZeroGradient = Literal["auto"] | bool
DivergenceKind = Literal["forward-kl", "reverse-kl", "jsd"]

# eval, checkpoint
Asynchronous = Literal["auto"] | bool
Better = Literal["auto", "lowest", "highest"]
LOWER_IS_BETTER = ("loss", "perplexity", "response_length")

# rollout
SAMPLING_ENGINES = {
    "in_process": "padfree.rollout.engines.in_process.sampler:make_in_process_sampler",
    "vllm": "padfree.rollout.engines.vllm:make_vllm_sampler",
}
"""For each value of `rollout.engine`, the function that makes the sampler. Users may also give their own function as
module:function.
"""
WeightTransfer = Literal["auto", "group", "files"]
WeightSyncKind = Literal["auto", "full", "difference"]
OnUpdate = Literal["continue", "finish", "restart"]
RolloutFilter = Literal["none", "equal"]
Routing = Literal["recompute", "replay"]
OnFailure = Literal["error", "skip"]

# parallel
LayoutKind = Literal["contiguous", "headtail", "balanced"]
ContextMethod = Literal["allgather", "ring", "ulysses"]
Checkpointing = Literal["none", "host", "selective", "full"]
LayerLevel = Literal["full", "host", "selective", "attention", "none"]
LayerKernels = Literal["auto", "none"]
Compiler = Literal["none", "inductor", "aot_eager"]
CompilerOrAuto = Literal["auto", Compiler]
HeadMemory = Literal["speed", "low"]
LinearDtype = Literal["bfloat16", "float8"]
Float8Product = Literal["output", "input-gradient", "weight-gradient"]
