"""Every metric that a run writes: its name, its unit and its meaning.

docs/reference/metrics.md is generated from these tables, and tests compare them with the metrics of runs. A word in
capitals stands for a name: `source/NAME/loss` is written once for each source of a mixture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of metrics with a word in capitals in the name."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric or belongs to this family."""
        if not any(part.isupper() for part in self.name.split("/")):
            return name == self.name
        parts = ["[^/]+" if part.isupper() else re.escape(part) for part in self.name.split("/")]
        return re.fullmatch("/".join(parts), name) is not None


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics that are written under the same condition."""

    title: str
    condition: str
    metrics: tuple[Metric, ...]


STEP = MetricGroup(
    "Every step",
    "Every line of metrics.jsonl. Values are of the global batch unless stated otherwise.",
    (
        Metric("step", "steps", "Index of the optimizer step, from 0."),
        Metric("loss", "loss", "The minimised value: the weighted sum of the losses of all scored tokens."),
        Metric("gradient_norm", "norm", "Global gradient norm before clipping."),
        Metric("lr", "rate", "Learning rate of this step; with `optimizer.name=muon`, of the hidden matrices."),
        Metric("lr/adamw", "rate", "With `optimizer.name=muon`: learning rate of all other parameters."),
        Metric("samples", "samples", "Samples of the step."),
        Metric("rows", "rows", "SFT and distillation: data rows of the step; a row may give several samples."),
        Metric("tokens", "tokens", "Tokens of the step, without padding."),
        Metric("scored_tokens", "tokens", "Tokens that have a loss."),
        Metric(
            "skipped_samples",
            "samples",
            "RL with `loss.skip_zero_gradient=auto`: samples of the step that are not computed, because their "
            "advantages and therefore their gradients are 0; only if the loss has no KL, entropy or router term.",
        ),
        Metric("skipped_tokens", "tokens", "Tokens of the skipped samples; `tokens` includes them."),
        Metric(
            "computed_tokens",
            "tokens",
            "Tokens that are computed: a prefix that samples share counts once, skipped samples do not count.",
        ),
        Metric("seconds", "s", "Time of the update, without sampling and scoring of rollouts."),
        Metric("tokens_per_second", "tokens/s", "`tokens` without `skipped_tokens`, divided by `seconds`."),
        Metric("micro_batches", "micro-batches", "Micro-batches on each data rank."),
        Metric("fill", "share", "Tokens divided by the capacity of the micro-batches."),
        Metric("padding_share", "share", "Pad tokens divided by all tokens that are computed."),
        Metric(
            "imbalance",
            "ratio",
            "Planned cost of the step divided by its cost if no rank waited; 1 is perfect balance.",
        ),
        Metric(
            "imbalance_measured",
            "ratio",
            "Forward time of the slowest data rank divided by the mean over data ranks; not with `parallel.compile`.",
        ),
        Metric(
            "tflops_per_device",
            "TFLOP/s",
            "Model FLOPs per second and device; recomputation and embedding look-ups are not counted.",
        ),
        Metric(
            "mfu",
            "share",
            "`tflops_per_device` divided by the dense bfloat16 peak; only in bfloat16 on a GPU whose peak is known.",
        ),
        Metric("memory_gib", "GiB", "Peak memory of rank 0 so far: GPU memory, or process memory without a GPU."),
        Metric(
            "source/NAME/loss",
            "loss",
            "SFT and distillation with a mixture: weighted mean of the token losses of the source.",
        ),
    ),
)

LOSS = MetricGroup(
    "Statistics of the loss",
    "Means over scored tokens, or over pairs or answers. In RL, samples that the step skips (`skipped_samples`) have "
    "no log-probabilities: all means except that of the advantage cover the other samples, and are missing if the step "
    "skips all samples. An objective of your own adds `loss/NAME` for each of its statistics.",
    (
        Metric("loss/nll", "nats", "SFT: negative log-likelihood."),
        Metric("loss/divergence", "nats", "Distillation: divergence between teacher and student."),
        Metric("loss/cross_entropy", "nats", "Distillation: negative log-likelihood of the student."),
        Metric("loss/teacher_cross_entropy", "nats", "Distillation: negative log-likelihood of the teacher."),
        Metric("loss/pair_loss", "loss", "DPO and reward models: loss of a pair."),
        Metric(
            "loss/accuracy",
            "share",
            "DPO and reward models: pairs whose chosen answer scores higher. KTO: answers on the side of z₀ that their "
            "label names.",
        ),
        Metric("loss/margin", "reward", "DPO and reward models: score of the chosen answer minus the rejected one."),
        Metric("loss/chosen", "reward", "DPO and reward models: score of the chosen answer."),
        Metric("loss/rejected", "reward", "DPO and reward models: score of the rejected answer."),
        Metric("loss/desirable", "reward", "KTO: reward of desirable answers."),
        Metric("loss/undesirable", "reward", "KTO: reward of undesirable answers."),
        Metric("loss/advantage", "advantage", "RL: advantage; skipped samples count as 0."),
        Metric("loss/ratio", "ratio", "RL: ratio of the policy to the old policy."),
        Metric("loss/approx_kl", "nats", "RL: log π_old - log π."),
        Metric("loss/clip_fraction", "share", "RL: tokens whose ratio is clipped."),
        Metric("loss/importance_weight", "ratio", "RL with `loss.corrections`: product of the correction factors."),
        Metric("loss/masked_fraction", "share", "RL with `loss.corrections`: tokens whose factor is 0."),
        Metric("loss/entropy", "nats", "RL with `loss.entropy_coefficient`: entropy of the policy."),
        Metric("loss/kl", "nats", "RL: KL estimate against the reference. KTO: z₀, the KL estimate of the batch."),
        Metric(
            "loss/sampler_difference",
            "nats",
            "RL: absolute difference between the log-probabilities of trainer and sampler.",
        ),
        Metric("loss/sampler_kl", "nats", "RL: k3 estimate of the KL divergence between sampler and trainer."),
        Metric(
            "loss/router",
            "loss",
            "With `loss.load_balancing`: load-balancing loss without its coefficient; the number of experts per token "
            "if all experts are used equally.",
        ),
    ),
)

BATCH = MetricGroup(
    "Rollout batches",
    "RL. Written with the updates of a rollout batch.",
    (
        Metric("epoch", "passes", "Index of the pass over the rollout batch, from 0."),
        Metric("reward", "reward", "Mean reward of the rollout batch."),
        Metric("reward_std", "reward", "Standard deviation of the rewards."),
        Metric("reward_min", "reward", "Lowest reward."),
        Metric("reward_max", "reward", "Highest reward."),
        Metric("source/NAME/reward", "reward", "With a mixture: mean reward of the source."),
        Metric("groups", "groups", "Groups of the rollout batch (`loss.advantage=given`: samples)."),
        Metric(
            "groups_without_signal",
            "groups",
            "Groups with one sample or with equal rewards: their advantages are 0.",
        ),
        Metric("response_length", "tokens", "Mean number of trained tokens of a response."),
        Metric("response_length_min", "tokens", "Shortest response."),
        Metric("response_length_max", "tokens", "Longest response."),
        Metric("response_cut", "share", "Responses that end without an end token."),
        Metric(
            "reverse_kl",
            "nats",
            "With `loss.advantage=teacher`: mean log-probability of the policy minus that of the teacher.",
        ),
        Metric("responses_from_log", "responses", "After a resume: responses of rank 0 that were not sampled again."),
    ),
)

TIMES = MetricGroup(
    "Times of a rollout batch",
    "RL, on rank 0. `seconds/update` is in every line, phases of a batch are in the line of its first update. Logging, "
    "evaluations and checkpoints follow an update and are in the line of the next. The phases of a line add up to the "
    "time between the ends of two updates; only phases that run at the same time (on a GPU, with rollouts from files) "
    "count twice.",
    (
        Metric("seconds/update", "s", "Time of the update, equal to `seconds`."),
        Metric("seconds/sampling", "s", "Sampling; everything that a sampler does not report separately is included."),
        Metric("seconds/rewards", "s", "Computing rewards."),
        Metric("seconds/weight_sync", "s", "Sending weights to the sampler."),
        Metric("seconds/waiting", "s", "Waiting for responses that are sampled ahead."),
        Metric("seconds/reference", "s", "Scoring by the reference, and copying the policy's weights to it."),
        Metric("seconds/teacher", "s", "Scoring by the teacher."),
        Metric("seconds/critic", "s", "Values of the critic."),
        Metric("seconds/old_logprobs", "s", "Scoring by the policy before the updates."),
        Metric(
            "seconds/preparing",
            "s",
            "Preparing the batch, without the phases above: order of the data, advantages, reward metrics.",
        ),
        Metric("seconds/logging", "s", "Writing the metrics of the previous line, trackers and progress included."),
        Metric("seconds/evaluation", "s", "Evaluations since the previous line."),
        Metric("seconds/checkpoint", "s", "Saving checkpoints since the previous line, as far as training waits."),
        Metric(
            "sampler_tokens_per_second",
            "tokens/s",
            "Trained tokens of the responses divided by `seconds/sampling`; with `rollout.staleness`, the rate "
            "that the sampler reports.",
        ),
    ),
)

CRITIC = MetricGroup(
    "Critic",
    "RL with `loss.advantage=gae`.",
    (
        Metric("critic/loss", "loss", "Value loss."),
        Metric("critic/error", "reward²", "Mean squared error of the values, without clipping."),
        Metric(
            "critic/explained_variance",
            "share",
            "Variance of the returns that the values explain, before the updates with a batch.",
        ),
        Metric("critic/value", "reward", "Mean value over scored tokens."),
        Metric("critic/return", "reward", "Mean return over scored tokens."),
        Metric("critic/clip_fraction", "share", "Values that the clip limits."),
        Metric("critic/gradient_norm", "norm", "Gradient norm of the critic before clipping."),
        Metric("critic/lr", "rate", "Learning rate of the critic."),
        Metric("critic/lr/adamw", "rate", "With `optimizer.name=muon`: of the critic's other parameters."),
    ),
)

COLLECTION = MetricGroup(
    "Sampling",
    "RL whose responses are sampled in the run. An engine of your own adds `sampler/NAME` for each of its metrics.",
    (
        Metric("groups_requested", "groups", "With `rollout.filter`: groups that were requested for the batch."),
        Metric("groups_equal", "groups", "With `rollout.filter`: groups whose rewards are all equal."),
        Metric(
            "groups_surplus", "groups", "With `rollout.filter`: groups with different rewards that were not needed."
        ),
        Metric("overlong_share", "share", "With `rollout.overlong_buffer`: samples that were penalised."),
        Metric("overlong_penalty", "reward", "With `rollout.overlong_buffer`: mean penalty."),
        Metric("raw_reward", "reward", "With `rollout.overlong_buffer`: mean reward before the penalty."),
        Metric("version_age", "steps", "With `rollout.staleness`: mean optimizer steps since a token was sampled."),
        Metric("version_age_max", "steps", "With `rollout.staleness`: most optimizer steps since a token was sampled."),
        Metric("queue_finished", "groups", "With `rollout.staleness`: finished groups ahead of training."),
        Metric("queue_unfinished", "groups", "With `rollout.staleness`: unfinished groups ahead of training."),
        Metric("groups_dropped", "groups", "With `rollout.staleness`: groups that were too old after a resume."),
        Metric("sampler/tokens_per_second", "tokens/s", "Sampling rate of rank 0."),
        Metric("sampler/seconds", "s", "Servers: time of the requests of rank 0."),
        Metric("sampler/tokens", "tokens", "Servers: tokens sampled for rank 0."),
        Metric("sampler/retried", "requests", "Servers: requests that were retried."),
        Metric("sampler/restarts", "restarts", "Servers: restarts of servers that the run launched."),
        Metric("sampler/servers", "servers", "Servers: servers that have the current weights."),
        Metric("sampler/weight_sync_seconds", "s", "Servers: time of the last weight sync, without the canary."),
        Metric("sampler/weight_sync_bytes", "bytes", "Servers: bytes sent in the last weight sync."),
        Metric(
            "sampler/canary_difference",
            "nats",
            "Servers: mean difference between the log-probabilities of server and trainer on fixed sequences.",
        ),
        Metric("sampler/canary_largest", "nats", "Servers: largest difference on the fixed sequences."),
        Metric("sampler/canary_sampled_difference", "nats", "Servers: mean difference on tokens that the server drew."),
        Metric(
            "sampler/canary_followed",
            "ratio",
            "Servers: change of the server's log-probabilities since the last sync divided by the trainer's.",
        ),
    ),
)

EPISODES = MetricGroup(
    "Environments and agents",
    "RL with `rollout.environment` or `rollout.agent`.",
    (
        Metric("episodes", "episodes", "Episodes that the batch is trained on."),
        Metric("samples_per_episode", "samples", "Mean number of samples (leaves) of an episode."),
        Metric("turns", "turns", "Mean number of turns of a sample."),
        Metric("environment_tokens", "tokens", "Mean number of tokens per sample that the environment added."),
        Metric(
            "episodes_failed",
            "episodes",
            "Episodes or rewards that raised or hung; also with `rollout.on_failure=skip`.",
        ),
        Metric("groups_failed", "groups", "Groups that were left out because of a failure."),
        Metric("environment/NAME", "own", "Mean of a metric that `policy.trajectory(metrics=...)` received."),
        Metric("agent/calls", "calls", "Calls of the agents of the batch."),
        Metric("agent/cuts", "calls", "Calls whose text did not continue what the model had seen."),
        Metric("agent/conversations", "conversations", "Further conversations that agents opened."),
        Metric("agent/refused", "calls", "Calls that left no room for a response."),
        Metric("agent/sampling_overridden", "calls", "Calls that asked for other sampling parameters."),
    ),
)

EVALUATION = MetricGroup(
    "Evaluation",
    "Lines of evaluation.jsonl. With several held-out sources, each metric is also written as `eval/SOURCE/...`.",
    (
        Metric("step", "steps", "Number of optimizer steps before the evaluation."),
        Metric("seconds/evaluation", "s", "Time of the evaluation."),
        Metric("eval/loss", "loss", "Mean loss over scored tokens, pairs or answers."),
        Metric("eval/perplexity", "perplexity", "SFT and distillation: exp of `eval/loss`."),
        Metric(
            "eval/accuracy",
            "share",
            "SFT and distillation: tokens that are the most probable ones. Others: as `loss/accuracy`.",
        ),
        Metric(
            "eval/margin", "reward", "DPO, KTO and reward models: as `loss/margin`; KTO: desirable minus undesirable."
        ),
        Metric("eval/kl", "nats", "KTO: z₀ of all held-out answers."),
        Metric("eval/reward", "reward", "RL: mean reward of the responses."),
        Metric("eval/pass@1", "share", "RL: responses whose reward is at least `eval.pass_threshold`."),
        Metric("eval/pass@k", "share", "RL: prompts with a passing response among `eval.samples_per_prompt`."),
        Metric("eval/response_length", "tokens", "RL: mean length of a response."),
        Metric("eval/response_cut", "share", "RL: responses that end without an end token."),
    ),
)

METRIC_GROUPS = (STEP, LOSS, BATCH, TIMES, CRITIC, COLLECTION, EPISODES, EVALUATION)


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """The given names that no table contains. `eval/SOURCE/...` counts as `eval/...`."""
    known = [metric for group in METRIC_GROUPS for metric in group.metrics]
    return [name for name in names if not any(metric.matches(each) for each in _spellings(name) for metric in known)]


def _spellings(name: str) -> tuple[str, ...]:
    prefix, _, rest = name.partition("/")
    return (name, f"eval/{rest.rpartition('/')[2]}") if prefix == "eval" and "/" in rest else (name,)
