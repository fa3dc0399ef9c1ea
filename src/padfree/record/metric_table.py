"""Every metric that a run writes: its name, its unit and its meaning.

docs/reference/metrics.md is generated from METRIC_GROUPS. Tests compare METRIC_GROUPS with the metrics of runs. A word
in capitals stands for a name: `source/NAME/loss` is written once for each source of a mixture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of metrics. The family `source/NAME/loss`, for example, has one metric per data source,
    whose name replaces NAME.
    """

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Return whether `name` is the name of this metric. A part in capitals, as in `source/NAME/loss`, matches any
        word.
        """
        if not any(part.isupper() for part in self.name.split("/")):
            return name == self.name
        parts = ["[^/]+" if part.isupper() else re.escape(part) for part in self.name.split("/")]
        return re.fullmatch("/".join(parts), name) is not None


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics that are written in the same cases, which the text `condition` describes."""

    title: str
    condition: str
    metrics: tuple[Metric, ...]


STEP = MetricGroup(
    "Every step",
    "In every line of metrics.jsonl. Values are over the global batch unless stated otherwise.",
    (
        Metric("step", "steps", "Index of the optimizer step, counted from 0."),
        Metric("loss", "loss", "The minimised value: the weighted sum of the losses of all scored tokens."),
        Metric("gradient_norm", "norm", "Global gradient norm before clipping."),
        Metric("lr", "rate", "Learning rate of this step; with `optimizer.name=muon`, that of the hidden matrices."),
        Metric("lr/adamw", "rate", "With `optimizer.name=muon`: learning rate of the parameters that AdamW updates."),
        Metric("samples", "samples", "Number of samples of the step."),
        Metric(
            "rows", "rows", "SFT and distillation: number of data rows of the step; a row may give several samples."
        ),
        Metric("tokens", "tokens", "Number of tokens of the step, without padding."),
        Metric("scored_tokens", "tokens", "Number of tokens that have a loss."),
        Metric(
            "skipped_samples",
            "samples",
            "RL with `loss.skip_zero_gradient=auto`: number of samples of the step that are not computed, because "
            "their advantages and therefore their gradients are 0; only if the loss has no KL, entropy or router term.",
        ),
        Metric("skipped_tokens", "tokens", "Number of tokens of `skipped_samples`, included in `tokens`."),
        Metric(
            "computed_tokens",
            "tokens",
            "Number of computed tokens: a prefix that samples share counts once, and skipped samples do not count.",
        ),
        Metric("seconds", "s", "Time of the optimizer step, without sampling and scoring of rollouts."),
        Metric("tokens_per_second", "tokens/s", "`tokens` without `skipped_tokens`, divided by `seconds`."),
        Metric("micro_batches", "micro-batches", "Number of micro-batches on each data rank."),
        Metric("fill", "share", "Tokens of the step divided by the number of tokens that fit into its micro-batches."),
        Metric("padding_share", "share", "Pad tokens divided by all tokens that are computed."),
        Metric(
            "imbalance",
            "ratio",
            "Planned cost of the step divided by the cost if no rank had to wait for another; 1 is perfect balance.",
        ),
        Metric(
            "imbalance_measured",
            "ratio",
            "Forward time of the slowest data rank divided by the mean over data ranks; not written with "
            "`parallel.compile` or `parallel.expert`.",
        ),
        Metric(
            "tflops_per_device",
            "TFLOP/s",
            "Model FLOPs per second on each device; recomputation and embedding look-ups are not counted.",
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
            "SFT and distillation with a mixture of sources: weighted mean of the token losses of source NAME.",
        ),
    ),
)

LOSS = MetricGroup(
    "Statistics of the loss",
    "Each statistic is a mean over scored tokens, or over pairs or answers. In RL, samples that the step skips "
    "(`skipped_samples`) have no log-probabilities. Therefore only `loss/advantage` covers all samples. The other "
    "means cover the samples that were not skipped, and are missing if the step skips all samples. An objective of "
    "your own adds `loss/NAME` for each of its statistics.",
    (
        Metric("loss/nll", "nats", "SFT: negative log-likelihood."),
        Metric("loss/divergence", "nats", "Distillation: divergence between teacher and student."),
        Metric("loss/cross_entropy", "nats", "Distillation: negative log-likelihood of the tokens under the student."),
        Metric(
            "loss/teacher_cross_entropy",
            "nats",
            "Distillation: negative log-likelihood of the tokens under the teacher.",
        ),
        Metric("loss/pair_loss", "loss", "DPO and reward models: loss of a pair."),
        Metric(
            "loss/accuracy",
            "share",
            "DPO and reward models: share of pairs whose chosen answer scores higher. KTO: share of answers whose "
            "log-ratio is above z₀ (KL estimate of the batch) if desirable, or below z₀ if undesirable.",
        ),
        Metric(
            "loss/margin",
            "reward",
            "DPO and reward models: score of the chosen answer minus that of the rejected answer.",
        ),
        Metric("loss/chosen", "reward", "DPO and reward models: score of the chosen answer."),
        Metric("loss/rejected", "reward", "DPO and reward models: score of the rejected answer."),
        Metric("loss/desirable", "reward", "KTO: reward of desirable answers."),
        Metric("loss/undesirable", "reward", "KTO: reward of undesirable answers."),
        Metric(
            "loss/advantage", "advantage", "RL: advantage. The mean includes skipped samples, whose advantage is 0."
        ),
        Metric("loss/ratio", "ratio", "RL: probability ratio π / π_old of the policy to the old policy."),
        Metric("loss/approx_kl", "nats", "RL: log π_old - log π, an estimate of the KL divergence from π_old."),
        Metric("loss/clip_fraction", "share", "RL: share of tokens whose ratio is clipped."),
        Metric(
            "loss/importance_weight",
            "ratio",
            "RL with `loss.corrections`: factor by which all corrections together multiply the policy objective of a "
            "token.",
        ),
        Metric(
            "loss/masked_fraction", "share", "RL with `loss.corrections`: share of tokens whose correction factor is 0."
        ),
        Metric("loss/entropy", "nats", "RL with `loss.entropy_coefficient`: entropy of the policy."),
        Metric(
            "loss/kl",
            "nats",
            "RL: estimate of the KL divergence from the reference model. KTO: z₀, the KL estimate of the batch.",
        ),
        Metric(
            "loss/sampler_difference",
            "nats",
            "RL: absolute difference between the log-probabilities of trainer and sampler.",
        ),
        Metric("loss/sampler_kl", "nats", "RL: k3 estimate of the KL divergence between sampler and trainer."),
        Metric(
            "loss/router",
            "loss",
            "With `loss.load_balancing`: load-balancing loss without its coefficient. It equals the number of experts "
            "per token if all experts are used equally.",
        ),
    ),
)

BATCH = MetricGroup(
    "Rollout batches",
    "RL. Written with the updates of a rollout batch.",
    (
        Metric("epoch", "passes", "Index of the pass over the rollout batch, counted from 0."),
        Metric("reward", "reward", "Mean reward of the rollout batch."),
        Metric("reward_std", "reward", "Standard deviation of the rewards."),
        Metric("reward_min", "reward", "Lowest reward."),
        Metric("reward_max", "reward", "Highest reward."),
        Metric("source/NAME/reward", "reward", "With a mixture of sources: mean reward of source NAME."),
        Metric(
            "groups", "groups", "Number of groups of the rollout batch; with `loss.advantage=given`, number of samples."
        ),
        Metric(
            "groups_without_signal",
            "groups",
            "Number of groups with one sample or with equal rewards; their advantages are 0.",
        ),
        Metric("response_length", "tokens", "Mean number of trained tokens of a response."),
        Metric("response_length_min", "tokens", "Number of trained tokens of the shortest response."),
        Metric("response_length_max", "tokens", "Number of trained tokens of the longest response."),
        Metric("response_cut", "share", "Share of responses that were cut off before an end token."),
        Metric(
            "reverse_kl",
            "nats",
            "With `loss.advantage=teacher`: mean log-probability of the policy minus that of the teacher.",
        ),
        Metric(
            "responses_from_log",
            "responses",
            "After a resume: number of rank 0's responses that were reused instead of sampled again.",
        ),
    ),
)

TIMES = MetricGroup(
    "Times of a rollout batch",
    "Written in RL; measured on rank 0. `seconds/update` is in every line of metrics.jsonl. The times of a rollout "
    "batch, such as sampling and rewards, are in the line of the batch's first update. Logging, evaluations and "
    "checkpoints follow an update, and their times are in the line of the next update. The times in a line add up to "
    "the time from the end of the previous update to the end of this update. The exception is a run on a GPU with "
    "rollouts from files: the next batch is prepared during an update, and this time counts twice.",
    (
        Metric(
            "seconds/update",
            "s",
            "Time of the update. On a GPU it also includes the time in which the GPU waits for the host.",
        ),
        Metric(
            "seconds/sampling",
            "s",
            "Time of sampling responses, and of all rollout work that no other `seconds/...` metric includes.",
        ),
        Metric("seconds/rewards", "s", "Time of computing rewards."),
        Metric("seconds/weight_sync", "s", "Time of sending weights to the sampler."),
        Metric(
            "seconds/waiting",
            "s",
            "With `rollout.staleness`: time of waiting for responses that are sampled ahead of training. Otherwise: "
            "time of exchanging results with other ranks, which includes waiting for the slowest rank.",
        ),
        Metric(
            "seconds/reference",
            "s",
            "Time of scoring samples with the reference model, and of copying the policy's weights to this model.",
        ),
        Metric("seconds/teacher", "s", "Time of scoring samples with the teacher."),
        Metric("seconds/critic", "s", "Time of computing values with the critic."),
        Metric(
            "seconds/old_logprobs",
            "s",
            "Time of scoring samples with the policy as it is before the batch's updates (the old policy).",
        ),
        Metric(
            "seconds/preparing",
            "s",
            "Time of preparing the batch: choosing its data, advantages, reward metrics. Sampling, rewards and scoring "
            "are not included.",
        ),
        Metric(
            "seconds/logging",
            "s",
            "Time that it took to write the previous line of metrics to metrics.jsonl, the trackers and the progress "
            "output.",
        ),
        Metric("seconds/evaluation", "s", "Time of evaluations since the previous update."),
        Metric(
            "seconds/checkpoint",
            "s",
            "Time that training waited for checkpoints since the previous update.",
        ),
        Metric("seconds/other", "s", "Time between two updates, without the time in other `seconds/...` metrics."),
        Metric(
            "sampler_tokens_per_second",
            "tokens/s",
            "Number of trained response tokens of the batch, divided by `seconds/sampling`. With `rollout.staleness`: "
            "`sampler/tokens_per_second`.",
        ),
    ),
)

CRITIC = MetricGroup(
    "Critic",
    "RL with `loss.advantage=gae`.",
    (
        Metric("critic/loss", "loss", "Value loss."),
        Metric("critic/error", "reward²", "Mean squared error of the critic's values, without value clipping."),
        Metric(
            "critic/explained_variance",
            "share",
            "Share of the variance of the returns that the critic's values explain, measured before the updates of a "
            "batch.",
        ),
        Metric("critic/value", "reward", "Mean value over scored tokens."),
        Metric("critic/return", "reward", "Mean return over scored tokens."),
        Metric(
            "critic/clip_fraction",
            "share",
            "With `critic.clip`: share of tokens whose value loss is computed from the clipped value.",
        ),
        Metric("critic/gradient_norm", "norm", "Gradient norm of the critic before clipping."),
        Metric("critic/lr", "rate", "Learning rate of the critic."),
        Metric(
            "critic/lr/adamw",
            "rate",
            "With `optimizer.name=muon`: learning rate of the critic's parameters that AdamW updates.",
        ),
    ),
)

COLLECTION = MetricGroup(
    "Sampling",
    "RL in which the run samples the responses (not RL on rollout files). An engine of your own adds `sampler/NAME` "
    "for each of its metrics.",
    (
        Metric(
            "groups_requested", "groups", "With `rollout.filter`: number of groups that were sampled for the batch."
        ),
        Metric("groups_equal", "groups", "With `rollout.filter`: number of groups whose rewards are all equal."),
        Metric(
            "groups_surplus",
            "groups",
            "With `rollout.filter`: number of groups with unequal rewards that the batch did not need.",
        ),
        Metric(
            "kept_ids",
            "ids",
            "With `rollout.top_p`, `rollout.top_k` or `rollout.min_p`: mean number of token ids that are stored for a "
            "sampled token to describe its kept set (the tokens among which it was sampled).",
        ),
        Metric(
            "kept_bytes",
            "bytes",
            "With `rollout.top_p`, `rollout.top_k` or `rollout.min_p`: memory of the batch's kept sets (for each "
            "token, the tokens among which it was sampled).",
        ),
        Metric("overlong_share", "share", "With `rollout.overlong_buffer`: share of samples that were penalised."),
        Metric("overlong_penalty", "reward", "With `rollout.overlong_buffer`: mean penalty."),
        Metric("raw_reward", "reward", "With `rollout.overlong_buffer`: mean reward before the penalty."),
        Metric(
            "version_age",
            "steps",
            "With `rollout.staleness`: mean age of a token, i.e. number of optimizer steps since it was sampled.",
        ),
        Metric(
            "version_age_max",
            "steps",
            "With `rollout.staleness`: age of the oldest token, i.e. number of optimizer steps since it was sampled.",
        ),
        Metric(
            "queue_finished",
            "groups",
            "With `rollout.staleness`: number of groups that are completely sampled and wait for training.",
        ),
        Metric(
            "queue_unfinished",
            "groups",
            "With `rollout.staleness`: number of groups that are requested for later batches, but are not completely "
            "sampled.",
        ),
        Metric(
            "groups_dropped",
            "groups",
            "With `rollout.staleness`: number of groups dropped after a resume because they were too old.",
        ),
        Metric("sampler/tokens_per_second", "tokens/s", "Tokens sampled per second for rank 0."),
        Metric("sampler/seconds", "s", "Servers: time in which `sampler/tokens` were sampled."),
        Metric("sampler/tokens", "tokens", "Servers: number of tokens sampled for rank 0."),
        Metric("sampler/retried", "requests", "Servers: number of requests that were retried."),
        Metric(
            "sampler/restarts", "restarts", "Servers: how many times the run restarted a server that it had launched."
        ),
        Metric("sampler/servers", "servers", "Servers: number of servers that have the current weights."),
        Metric(
            "sampler/weight_sync_seconds",
            "s",
            "Servers: time of the last weight sync, without the comparison of log-probabilities that follows it.",
        ),
        Metric(
            "sampler/sleep_seconds",
            "s",
            "With `rollout.colocated`: time that the servers took to go to sleep, i.e. to release their GPU memory.",
        ),
        Metric("sampler/weight_sync_bytes", "bytes", "Servers: bytes sent in the last weight sync."),
        Metric(
            "sampler/canary_difference",
            "nats",
            "Servers: mean difference between the log-probabilities of server and trainer on fixed sequences.",
        ),
        Metric(
            "sampler/canary_largest",
            "nats",
            "Servers: largest difference between the log-probabilities of server and trainer on fixed sequences.",
        ),
        Metric(
            "sampler/canary_sampled_difference",
            "nats",
            "Servers: mean difference between the log-probabilities of server and trainer on sampled tokens.",
        ),
        Metric(
            "sampler/canary_followed",
            "ratio",
            "Servers: change of the server's log-probabilities on fixed sequences since the previous weight sync, "
            "divided by the trainer's change. About 1 with the new weights, about 0 with the old ones.",
        ),
    ),
)

EPISODES = MetricGroup(
    "Environments and agents",
    "RL with `rollout.environment` or `rollout.agent`.",
    (
        Metric("episodes", "episodes", "Number of episodes in the rollout batch."),
        Metric("samples_per_episode", "samples", "Mean number of samples of an episode."),
        Metric("turns", "turns", "Mean number of turns of a sample."),
        Metric("environment_tokens", "tokens", "Mean number of tokens per sample that the environment added."),
        Metric(
            "episodes_failed",
            "episodes",
            "Number of episodes that failed: the episode or its reward raised an error or hung. Runs without an "
            "environment or agent write this metric only with `rollout.on_failure=skip`.",
        ),
        Metric("groups_failed", "groups", "Number of groups that were left out because an episode or a reward failed."),
        Metric(
            "environment/NAME",
            "own",
            "Mean of the metric NAME, which your environment passes as `policy.trajectory(metrics=...)`.",
        ),
        Metric("agent/calls", "calls", "Number of calls to the model that the agents of the batch made."),
        Metric(
            "agent/cuts",
            "calls",
            "Number of calls to the model in which the text of an earlier response has changed. Such a call starts a "
            "new sample.",
        ),
        Metric(
            "agent/conversations",
            "conversations",
            "Number of conversations that agents opened in addition to the first conversation of an episode.",
        ),
        Metric(
            "agent/refused",
            "calls",
            "Number of calls that were refused, e.g. because of an unknown field, or because the prompt left no tokens "
            "for a response.",
        ),
        Metric(
            "agent/sampling_overridden",
            "calls",
            "Number of calls with sampling parameters that differ from the run's, such as another temperature. The "
            "parameters of the run are used instead.",
        ),
    ),
)

EVALUATION = MetricGroup(
    "Evaluation",
    "Lines of evaluation.jsonl. With several held-out sources, each metric is also written as `eval/SOURCE/...`.",
    (
        Metric("step", "steps", "Number of optimizer steps of the evaluated model."),
        Metric("seconds/evaluation", "s", "Time of the evaluation."),
        Metric("eval/loss", "loss", "Mean loss over scored tokens, pairs or answers."),
        Metric("eval/perplexity", "perplexity", "SFT and distillation: exp of `eval/loss`."),
        Metric(
            "eval/accuracy",
            "share",
            "SFT and distillation: share of scored tokens that are the model's most likely token at their position. "
            "DPO, KTO and reward models: `loss/accuracy` of the held-out data.",
        ),
        Metric(
            "eval/margin",
            "reward",
            "DPO and reward models: mean score of chosen minus rejected answers. KTO: mean reward of desirable minus "
            "undesirable answers.",
        ),
        Metric("eval/kl", "nats", "KTO: z₀, the KL estimate over all held-out answers."),
        Metric("eval/reward", "reward", "RL: mean reward of the responses."),
        Metric("eval/pass@1", "share", "RL: share of responses whose reward is at least `eval.pass_threshold`."),
        Metric(
            "eval/pass@k",
            "share",
            "RL: share of prompts for which at least one of `eval.samples_per_prompt` responses passes.",
        ),
        Metric("eval/response_length", "tokens", "RL: mean number of tokens of a response."),
        Metric("eval/response_cut", "share", "RL: share of responses that were cut off before an end token."),
    ),
)

METRIC_GROUPS = (STEP, LOSS, BATCH, TIMES, CRITIC, COLLECTION, EPISODES, EVALUATION)


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Return the names in `names` that match no metric in METRIC_GROUPS. `eval/SOURCE/...` counts as `eval/...`."""
    known = [metric for group in METRIC_GROUPS for metric in group.metrics]
    return [name for name in names if not any(metric.matches(each) for each in _spellings(name) for metric in known)]


def _spellings(name: str) -> tuple[str, ...]:
    prefix, _, rest = name.partition("/")
    return (name, f"eval/{rest.rpartition('/')[2]}") if prefix == "eval" and "/" in rest else (name,)
