"""One frozen dataclass for each section of settings; a value that cannot be is refused. What settings of several
sections cannot be together is in `padfree.config.config`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from padfree.config.choices import (
    Better,
    CheckpointingOrAuto,
    CompilerOrAuto,
    ContextMethod,
    DeviceName,
    ExportDtype,
    HeadMemory,
    LayerKernels,
    LayoutKind,
    LossOn,
    OnBadRow,
    Overlong,
    PromptFormat,
    RunOverlong,
    ScheduleKind,
    SharePrefixes,
    Turns,
)
from padfree.config.mixture import DataSource, check_sources
from padfree.config.models import expand_home
from padfree.config.prompt_template import template_parts
from padfree.config.rules import LARGEST_GIB, SMALLEST_GIB, check_seconds, need

MOST_EPOCHS = 100_000
"""The steps of a run are counted epoch by epoch before it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """`path`: files or folders, or a Hub id; what else there is belongs to `padfree.data`. `sources`: a mixture."""

    path: tuple[str, ...] = ()
    sources: tuple[DataSource, ...] = ()  # in place of path: several, each with a weight
    subset: str | None = None  # of a Hub id
    split: str = "train"  # of a Hub id
    columns: dict[str, str] = field(default_factory=dict)
    loss_on: LossOn = "assistant"
    turns: Turns = "auto"  # assistant turns of a conversation in one sample, or in one each
    system: str | None = None  # the system prompt of conversations that have none
    prompt_template: str | None = None  # how a text prompt is made of columns: "{prompt}\n\n{hint}"
    prompt_format: PromptFormat = "auto"
    chat_template: str | None = None  # a file; None: the tokenizer's own
    append_eos: bool = True
    max_length: int | None = None
    overlong: Overlong = "error"
    on_bad_row: OnBadRow = "error"
    shuffle: bool = True
    epochs: int | None = 1  # None: until run.steps

    def __post_init__(self) -> None:
        expand_home(self, "path")
        if not self.path and not self.sources:
            raise ValueError(
                "data.path: missing; give one file, folder or Hub id, or more, as in data.path=train.jsonl, or a "
                "mixture as data.sources"
            )
        both = bool(self.path and self.sources)
        cure = "data.sources names the data, too; set data.path=[] for the mixture, or data.sources=[] for the path"
        need(not both, "data.path", list(self.path), cure)
        check_sources(self.sources)
        need(all(self.path), "data.path", list(self.path), "give a file, folder or Hub id in place of the empty name")
        need(self.subset != "", "data.subset", self.subset, "give a name, or leave it out")
        need(bool(self.split), "data.split", self.split, "give a name, such as train")
        need(self.chat_template != "", "data.chat_template", self.chat_template, "give a file, or leave it out")
        need(self.system != "", "data.system", self.system, "give a system prompt, or leave it out")
        plain = self.system is not None and self.prompt_format == "plain"
        need(
            not plain,
            "data.system",
            self.system,
            "leave it out, or set data.prompt_format=chat: plain prompts have none",
        )
        if self.prompt_template is not None:
            template_parts(self.prompt_template)
        need(self.max_length is None or self.max_length >= 2, "data.max_length", self.max_length, "give 2 or more")
        need(
            self.epochs is None or 1 <= self.epochs <= MOST_EPOCHS,
            "data.epochs",
            self.epochs,
            f"give 1 to {MOST_EPOCHS:,}, or none and run.steps",
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """All files, folders and Hub ids, of `path` or of all sources."""
        return self.path or tuple(path for source in self.sources for path in source.path)

    def of_source(self, source: DataSource) -> DataConfig:
        """The settings under which one source is read as if it were the only data."""
        own = {name: getattr(source, name) for name in ("columns", "split", "subset")}
        given = {name: value for name, value in own.items() if value is not None}
        return replace(self, path=source.path, sources=(), **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out data: `path` as in `data`, whose other settings hold here too. Without it nothing is evaluated."""

    path: tuple[str, ...] = ()
    split: str = "test"  # of a Hub id
    every: int | None = None  # steps; None: at the start and at the end only
    start: bool = True  # before the first step, too
    samples: int | None = None  # the first so many; None: all
    # Of responses that are sampled
    reward: str | None = None  # None: rollout.reward
    greedy: bool = True  # the likeliest token at every place; false: drawn at loss.temperature
    draws: int = 1  # responses to a prompt
    passes: float = 1.0  # a response with this reward or more is right

    def __post_init__(self) -> None:
        expand_home(self, "path")
        need(all(self.path), "eval.path", list(self.path), "give a file, folder or Hub id in place of the empty name")
        need(bool(self.split), "eval.split", self.split, "give a name, such as test")
        for name in ("every", "samples", "draws"):
            value = getattr(self, name)
            need(value is None or value >= 1, f"eval.{name}", value, "give 1 or more")
        cure = "set eval.greedy=false, the likeliest response is always the same"
        need(self.draws == 1 or not self.greedy, "eval.draws", self.draws, cure)
        need(math.isfinite(self.passes), "eval.passes", self.passes, "give a finite number")
        used = bool(self.path) or (self.every is None and self.reward is None)
        need(used, "eval.path", list(self.path), "give held-out files, eval.every and eval.reward are about them")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """A step's global batch: a number of `samples`, or at most so many `tokens`; `max_tokens` is one device's cap."""

    samples: int | None = None
    tokens: int | None = None
    max_tokens: int
    overlong: RunOverlong = "error"  # a sample longer than tokens or max_tokens
    buffer: int = 256  # samples that a token budget chooses from
    cost: str | None = None  # a file of `padfree plan --calibrate`; None: counted from the model's config
    share_prefixes: SharePrefixes = "auto"  # what samples of a group begin with is computed once, where that pays

    def __post_init__(self) -> None:
        expand_home(self, "cost")
        given = (self.samples is not None) + (self.tokens is not None)
        cure = "set batch.samples=64, or batch.tokens" if not given else "set batch.samples=none or batch.tokens=none"
        need(given == 1, "batch.samples", self.samples, cure)
        for name in ("samples", "tokens", "max_tokens", "buffer"):
            value = getattr(self, name)
            need(value is None or value >= 1, f"batch.{name}", value, "give 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW. Weight decay falls on matrices, embeddings included, and not on norms and biases."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0  # None: no clipping

    def __post_init__(self) -> None:
        need(0 <= self.lr < math.inf, "optimizer.lr", self.lr, "give 0 or more")
        need(all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "give two numbers in [0, 1)")
        need(0 < self.eps < math.inf, "optimizer.eps", self.eps, "give more than 0")
        decay = self.weight_decay
        need(0 <= decay < math.inf, "optimizer.weight_decay", decay, "give 0 or more")
        norm = self.max_grad_norm
        need(norm is None or norm > 0, "optimizer.max_grad_norm", norm, 'give more than 0, or "none"')


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate's course: `warmup` steps up, then as `kind` says down to `final` of it at `run.steps`."""

    kind: ScheduleKind = "constant"
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        need(self.warmup >= 0, "schedule.warmup", self.warmup, "give 0 or more steps")
        need(0 <= self.final <= 1, "schedule.final", self.final, "give a share of the learning rate, 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Processes are replicate x shard x context; shard is what the number of processes leaves."""

    context: Literal["auto"] | int = 1  # ranks that share every row; auto: as many as each row wants
    replicate: int = 1
    layout: LayoutKind = "balanced"
    method: ContextMethod = "allgather"
    checkpointing: CheckpointingOrAuto = "auto"  # the fastest that fits the device
    compile: CompilerOrAuto | bool = "auto"  # true: inductor; auto: on a GPU
    kernels: LayerKernels = "auto"  # padfree's operators in compiled layers; none: torch.compile alone
    head_memory: HeadMemory | float = "speed"  # 4 and 1 GiB, or so many; with less, some is computed twice
    reshard: Literal["auto"] | bool = "auto"  # true: only layers that compute are whole; false: all, if that fits
    offload: bool = False  # weights, gradients and optimizer state wait on the CPU

    @property
    def head_bytes(self) -> HeadMemory | int:
        """`head_memory` as the head takes it."""
        return int(self.head_memory * 2**30) if isinstance(self.head_memory, float) else self.head_memory

    def most_context(self, processes: int) -> int:
        """How many ranks can share a row: with `auto` all that share one set of weights."""
        return max(1, processes // self.replicate) if self.context == "auto" else self.context

    def __post_init__(self) -> None:
        fine = self.context == "auto" or self.context >= 1
        need(fine, "parallel.context", self.context, "give 1 or more, or auto")
        need(self.replicate >= 1, "parallel.replicate", self.replicate, "give 1 or more")
        if isinstance(self.head_memory, float):
            fits = SMALLEST_GIB <= self.head_memory <= LARGEST_GIB
            need(fits, "parallel.head_memory", self.head_memory, "give speed, low or GiB above 0")
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "inductor" if self.compile else "none")
        compiled = self.checkpointing != "host" or self.compile != "none"
        need(compiled, "parallel.checkpointing", "host", "it is for compiled layers: set parallel.compile=inductor")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """`every` so many steps, and at the end; the last `keep` stay. `export`: at the end, a folder for transformers."""

    every: int | None = None  # None: at the end only
    keep: int = 2
    asynchronous: bool = False
    resume: bool = True  # from the newest in the run folder, if there is one
    export: bool = True
    export_dtype: ExportDtype = "base"  # of the exported weights; base: model's
    best: str | None = None  # a metric of the evaluations, such as eval/loss; its best checkpoint is kept and exported
    better: Better = "auto"  # auto: lowest for losses, perplexity and lengths

    def __post_init__(self) -> None:
        need(self.every is None or self.every >= 1, "checkpoint.every", self.every, "give 1 or more")
        need(self.keep >= 1, "checkpoint.keep", self.keep, "give 1 or more")
        unused = self.better != "auto" and self.best is None
        need(not unused, "checkpoint.better", self.better, "leave it out, or set checkpoint.best")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """Where metrics go besides `metrics.jsonl`. `wandb` and `trackio` are names of projects."""

    tensorboard: bool = False
    wandb: str | None = None
    trackio: str | None = None

    def __post_init__(self) -> None:
        for name in ("wandb", "trackio"):
            need(getattr(self, name) != "", f"track.{name}", "", "give a project's name, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """`folder` holds everything a run writes. `steps` is a number of optimizer steps."""

    folder: str
    steps: int | None = None  # None: until the data ends
    seed: int = 0
    device: DeviceName = "auto"
    timeout: float = 600.0
    deterministic: bool = False  # only algorithms that give the same bits again

    def __post_init__(self) -> None:
        expand_home(self, "folder")
        need(bool(self.folder), "run.folder", self.folder, "give the folder that the run writes to")
        need(self.steps is None or self.steps >= 1, "run.steps", self.steps, "give 1 or more")
        need(0 <= self.seed < 1 << 63, "run.seed", self.seed, "give 0 or more, below 2**63")
        check_seconds("run.timeout", self.timeout)
