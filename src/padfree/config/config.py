"""All settings of a run, and the rules that involve several sections."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from padfree.config.functions import in_main_script, model_of
from padfree.config.loss import TASKS, LossConfig
from padfree.config.model_sections import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    TeacherConfig,
)
from padfree.config.rollout import RolloutConfig
from padfree.config.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ParallelConfig,
    RunConfig,
    TrackConfig,
)
from padfree.config.setting import check_needs
from padfree.config.slurm_section import SlurmConfig
from padfree.errors import UserError, need
from padfree.optim.optimizer_settings import OptimizerConfig, ScheduleConfig

GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
"""The values of `loss.advantage` for which a response is compared with other responses to the same prompt."""


NOT_A_SETTING = {"setting": False}
"""Metadata that marks a field of `Config` as internal: recipes and the command line cannot set it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    run: RunConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    trains: ClassVar[bool] = True  # whether the settings are those of a training run
    # Names of the settings that the recipe or an override sets to a value other than none
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata=NOT_A_SETTING)

    def __post_init__(self) -> None:
        check_needs(self)
        if self.trains:
            self._check_steps()
        self.loss.settings().check_run(self)
        self._check_reference()
        if self.loss.task.has_teacher or self.loss.advantage == "teacher":
            need(self.teacher.path is not None, "teacher.path", None, "set teacher.path=MODEL, the model to learn from")
        else:
            fix = "leave it out, or set loss.kind=distill or loss.advantage=teacher"
            need(self.teacher.path is None, "teacher.path", self.teacher.path, fix)
        if self.lora.rank:
            fix = "set loss.router_bias=0: with lora.rank, a checkpoint holds the adapters only, and no router biases"
            need(self.loss.router_bias == 0, "loss.router_bias", self.loss.router_bias, fix)
        if self.rollout.source is not None:
            self._check_rollouts(self.rollout.source)
        self._check_eval()

    def _check_steps(self) -> None:
        """Check the settings that depend on the number of steps."""
        endless = self.data.epochs is None and self.run.steps is None
        need(not endless, "run.steps", None, "set run.steps=1000 or data.epochs=1, otherwise the run never ends")
        falls = self.schedule.kind != "constant"
        fix = f"set run.steps=1000: schedule.kind {self.schedule.kind!r} needs the number of steps"
        need(self.run.steps is not None or not falls, "run.steps", None, fix)
        if self.run.steps is not None:
            need(
                self.schedule.warmup <= self.run.steps,
                "schedule.warmup",
                self.schedule.warmup,
                f"give at most {self.run.steps}, which is run.steps",
            )
            fix = f"give less than {self.run.steps}, which is run.steps, otherwise the policy is never trained"
            need(self.critic.warmup < self.run.steps, "critic.warmup", self.critic.warmup, fix)

    def _check_reference(self) -> None:
        """Check the settings of the reference model.

        If the loss needs a reference model and `reference.path` is not set, `reference.path` becomes `model.path`.
        """
        task, path = self.loss.task, self.reference.path
        if not task.has_reference:
            used = path is None or self.loss.kl_coefficient > 0
            need(
                used,
                "reference.path",
                path,
                "leave it out, or give loss.kl_coefficient a value above 0: only the KL term uses this model",
            )
            return
        refresh = self.reference.refresh
        fix = f"leave it out: the reference of {task.title} never changes"
        need(refresh is None, "reference.refresh", refresh, fix)
        if self.loss.settings().needs_reference and path is None:
            fix = "set reference.path: a model with random weights cannot be the reference"
            need(self.model.init == "weights", "reference.path", path, fix)
            object.__setattr__(self, "reference", replace(self.reference, path=self.model.path))

    def _check_eval(self) -> None:
        """Check `[eval]` and `checkpoint.best`."""
        task, sampled = self.loss.task, self.rollout.source is not None
        if self.eval.path and (not task.in_rows or sampled):
            fix = "set rollout.reward: a run on finished rollouts has no sampler to answer held-out prompts"
            need(sampled, "eval.path", list(self.eval.path), fix)
            stale = self.rollout.staleness
            fix = (
                "set rollout.staleness=0, or set eval.path=[] and use padfree eval: with staleness, the sampler is "
                "busy with responses for later batches"
            )
            need(stale == 0 or not self.trains, "rollout.staleness", stale, fix)
        best = self.checkpoint.best
        if best is None or not self.trains:
            return
        known = [f"eval/{name}" for name in (TASKS["rl"] if sampled else task).eval_metrics]
        if sampled and self.eval.samples_per_prompt == 1:
            known.remove("eval/pass@k")
        right = best in known or (best.startswith("eval/") and f"eval/{best.rpartition('/')[2]}" in known)
        need(
            right,
            "checkpoint.best",
            best,
            f"give one of {', '.join(known)}, or the metric of a single held-out file, as in eval/FILE/NAME",
        )

    def _check_rollouts(self, setting: str) -> None:
        """Check the settings of a run that samples responses.

        `setting`: the name of the setting that makes the run sample responses, such as "rollout.reward".
        """
        command, sampled = self.loss.command, self.loss.task.samples_responses
        value = getattr(self.rollout, setting.removeprefix("rollout."))
        need(sampled, setting, value, f"leave it out: padfree {command} does not sample responses")
        if self.trains:
            self._check_groups()
        fix = f"give at most {self.run.timeout:g}, which is run.timeout: other processes wait no longer than this"
        limit = self.rollout.episode_timeout
        apart = self.rollout.has_episodes or self.rollout.on_failure == "skip" or self.rollout.reward_processes > 0
        need(not apart or limit <= self.run.timeout, "rollout.episode_timeout", limit, fix)
        limit = self.rollout.timeout
        need(not self.rollout.has_servers or limit <= self.run.timeout, "rollout.timeout", limit, fix)
        reward = self.rollout.reward
        judged = model_of(reward) is not None
        fix = "leave it out: rollout.reward is a reward model, which runs on the devices of the run, not in processes"
        processes = self.rollout.reward_processes
        need(not judged or not processes, "rollout.reward_processes", processes, fix)
        in_script = next((each for each in (reward, self.eval.reward) if in_main_script(each)), None)
        fix = f"set 0, or move the function of {in_script!r} to a module: other processes cannot import the main script"
        need(in_script is None or not processes, "rollout.reward_processes", processes, fix)
        need(model_of(reward) != "", "rollout.reward", reward, "add the missing folder, as in model:folder")
        fix = "leave it out: rollout.reward also scores held-out responses, and eval.reward cannot be a reward model"
        need(model_of(self.eval.reward) is None, "eval.reward", self.eval.reward, fix)

    def _check_groups(self) -> None:
        """Check that the loss can be computed from the groups of sampled responses."""
        group, samples = self.rollout.samples_per_prompt, self.batch.samples
        need(
            samples is not None,
            "batch.samples",
            None,
            "set batch.samples=64 and batch.tokens=none: rollouts need a number of samples",
        )
        assert samples is not None
        need(
            samples % group == 0,
            "batch.samples",
            samples,
            f"give a multiple of {group}, which is rollout.samples_per_prompt",
        )
        advantage = self.loss.advantage
        given = advantage == "given"
        need(
            not given,
            "loss.advantage",
            advantage,
            "set loss.advantage=grpo: the value 'given' takes advantages from rollout files, but this run samples "
            "its responses",
        )
        compared = group > 1 or advantage not in GROUPED or self.loss.task.in_rows
        fix = f"set rollout.samples_per_prompt=8 or loss.advantage=reinforce++: {advantage!r} compares responses"
        need(compared, "rollout.samples_per_prompt", group, fix)
        known = self.loss.kl_coefficient == 0 or self.reference.path is not None
        fix = "set reference.path to a model, for example to that of model.path, or set loss.kl_coefficient=0"
        need(known, "reference.path", None, fix)

    def with_held_out_data(self) -> Config:
        """Return these settings with the held-out data of `eval.path` in place of the training data."""
        if not self.eval.path:
            raise missing_held_out()
        data = replace(self.data, path=self.eval.path, sources=(), split=self.eval.split)
        reward = self.eval.reward or self.rollout.reward
        return replace(self, data=data, rollout=replace(self.rollout, reward=reward, staleness=0))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested dictionaries of JSON values, one per section."""
        values = asdict(self)
        del values["given"]
        return values


def missing_held_out() -> UserError:
    return UserError("eval.path", "missing", "give held-out data, as in eval.path=test.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig(Config):
    """All settings of an evaluation without training. Settings that only training uses are not checked together."""

    trains: ClassVar[bool] = False
