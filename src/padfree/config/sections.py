"""One frozen dataclass for each section of settings; a value that cannot be, alone or with others, is refused."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os.path import expanduser
from typing import Any, Literal


def _need(right: bool, name: str, value: Any, cure: str) -> None:
    if not right:
        raise ValueError(f"{name}: {value!r}; {cure}")


def _expand(section: Any, *names: str) -> None:
    """Put the user's home folder in the place of `~` in paths; a shell does that only where a word begins with it."""
    for name in names:
        value = getattr(section, name)
        if isinstance(value, str):
            object.__setattr__(section, name, expanduser(value))
        elif isinstance(value, tuple):
            object.__setattr__(section, name, tuple(expanduser(entry) for entry in value))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """`path`: a folder, a Hub id, or a config file (random weights). `dtype` is what is computed in."""

    path: str
    init: Literal["weights", "random"] = "weights"  # random: whatever weights there are, the run begins without them
    tokenizer: str | None = None  # None: that of the model
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _expand(self, "path", "tokenizer")
        _need(bool(self.path), "model.path", self.path, "give a folder, a Hub id or a config file")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (PEFT) instead of all weights: `rank` 0 is without them."""

    rank: int = 0
    alpha: float | None = None  # None: the rank, a scale of 1
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)  # or names of modules, such as q_proj
    export: Literal["merged", "adapter"] = "merged"

    def __post_init__(self) -> None:
        _need(self.rank >= 0, "lora.rank", self.rank, "give 0 (all weights are trained) or more")
        _need(self.alpha is None or self.alpha > 0, "lora.alpha", self.alpha, "give more than 0")
        _need(0 <= self.dropout < 1, "lora.dropout", self.dropout, "give 0 up to, but not including, 1")
        _need(len(self.targets) > 0, "lora.targets", list(self.targets), 'give names of modules, or "all-linear"')


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """The model that the KL term compares with: `path` as in `model`, or none (rollouts may bring `ref_logprobs`)."""

    path: str | None = None
    offload: bool = False  # its weights wait on the CPU while it is not asked
    refresh: int | None = None  # after so many rollout batches it takes the trained model's weights; None: never

    def __post_init__(self) -> None:
        _expand(self, "path")
        _need(self.path != "", "reference.path", self.path, "give a folder, a Hub id, or leave it out")
        _need(self.refresh is None or self.refresh >= 1, "reference.refresh", self.refresh, "give 1 or more")
        used = self.path is not None or not (self.offload or self.refresh)
        _need(used, "reference.path", self.path, "give it, reference.offload and reference.refresh are about it")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """In-process rollouts: `reward` names a built-in or `module:function`; None: `data.path` holds finished rollouts.

    With it `data.path` holds prompts, `batch.samples` counts responses, and `loss.temperature` is the sampler's too.
    """

    reward: str | None = None
    group: int = 8  # responses to a prompt
    max_new_tokens: int = 256
    batch: int = 64  # responses a device writes at a time

    def __post_init__(self) -> None:
        for name in ("group", "max_new_tokens", "batch"):
            _need(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "give 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """`path`: files or folders, or a Hub id; what else there is belongs to `padfree.data`."""

    path: tuple[str, ...]
    columns: dict[str, str] = field(default_factory=dict)
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    append_eos: bool = True
    max_length: int | None = None
    overlong: Literal["error", "truncate", "drop"] = "error"
    on_bad_row: Literal["error", "skip"] = "error"
    shuffle: bool = True
    epochs: int | None = 1  # None: until run.steps

    def __post_init__(self) -> None:
        _expand(self, "path")
        _need(len(self.path) > 0, "data.path", list(self.path), "give one file, folder or Hub id, or more")
        _need(self.max_length is None or self.max_length >= 2, "data.max_length", self.max_length, "give 2 or more")
        _need(self.epochs is None or self.epochs >= 1, "data.epochs", self.epochs, "give 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """A step's global batch: a number of `samples`, or at most so many `tokens`; `max_tokens` is one device's cap."""

    samples: int | None = None
    tokens: int | None = None
    max_tokens: int
    overlong: Literal["error", "alone"] = "error"  # a sample longer than tokens or max_tokens
    buffer: int = 256  # samples that a token budget chooses from
    cost: str | None = None  # a file of `padfree plan --calibrate`; None: counted from the model's config

    def __post_init__(self) -> None:
        _expand(self, "cost")
        given = (self.samples is not None) + (self.tokens is not None)
        _need(given == 1, "batch.samples", self.samples, "give either batch.samples or batch.tokens")
        for name in ("samples", "tokens", "max_tokens", "buffer"):
            value = getattr(self, name)
            _need(value is None or value >= 1, f"batch.{name}", value, "give 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW. Weight decay falls on matrices, embeddings included, and not on norms and biases."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0  # None: no clipping

    def __post_init__(self) -> None:
        _need(self.lr >= 0, "optimizer.lr", self.lr, "give 0 or more")
        _need(all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "give two numbers in [0, 1)")
        _need(self.eps > 0, "optimizer.eps", self.eps, "give more than 0")
        _need(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "give 0 or more")
        norm = self.max_grad_norm
        _need(norm is None or norm > 0, "optimizer.max_grad_norm", norm, 'give more than 0, or "none"')


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate's course: `warmup` steps up, then as `kind` says down to `final` of it at `run.steps`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _need(self.warmup >= 0, "schedule.warmup", self.warmup, "give 0 or more steps")
        _need(0 <= self.final <= 1, "schedule.final", self.final, "give a share of the learning rate, 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Processes are replicate x shard x context; shard is what the number of processes leaves."""

    context: int = 1
    replicate: int = 1
    layout: Literal["contiguous", "headtail", "balanced"] = "balanced"
    method: Literal["allgather", "ring", "ulysses"] = "allgather"
    checkpointing: Literal["none", "full", "selective", "host"] = "none"
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    head_memory: Literal["speed", "low"] | float = "speed"  # 4 and 1 GiB, or so many; with less, some is computed twice
    reshard: bool = True  # layers are gathered again for backward; false: they stay whole, faster in more memory
    offload: bool = False  # weights, gradients and optimizer state wait on the CPU

    @property
    def head_bytes(self) -> Literal["speed", "low"] | int:
        """`head_memory` as the head takes it."""
        return int(self.head_memory * 2**30) if isinstance(self.head_memory, float) else self.head_memory

    def __post_init__(self) -> None:
        for name in ("context", "replicate"):
            _need(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "give 1 or more")
        if isinstance(self.head_memory, float):
            _need(self.head_memory > 0, "parallel.head_memory", self.head_memory, "give speed, low or GiB above 0")
        compiled = self.checkpointing != "host" or self.compile != "none"
        _need(compiled, "parallel.checkpointing", "host", "it is for compiled layers: set parallel.compile=inductor")


@dataclass(frozen=True, kw_only=True, slots=True)
class BandConfig:
    """Bounds of an importance weight; None: those of `padfree.losses`."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTISConfig(BandConfig):
    geometric: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMaskConfig(BandConfig):
    statistic: Literal["mean", "sum", "token"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSMConfig:
    delta: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised. Everything below `temperature` is for RL; `None` bounds are those of `padfree.losses`."""

    kind: Literal["sft", "clip", "gspo", "cispo", "reinforce"] = "sft"
    weights: Literal["token-mean", "sample-mean", "sum-of-sample-mean", "sample-sum", "constant", "group-mean"] = (
        "token-mean"
    )
    constant: float | None = None  # the divisor of weights = "constant"
    temperature: float = 1.0
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "given"] = "grpo"
    low: float | None = None
    high: float | None = None
    dual: float | None = None
    old_policy: Literal["trainer", "sampler", "current"] = "trainer"
    corrections: tuple[Literal["token_tis", "sequence_tis", "icepop", "sequence_mask", "opsm"], ...] = ()
    token_tis: BandConfig = BandConfig()  # settings of the corrections that are named
    sequence_tis: SequenceTISConfig = SequenceTISConfig()
    icepop: BandConfig = BandConfig()
    sequence_mask: SequenceMaskConfig = SequenceMaskConfig()
    opsm: OPSMConfig = OPSMConfig()
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    entropy_coefficient: float = 0.0
    epochs: int = 1  # passes over a rollout batch
    mini_batches: int = 1  # optimizer steps in a pass

    def __post_init__(self) -> None:
        _need(self.temperature > 0, "loss.temperature", self.temperature, "give more than 0")
        for name in ("epochs", "mini_batches"):
            _need(getattr(self, name) >= 1, f"loss.{name}", getattr(self, name), "give 1 or more")
        bounds = {"clip": ("low", "high", "dual"), "gspo": ("low", "high"), "cispo": ("low", "high")}
        for name in ("low", "high", "dual"):
            value = getattr(self, name)
            fits = value is None or name in bounds.get(self.kind, ())
            _need(fits, f"loss.{name}", value, f"leave it out, loss.kind {self.kind!r} has no such bound")
        for name in ("token_tis", "sequence_tis", "icepop", "sequence_mask", "opsm"):
            for setting, value in asdict(getattr(self, name)).items():
                asked = value is None or name in self.corrections
                _need(asked, f"loss.{name}.{setting}", value, f"leave it out, or add {name!r} to loss.corrections")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """`every` so many steps, and at the end; the last `keep` stay. `export`: at the end, a folder for transformers."""

    every: int | None = None  # None: at the end only
    keep: int = 2
    asynchronous: bool = False
    resume: bool = True  # from the newest in the run folder, if there is one
    export: bool = True
    export_dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"  # of the exported weights; base: model's

    def __post_init__(self) -> None:
        _need(self.every is None or self.every >= 1, "checkpoint.every", self.every, "give 1 or more")
        _need(self.keep >= 1, "checkpoint.keep", self.keep, "give 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """Where metrics go besides `metrics.jsonl`. `wandb` and `trackio` are names of projects."""

    tensorboard: bool = False
    wandb: str | None = None
    trackio: str | None = None

    def __post_init__(self) -> None:
        for name in ("wandb", "trackio"):
            _need(getattr(self, name) != "", f"track.{name}", "", "give a project's name, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """`folder` holds everything a run writes. `steps` is a number of optimizer steps."""

    folder: str
    steps: int | None = None  # None: until the data ends
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 600.0
    deterministic: bool = False  # only algorithms that give the same bits again

    def __post_init__(self) -> None:
        _expand(self, "folder")
        _need(bool(self.folder), "run.folder", self.folder, "give the folder that the run writes to")
        _need(self.steps is None or self.steps >= 1, "run.steps", self.steps, "give 1 or more")
        _need(0 <= self.seed < 1 << 63, "run.seed", self.seed, "give 0 or more, below 2**63")
        _need(self.timeout > 0, "run.timeout", self.timeout, "give more than 0 seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    run: RunConfig
    lora: LoraConfig = LoraConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()

    def __post_init__(self) -> None:
        endless = self.data.epochs is None and self.run.steps is None
        _need(not endless, "run.steps", None, "give it, or data.epochs, or the run never ends")
        falls = self.schedule.kind != "constant"
        _need(
            self.run.steps is not None or not falls, "run.steps", None, f"schedule.kind {self.schedule.kind!r} needs it"
        )
        if self.run.steps is not None:
            _need(
                self.schedule.warmup <= self.run.steps,
                "schedule.warmup",
                self.schedule.warmup,
                f"give at most run.steps, {self.run.steps}",
            )
        if self.loss.kind == "sft":
            _need(
                self.loss.epochs == self.loss.mini_batches == 1, "loss.epochs", self.loss.epochs, "SFT has data.epochs"
            )
        else:
            _need(self.batch.samples is not None, "batch.samples", None, "give it, RL takes whole groups of samples")
        used = self.reference.path is None or self.loss.kl_coefficient > 0
        _need(used, "reference.path", self.reference.path, "leave it out, or set loss.kl_coefficient")
        if self.rollout.reward is not None:
            _need(self.loss.kind != "sft", "rollout.reward", self.rollout.reward, "leave it out, SFT has no rollouts")
            group, samples = self.rollout.group, self.batch.samples
            assert samples is not None
            _need(samples % group == 0, "batch.samples", samples, f"give a multiple of rollout.group, {group}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values by section, fit for JSON."""
        return asdict(self)
