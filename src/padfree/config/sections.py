"""The sections of a recipe except models, rollouts and the loss: one frozen dataclass each.

A section checks its own settings. `padfree.config.config` has the rules that involve several sections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from padfree.choices import (
    Asynchronous,
    Better,
    Checkpointing,
    CompilerOrAuto,
    ContextMethod,
    DeviceName,
    ExportDtype,
    Float8Product,
    HeadMemory,
    LayerKernels,
    LayoutKind,
    LinearDtype,
    LossOn,
    OnBadRow,
    Overlong,
    PromptFormat,
    RunOverlong,
    SharePrefixes,
    Turns,
)
from padfree.config.checkpointing import check_checkpointing, needs_compiled_layers
from padfree.config.mixture import DataSource, check_sources
from padfree.config.model_sections import expand_home
from padfree.config.prompt_template import template_parts
from padfree.config.setting import SAMPLES, STAYS, check_table, need_of, setting
from padfree.config.units import GIB, SECONDS
from padfree.errors import UserError, need

TURNS_ARE_CHOSEN = need_of(
    "loss.task.turns",
    fix="leave it out: this task trains on whole responses or compares answers",
    about="loss.kind=sft or distill",
)
HELD_OUT = need_of("path", fix="leave it out, or set eval.path to held-out data")
SAMPLED = need_of(
    "rollout.source",
    fix="leave it out: this run samples no responses",
    about="rollout.reward, rollout.environment or rollout.agent",
)
FLOAT8 = need_of("linear", "float8", fix="leave it out, or set parallel.linear=float8")
SEVERAL_DRAWS = need_of("greedy", False, fix="set eval.greedy=false: greedy responses to a prompt are all the same")

IMAGES = need_of("model.vision", True, fix="leave it out, or set model.vision=true")
MOST_IMAGE_PIXELS = 178_956_970
"""Maximum of `data.max_image_pixels`: Pillow refuses larger images."""

MOST_EPOCHS = 100_000
"""Maximum of `data.epochs`. A run may count the steps of every epoch before it starts, which takes time."""

EPOCHS_FIX = f"give 1 to {MOST_EPOCHS:,}, or give none and set run.steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The training data: one path, or a mixture of `sources`."""

    path: tuple[str, ...] = setting(
        (), about="Files or folders (JSONL, JSON, Parquet) or Hub ids with the training data.", resume=SAMPLES
    )
    sources: tuple[DataSource, ...] = setting(
        (), about="A mixture in place of data.path: several sources, each with a weight.", resume=SAMPLES
    )
    subset: str | None = setting(
        None,
        about="The subset of a Hub data set, as in data.path=openai/gsm8k data.subset=main.",
        filled="give the name of a subset of the Hub data set, or leave data.subset out",
        resume=SAMPLES,
    )
    split: str = setting(
        "train",
        about="The split of a Hub data set, or of a folder of `DatasetDict.save_to_disk`.",
        filled="give the name of a split, such as train",
        resume=SAMPLES,
    )
    columns: dict[str, str] = setting(
        factory=dict,
        about='Renames columns: { question = "prompt", answer = "response" } reads your column question as padfree\'s '
        "prompt.",
        resume=SAMPLES,
    )
    loss_on: LossOn = setting(
        "assistant",
        about="The tokens that are trained on: all assistant turns, the last assistant turn, or all tokens.",
        needs=TURNS_ARE_CHOSEN,
        resume=SAMPLES,
    )
    turns: Turns = setting(
        "auto",
        about="together: the assistant turns of a conversation are one sample. apart: each turn is a sample. auto: "
        "together, unless the chat template rewrites earlier turns.",
        resume=SAMPLES,
    )
    system: str | None = setting(
        None,
        about="The system prompt for conversations that have none.",
        filled="give a system prompt, or leave it out",
        needs=need_of(
            "prompt_format",
            "auto",
            "chat",
            fix="leave it out, or set data.prompt_format=chat: plain prompts have no system prompt",
        ),
        resume=SAMPLES,
    )
    prompt_template: str | None = setting(
        None, about='Builds a plain prompt from columns, as in "Question: {question}".', resume=SAMPLES
    )
    prompt_format: PromptFormat = setting(
        "auto",
        about="chat: prompts go through the chat template. plain: they are used as they are. auto: chat if the "
        "tokenizer has a template.",
        resume=SAMPLES,
    )
    chat_template: str | None = setting(
        None,
        about="A file with a chat template; if none, the template of the tokenizer.",
        filled="give the path of a template file, or leave data.chat_template out",
        resume=SAMPLES,
    )
    append_eos: bool = setting(
        True,
        about="Append the end-of-sequence token to plain text and to responses that the chat template does not render.",
        resume=SAMPLES,
    )
    max_length: int | None = setting(None, least=2, about="Maximum length of a sample in tokens.", resume=SAMPLES)
    overlong: Overlong = setting(
        "error", about="What happens to a sample that is longer than data.max_length.", resume=SAMPLES
    )
    on_bad_row: OnBadRow = setting(
        "error",
        about="What happens if a row cannot be used. error: the run ends. skip: the row is left out and listed in "
        "rows.jsonl in the run folder.",
        resume=SAMPLES,
    )
    image_folder: str | None = setting(
        None,
        about="The folder of relative image paths; if none, the folder of the data file.",
        filled="give a folder, or leave data.image_folder out",
        needs=IMAGES,
        resume=SAMPLES,
    )
    max_image_pixels: int = setting(
        1 << 26,
        least=1,
        most=MOST_IMAGE_PIXELS,
        about="Maximum width × height of an image; a row with a larger image cannot be used.",
        needs=IMAGES,
        resume=SAMPLES,
    )
    shuffle: bool = setting(True, about="Shuffle the data in every epoch, with run.seed.", resume=STAYS)
    epochs: int | None = setting(
        1,
        least=1,
        most=MOST_EPOCHS,
        about="Number of passes over the data; if none, as many as run.steps needs.",
        fix=EPOCHS_FIX,
        resume=STAYS,
    )

    def __post_init__(self) -> None:
        expand_home(self, "data.", "path", "image_folder", "chat_template")
        if not self.path and not self.sources:
            raise UserError(
                "data.path",
                "missing",
                "give one or more files, folders or Hub ids, as in data.path=train.jsonl, or a mixture as data.sources",
            )
        both = bool(self.path and self.sources)
        fix = "set data.path=[] to use only data.sources, or set data.sources=[] to use only data.path"
        need(not both, "data.path", list(self.path), fix)
        check_sources(self.sources, self.columns, self.split, self.subset)
        need(all(self.path), "data.path", list(self.path), "give a file, folder or Hub id instead of the empty string")
        check_table(self, "data.")
        if self.prompt_template is not None:
            template_parts(self.prompt_template)

    @property
    def paths(self) -> tuple[str, ...]:
        """All files, folders and Hub ids with training data."""
        return self.path or tuple(path for source in self.sources for path in source.path)

    def of_source(self, source: DataSource) -> DataConfig:
        """Return these settings with `source`, one source of a mixture, as the only data."""
        own = {name: getattr(source, name) for name in ("columns", "split", "subset")}
        given = {name: value for name, value in own.items() if value is not None}
        return replace(self, path=source.path, sources=(), **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out data. The settings of `data` apply to it as well."""

    path: tuple[str, ...] = setting(
        (), about="Files, folders or Hub ids with held-out data; without them nothing is evaluated."
    )
    split: str = setting(
        "test",
        about="The split of a Hub data set, or of a folder of `DatasetDict.save_to_disk`.",
        filled="give the name of a split, such as test",
    )
    every: int | None = setting(
        None,
        least=1,
        about="Number of steps between evaluations; if none, only at the start and at the end.",
        needs=HELD_OUT,
    )
    start: bool = setting(True, about="Evaluate before the first step as well.")
    samples: int | None = setting(
        None, least=1, about="Number of samples to evaluate, from the beginning of the data; if none, all."
    )
    # RL only
    reward: str | None = setting(
        None,
        about="RL: the reward function for held-out responses; if none, rollout.reward.",
        needs=(HELD_OUT, SAMPLED),
    )
    greedy: bool = setting(
        True,
        about="RL: whether to decode greedily. If false, responses are sampled at loss.temperature, with the same "
        "random numbers in every evaluation.",
        needs=SAMPLED,
    )
    samples_per_prompt: int = setting(
        1,
        least=1,
        about="RL: number of responses per prompt, i.e. the k of pass@k.",
        needs=(SEVERAL_DRAWS, SAMPLED),
        formerly="draws",
    )
    pass_threshold: float = setting(
        1.0,
        least=-math.inf,
        about="RL: a response passes if its reward is at least this.",
        fix="give a finite number",
        needs=SAMPLED,
        formerly="passes",
    )

    def __post_init__(self) -> None:
        expand_home(self, "eval.", "path")
        need(all(self.path), "eval.path", list(self.path), "give a file, folder or Hub id instead of the empty string")
        check_table(self, "eval.")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The global batch of a step: a number of `samples`, or a budget of `tokens`."""

    samples: int | None = setting(
        None, least=1, about="Number of samples per step over all devices; in RL, groups stay whole.", resume=STAYS
    )
    tokens: int | None = setting(
        None, least=1, about="Token budget per step over all devices, in place of batch.samples (SFT).", resume=STAYS
    )
    max_tokens: int = setting(
        least=1, about="Maximum number of tokens in one micro-batch of one device; memory limits it."
    )
    overlong: RunOverlong = setting(
        "error",
        about="What happens to a sample longer than batch.tokens or batch.max_tokens. error: the run ends with an "
        "error. alone: the sample gets a micro-batch of its own.",
        resume="may change with batch.samples",
    )
    buffer: int = setting(
        256,
        least=1,
        about="With batch.tokens: number of samples in the buffer from which the samples of a batch are chosen.",
        resume="may change with batch.samples",
    )
    cost: str | None = setting(
        None,
        about="A cost model file of padfree plan --calibrate; if none, costs are estimated as FLOPs from the model's "
        "config.",
        filled="give a file, or leave batch.cost out",
    )
    share_prefixes: SharePrefixes = setting(
        "auto",
        about="Compute a common prefix of several samples once. auto: within a group if it saves time; true: for any "
        "samples; false: never.",
    )

    def __post_init__(self) -> None:
        expand_home(self, "batch.", "cost")
        given = (self.samples is not None) + (self.tokens is not None)
        fix = "set batch.samples=64, or batch.tokens" if not given else "set batch.samples=none or batch.tokens=none"
        need(given == 1, "batch.samples", self.samples, fix)
        check_table(self, "batch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a run divides its processes: replicate x shard x context.

    For example, 16 processes with replicate = 2 and context = 2 are 2 x 4 x 2, with 4 shards. `expert` divides the 8
    processes of each replica in another way, for the weights of experts only.
    """

    context: Literal["auto"] | int = setting(
        1,
        least=1,
        about="Number of context-parallel ranks that share a pack; auto chooses it for each pack.",
        fix="give 1 or more, or auto",
    )
    replicate: int = setting(1, least=1, about="Number of replicas of the sharded model.")
    expert: int = setting(
        1,
        least=1,
        about="Number of neighbouring ranks among which the experts of a layer are divided; with 1, every rank gathers "
        "all experts.",
    )
    layout: LayoutKind = setting("balanced", about="How the tokens of a pack are distributed over context ranks.")
    method: ContextMethod = setting("allgather", about="How context ranks exchange keys and values.")
    checkpointing: Literal["auto"] | Checkpointing | str = setting(
        "auto",
        about="What a layer recomputes in backward. none: nothing. host: all but attention and its projections, kept "
        "in host memory. selective: all but attention, or all but matmuls if not compiled. full: everything. auto: as "
        "little as memory allows.",
        allowed="auto, none, host, selective, full, or a list such as '6 host, 30 none' (6 layers, then 30 layers)",
    )
    compile: CompilerOrAuto | bool = setting(
        "auto", about="Compile each layer with torch.compile; true is inductor, auto compiles on a GPU."
    )
    kernels: LayerKernels = setting(
        "auto",
        about="Kernels for RMSNorm, QK-norm with RoPE, and SwiGLU in compiled layers. auto: padfree's fused operators, "
        "for a hidden size of 2,048 or more on a GPU. none: kernels that torch.compile generates.",
    )
    linear: LinearDtype = setting(
        "bfloat16",
        about="The dtype of the matmuls in the linear layers of decoder layers. Adapters, the head, routers and "
        "experts never use float8.",
        needs=need_of(
            "model.dtype", "bfloat16", fix="set model.dtype=bfloat16: float8 matmuls have bfloat16 inputs and results"
        ),
    )
    float8_products: tuple[Float8Product, ...] = setting(
        ("output", "input-gradient", "weight-gradient"),
        about="The matmuls of a linear layer that are computed in float8; the others stay in bfloat16.",
        needs=FLOAT8,
    )
    float8_budget: float | None = setting(
        None,
        above=0.0,
        about="A layer stays in bfloat16 if float8 in this layer alone changes the gradient of any layer by more than "
        "this fraction of the gradient's norm. If none, all layers use float8.",
        needs=FLOAT8,
    )
    head_memory: HeadMemory | float = setting(
        "speed",
        **GIB,
        about="Memory for the logits: speed (about 4 GiB), low (about 1 GiB) or a number of GiB. With less memory, "
        "more logits are computed twice.",
        fix="give 'speed', 'low' or a number of GiB greater than 0",
    )
    reshard: Literal["auto"] | bool = setting(
        "auto",
        about="Free the gathered weights of a layer after its forward pass, and gather them again for its backward "
        "pass. auto: only if the gathered weights of all layers do not fit into memory.",
    )
    offload: bool = setting(False, about="Keep weights, gradients and optimizer state in CPU memory.")

    @property
    def float8(self) -> tuple[Float8Product, ...]:
        """The matmuls of a linear layer that are computed in float8."""
        return self.float8_products if self.linear == "float8" else ()

    @property
    def head_bytes(self) -> HeadMemory | int:
        """Return `head_memory` as "speed", "low" or a number of bytes."""
        return int(self.head_memory * 2**30) if isinstance(self.head_memory, float) else self.head_memory

    def most_context(self, processes: int) -> int:
        """Return the maximum number of ranks that share the tokens of a micro-batch (context parallelism).

        With `context="auto"`, all ranks of a replica may share them. `processes`: the number of processes of the run.
        """
        return max(1, processes // self.replicate) if self.context == "auto" else self.context

    def __post_init__(self) -> None:
        check_table(self, "parallel.")
        products = list(self.float8_products)
        fix = "give each matmul once, or set parallel.linear=bfloat16 to compute no matmul in float8"
        need(0 < len(products) == len(set(products)), "parallel.float8_products", products, fix)
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "inductor" if self.compile else "none")
        check_checkpointing(self.checkpointing)
        compiled = not needs_compiled_layers(self.checkpointing) or self.compile != "none"
        fix = "set parallel.compile=inductor: 'host' and 'attention' need compiled layers"
        need(compiled, "parallel.checkpointing", self.checkpointing, fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints during a run, and the exported model at its end."""

    every: int | None = setting(
        None,
        least=1,
        about="Number of steps between checkpoints. With a number, the last step writes a checkpoint too. With the "
        "default, none, checkpoints are written only for checkpoint.best and if a signal stops the run.",
    )
    keep: int = setting(2, least=1, about="Number of checkpoints to keep; older ones are deleted.")
    asynchronous: Asynchronous = setting(
        "auto",
        about="Write checkpoints in the background, from a copy in host memory. auto: if the model is on a GPU, a rank "
        "writes 256 MiB or more, and half of the free host memory is enough for the copies.",
    )
    resume: bool = setting(
        True,
        about="Resume from the newest checkpoint in the run folder, if there is one. false: start over; the files of "
        "the earlier run are moved to replaced/, and are deleted when the new run has ended.",
    )
    export: bool = setting(True, about="At the end of the run, write a model folder that from_pretrained loads.")
    export_dtype: ExportDtype = setting(
        "base", about="The dtype of the exported weights; base: the dtype in the files of model.path."
    )
    best: str | None = setting(
        None,
        about="An evaluation metric such as eval/loss. The checkpoint with the best value is kept and exported to "
        "model-best/.",
        needs=need_of("eval.path", fix="set eval.path to held-out data: the metric is measured on it"),
    )
    better: Better = setting(
        "auto",
        about="Whether the lowest or the highest value of the metric in checkpoint.best is the best. auto: the lowest "
        "for loss, perplexity and response_length.",
        needs=need_of("best", fix="leave it out, or set checkpoint.best"),
    )

    def __post_init__(self) -> None:
        check_table(self, "checkpoint.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """Experiment trackers that receive the metrics in addition to `metrics.jsonl`."""

    tensorboard: bool = setting(False, about="Write TensorBoard event files to the run folder.")
    wandb: str | None = setting(
        None,
        about="Weights & Biases project; WANDB_MODE=offline keeps the data local.",
        filled="give the name of a Weights & Biases project, or leave it out",
    )
    trackio: str | None = setting(
        None,
        about="Trackio project; its data is local.",
        filled="give the name of a Trackio project, or leave it out",
    )
    mlflow: str | None = setting(
        None,
        about="MLflow experiment; MLFLOW_TRACKING_URI names the server or database.",
        filled="give the name of an MLflow experiment, or leave it out",
    )

    def __post_init__(self) -> None:
        check_table(self, "track.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run itself: its folder, its length and its device."""

    folder: str = setting(about="The folder for everything that the run writes.", filled="give a folder for the run")
    steps: int | None = setting(
        None, least=1, about="Number of optimizer steps. With the default, none, the run trains until the data ends."
    )
    seed: int = setting(
        0,
        least=0,
        most=(1 << 63) - 1,
        about="Seed of all random numbers.",
        fix="give 0 or more, below 2**63",
        allowed="0 to 2**63 - 1",
        resume=STAYS,
    )
    device: DeviceName = setting("auto", about="Device type; auto is cuda if a GPU is available.")
    timeout: float = setting(600.0, **SECONDS, about="Maximum time in seconds that processes wait for each other.")
    deterministic: bool = setting(
        False, about="Use deterministic algorithms only, so that a run can be repeated bit for bit."
    )

    def __post_init__(self) -> None:
        expand_home(self, "run.", "folder")
        check_table(self, "run.")
