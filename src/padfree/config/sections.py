"""One frozen dataclass for each section of settings; a value that cannot be is refused. What settings of several
sections cannot be together is in `padfree.config.config`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
    SharePrefixes,
    Turns,
)
from padfree.config.mixture import DataSource, check_sources
from padfree.config.model_sections import expand_home
from padfree.config.prompt_template import template_parts
from padfree.config.setting import SAMPLES, STAYS, check_table, need_of, setting
from padfree.config.units import GIB, SECONDS
from padfree.errors import UserError, need

TURNS_ARE_CHOSEN = need_of(
    "loss.task.turns",
    fix="leave it out, what is trained on is the response, or compared are the answers",
)
HELD_OUT = need_of("path", fix="set eval.path to held-out data, or leave it out")
SAMPLED = need_of("rollout.source", fix="leave it out, nothing is sampled in this run")
SEVERAL_DRAWS = need_of("greedy", False, fix="set eval.greedy=false, the likeliest response is always the same")

MOST_EPOCHS = 100_000
"""The steps of a run are counted epoch by epoch before it starts."""

EPOCHS_FIX = f"give 1 to {MOST_EPOCHS:,}, or none and run.steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """`path`: files or folders, or a Hub id; what else there is belongs to `padfree.data`. `sources`: a mixture."""

    path: tuple[str, ...] = setting((), resume=SAMPLES)
    sources: tuple[DataSource, ...] = setting((), resume=SAMPLES)  # in place of path: several, each with a weight
    subset: str | None = setting(None, filled="give a name, or leave it out", resume=SAMPLES)  # of a Hub id
    split: str = setting("train", filled="give a name, such as train", resume=SAMPLES)  # of a Hub id
    columns: dict[str, str] = setting(factory=dict, resume=SAMPLES)
    loss_on: LossOn = setting("assistant", needs=TURNS_ARE_CHOSEN, resume=SAMPLES)
    turns: Turns = setting("auto", resume=SAMPLES)  # assistant turns of a conversation in one sample, or in one each
    system: str | None = setting(
        None,
        filled="give a system prompt, or leave it out",
        needs=need_of(
            "prompt_format", "auto", "chat", fix="leave it out, or set data.prompt_format=chat: plain prompts have none"
        ),
        resume=SAMPLES,
    )  # the system prompt of conversations that have none
    prompt_template: str | None = setting(
        None, resume=SAMPLES
    )  # how a text prompt is made of columns: "{prompt}\n\n{hint}"
    prompt_format: PromptFormat = setting("auto", resume=SAMPLES)
    chat_template: str | None = setting(
        None, filled="give a file, or leave it out", resume=SAMPLES
    )  # a file; None: the tokenizer's own
    append_eos: bool = setting(True, resume=SAMPLES)
    max_length: int | None = setting(None, least=2, resume=SAMPLES)
    overlong: Overlong = setting("error", resume=SAMPLES)
    on_bad_row: OnBadRow = setting("error", resume=SAMPLES)
    shuffle: bool = setting(True, resume=STAYS)
    epochs: int | None = setting(1, least=1, most=MOST_EPOCHS, fix=EPOCHS_FIX, resume=STAYS)  # None: until run.steps

    def __post_init__(self) -> None:
        expand_home(self, "path")
        if not self.path and not self.sources:
            raise UserError(
                "data.path",
                "missing",
                "give one file, folder or Hub id, or more, as in data.path=train.jsonl, or a mixture as data.sources",
            )
        both = bool(self.path and self.sources)
        cure = "data.sources names the data, too; set data.path=[] for the mixture, or data.sources=[] for the path"
        need(not both, "data.path", list(self.path), cure)
        check_sources(self.sources)
        need(all(self.path), "data.path", list(self.path), "give a file, folder or Hub id in place of the empty name")
        check_table(self, "data.")
        if self.prompt_template is not None:
            template_parts(self.prompt_template)

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
    split: str = setting("test", filled="give a name, such as test")  # of a Hub id
    every: int | None = setting(None, least=1, needs=HELD_OUT)  # steps; None: at the start and at the end only
    start: bool = True  # before the first step, too
    samples: int | None = setting(None, least=1)  # the first so many; None: all
    # Of responses that are sampled
    reward: str | None = setting(None, needs=(HELD_OUT, SAMPLED))  # None: rollout.reward
    greedy: bool = setting(True, needs=SAMPLED)  # the likeliest token at every place; false: drawn at loss.temperature
    samples_per_prompt: int = setting(
        1, least=1, needs=(SEVERAL_DRAWS, SAMPLED), formerly="draws"
    )  # responses to a prompt
    pass_threshold: float = setting(
        1.0, least=-math.inf, fix="give a finite number", needs=SAMPLED, formerly="passes"
    )  # a response with this reward or more is right

    def __post_init__(self) -> None:
        expand_home(self, "path")
        need(all(self.path), "eval.path", list(self.path), "give a file, folder or Hub id in place of the empty name")
        check_table(self, "eval.")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """A step's global batch: a number of `samples`, or at most so many `tokens`; `max_tokens` is one device's cap."""

    samples: int | None = setting(None, least=1, resume=STAYS)
    tokens: int | None = setting(None, least=1, resume=STAYS)
    max_tokens: int = setting(least=1)
    overlong: RunOverlong = setting(
        "error", resume="may change with batch.samples"
    )  # a sample longer than tokens or max_tokens
    buffer: int = setting(
        256, least=1, resume="may change with batch.samples"
    )  # samples that a token budget chooses from
    cost: str | None = None  # a file of `padfree plan --calibrate`; None: counted from the model's config
    share_prefixes: SharePrefixes = "auto"  # what samples of a group begin with is computed once, where that pays

    def __post_init__(self) -> None:
        expand_home(self, "cost")
        given = (self.samples is not None) + (self.tokens is not None)
        cure = "set batch.samples=64, or batch.tokens" if not given else "set batch.samples=none or batch.tokens=none"
        need(given == 1, "batch.samples", self.samples, cure)
        check_table(self, "batch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Processes are replicate x shard x context; shard is what the number of processes leaves."""

    context: Literal["auto"] | int = setting(
        1, least=1, fix="give 1 or more, or auto"
    )  # ranks that share every row; auto: as many as each row wants
    replicate: int = setting(1, least=1)
    layout: LayoutKind = "balanced"
    method: ContextMethod = "allgather"
    checkpointing: CheckpointingOrAuto = "auto"  # the fastest that fits the device
    compile: CompilerOrAuto | bool = "auto"  # true: inductor; auto: on a GPU
    kernels: LayerKernels = "auto"  # padfree's operators in compiled layers; none: torch.compile alone
    head_memory: HeadMemory | float = setting(
        "speed", **GIB, fix="give speed, low or GiB above 0"
    )  # 4 and 1 GiB, or so many; with less, some is computed twice
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
        check_table(self, "parallel.")
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "inductor" if self.compile else "none")
        compiled = self.checkpointing != "host" or self.compile != "none"
        need(compiled, "parallel.checkpointing", "host", "it is for compiled layers: set parallel.compile=inductor")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """`every` so many steps, and at the end; the last `keep` stay. `export`: at the end, a folder for transformers."""

    every: int | None = setting(None, least=1)  # None: at the end only
    keep: int = setting(2, least=1)
    asynchronous: bool = False
    resume: bool = True  # from the newest in the run folder, if there is one
    export: bool = True
    export_dtype: ExportDtype = "base"  # of the exported weights; base: model's
    best: str | None = setting(
        None, needs=need_of("eval.path", fix="set eval.path to held-out data, it is measured there")
    )  # a metric of the evaluations, such as eval/loss; its best checkpoint is kept and exported
    better: Better = setting(
        "auto", needs=need_of("best", fix="leave it out, or set checkpoint.best")
    )  # auto: lowest for losses, perplexity and lengths

    def __post_init__(self) -> None:
        check_table(self, "checkpoint.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """Where metrics go besides `metrics.jsonl`. `wandb` and `trackio` are names of projects."""

    tensorboard: bool = False
    wandb: str | None = setting(None, filled="give a project's name, or leave it out")
    trackio: str | None = setting(None, filled="give a project's name, or leave it out")

    def __post_init__(self) -> None:
        check_table(self, "track.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """`folder` holds everything a run writes. `steps` is a number of optimizer steps."""

    folder: str = setting(filled="give the folder that the run writes to")
    steps: int | None = setting(None, least=1)  # None: until the data ends
    seed: int = setting(0, least=0, most=(1 << 63) - 1, fix="give 0 or more, below 2**63", resume=STAYS)
    device: DeviceName = "auto"
    timeout: float = setting(600.0, **SECONDS)
    deterministic: bool = False  # only algorithms that give the same bits again

    def __post_init__(self) -> None:
        expand_home(self, "folder")
        check_table(self, "run.")
