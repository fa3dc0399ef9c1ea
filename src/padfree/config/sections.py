"""One frozen dataclass for each section of settings; a value that cannot be, alone or with others, is refused."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from padfree.config.choices import (
    EVAL_METRICS,
    SAMPLING_ENGINES,
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
    OnFailure,
    Overlong,
    PromptFormat,
    RolloutFilter,
    RunOverlong,
    ScheduleKind,
    SharePrefixes,
    WeightTransfer,
)
from padfree.config.functions import is_path, model_of
from padfree.config.loss import LossConfig
from padfree.config.models import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    TeacherConfig,
    expand_home,
)
from padfree.config.rules import closest, need


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """vLLM servers that the run starts, watches and ends: `command` once for each entry of `devices`."""

    command: tuple[str, ...] = ()  # its words; the model, the port and what else the run needs are added
    devices: tuple[str, ...] = ("0",)  # CUDA_VISIBLE_DEVICES of each server; "cpu": none
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need(all(self.command), "rollout.launch.command", list(self.command), "give words, none of them empty")
        cure = 'give CUDA_VISIBLE_DEVICES of each server, such as ["0", "1"], or "cpu"'
        need(len(self.devices) > 0 and all(self.devices), "rollout.launch.devices", list(self.devices), cure)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Rollouts of the run itself: `reward` names a built-in or `module:function`, `environment` or `agent` what the
    policy talks to; without any of them `data.path` has finished ones.

    With one `data.path` holds prompts, `batch.samples` counts responses, and `loss.temperature` is the sampler's too.
    """

    reward: str | None = None
    environment: str | None = None  # module:function of an episode
    agent: tuple[str, ...] = ()  # or the words of a program that is one, with the policy at its OPENAI_BASE_URL
    episode_timeout: float = 300.0  # seconds of an episode's own, its reward's too; waiting for tokens does not count
    on_failure: OnFailure = "error"  # skip: a group whose episode or reward raises or hangs is left out
    reward_processes: int = 0  # that rewards are computed in; 0: in the process
    group: int = 8  # responses to a prompt
    max_new_tokens: int = 256
    engine: str = "in_process"  # who samples: in_process, vllm, or your own as module:function
    batch: int = 256  # responses a device writes at a time
    kv_cache_memory: Literal["auto"] | float = "auto"  # GiB of keys and values; auto: half of what is free at most
    staleness: int = 0  # batches that are sampled ahead while one is trained
    filter: RolloutFilter = "none"  # equal: groups with equal rewards are replaced by other prompts'
    oversample: float = 1.0  # groups that are asked for at once, times those that are needed
    filter_bound: float = 3.0  # groups that a batch may ask for in all, times its own
    overlong_buffer: int = 0  # the last tokens of the room: a response that ends among them loses some reward,
    overlong_penalty: float = 1.0  # and so much of it at the last
    # Of vllm alone
    servers: tuple[str, ...] = ()  # addresses of servers that run
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    transfer: WeightTransfer = "group"  # how weights get to servers
    transfer_folder: str | None = None  # of files, seen by run and servers; None: memory, or the run folder
    timeout: float = 600.0
    canary: float | None = None  # mean difference of log-probabilities that is allowed; None: by model.dtype
    top_p: float = 1.0
    top_k: int | None = None

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes; None: auto."""
        return None if self.kv_cache_memory == "auto" else int(self.kv_cache_memory * 2**30)

    @property
    def source(self) -> str | None:
        """The setting that has the run write its responses itself; None: it does not."""
        for name in ("environment", "agent", "reward"):
            if getattr(self, name):
                return f"rollout.{name}"
        return None

    @property
    def has_episodes(self) -> bool:
        """Whether responses come from episodes: of an environment, or as what can fail by itself."""
        plays = self.environment is not None or bool(self.agent)
        return plays or (self.reward is not None and (self.on_failure == "skip" or self.reward_processes > 0))

    def __post_init__(self) -> None:
        for name in ("group", "max_new_tokens", "batch"):
            need(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "give 1 or more")
        if self.kv_cache_memory != "auto":
            memory = self.kv_cache_memory
            need(0 < memory < math.inf, "rollout.kv_cache_memory", memory, "give auto or GiB above 0")
        self._check_batches()
        expand_home(self, "transfer_folder")
        cure = "leave it out, the trainer's log-probabilities are those of the whole softmax"
        need(self.top_p == 1.0, "rollout.top_p", self.top_p, cure)
        need(self.top_k is None, "rollout.top_k", self.top_k, cure)
        need(0 < self.timeout < math.inf, "rollout.timeout", self.timeout, "give more than 0 seconds")
        need(self.canary is None or self.canary > 0, "rollout.canary", self.canary, "give more than 0, or leave it out")
        need(self.transfer_folder != "", "rollout.transfer_folder", "", "give a folder, or leave it out")
        self._check_engine()
        self._check_episodes()
        servers, command = list(self.servers), list(self.launch.command)
        if self.engine != "vllm":
            cure = "set rollout.engine=vllm, or leave it out"
            need(not servers, "rollout.servers", servers, cure)
            need(not command, "rollout.launch.command", command, cure)
            return
        for url in servers:
            right = re.fullmatch(r"https?://[^/:\s]+(:\d{1,5})?(/\S*)?", url) is not None
            need(right, "rollout.servers", url, 'give addresses such as ["http://127.0.0.1:8000"]')
        need(len(set(servers)) == len(servers), "rollout.servers", servers, "name each server once")
        cure = "give the addresses of servers that run, or rollout.launch.command to have them started, and not both"
        need(bool(servers) != bool(command), "rollout.servers", servers, cure)

    def _check_batches(self) -> None:
        need(self.staleness >= 0, "rollout.staleness", self.staleness, "give 0 or more batches")
        ahead = self.staleness > 0 and self.engine == "in_process"
        cure = "rollout.engine in_process samples from the weights that are in training: set rollout.engine=vllm, or 0"
        need(not ahead, "rollout.staleness", self.staleness, cure)
        need(1.0 <= self.oversample < math.inf, "rollout.oversample", self.oversample, "give 1 or more")
        filtered = self.filter != "none"
        need(filtered or self.oversample == 1.0, "rollout.oversample", self.oversample, "set rollout.filter=equal")
        need(1.0 <= self.filter_bound < math.inf, "rollout.filter_bound", self.filter_bound, "give 1 or more")
        compared = not filtered or self.group > 1
        need(compared, "rollout.filter", self.filter, "set rollout.group to 2 or more, one response is equal to itself")
        right = 0 <= self.overlong_buffer <= self.max_new_tokens
        cure = f"give 0 to rollout.max_new_tokens, {self.max_new_tokens}"
        need(right, "rollout.overlong_buffer", self.overlong_buffer, cure)
        penalty = self.overlong_penalty
        need(0 < penalty < math.inf, "rollout.overlong_penalty", penalty, "give more than 0")

    def _check_episodes(self) -> None:
        environment, agent = self.environment, list(self.agent)
        right = environment is None or is_path(environment)
        cure = "give 'module:function', such as padfree.rollout.environment.calculator:episode"
        need(right, "rollout.environment", environment, cure)
        need(all(agent), "rollout.agent", agent, "give words, none of them empty")
        cure = "leave it out, rollout.environment is the environment (padfree.rollout.environment.run_agent runs one)"
        need(not agent or environment is None, "rollout.agent", agent, cure)
        cure = "set rollout.reward=exact_match or another, it judges what rollout.agent prints"
        need(not agent or self.reward is not None, "rollout.reward", None, cure)
        limit = self.episode_timeout
        need(0 < limit < math.inf, "rollout.episode_timeout", limit, "give more than 0 seconds")
        need(self.reward_processes >= 0, "rollout.reward_processes", self.reward_processes, "give 0 or more")
        cure = "set rollout.reward, without one there is nothing to compute in processes"
        need(
            not self.reward_processes or self.reward is not None,
            "rollout.reward_processes",
            self.reward_processes,
            cure,
        )
        if self.has_episodes:
            cure = "leave it out, an episode gives the reward that it wants for its length"
            need(self.overlong_buffer == 0, "rollout.overlong_buffer", self.overlong_buffer, cure)

    def _check_engine(self) -> None:
        if self.engine in SAMPLING_ENGINES or is_path(self.engine):
            return
        near = closest(self.engine, SAMPLING_ENGINES)
        meant = "" if near is None else f"did you mean {near!r}? "
        cure = f"{meant}give one of {', '.join(SAMPLING_ENGINES)}, or 'module:function'"
        need(False, "rollout.engine", self.engine, cure)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """`path`: files or folders, or a Hub id; what else there is belongs to `padfree.data`."""

    path: tuple[str, ...]
    subset: str | None = None  # of a Hub id
    split: str = "train"  # of a Hub id
    columns: dict[str, str] = field(default_factory=dict)
    loss_on: LossOn = "assistant"
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
        need(len(self.path) > 0, "data.path", list(self.path), "give one file, folder or Hub id, or more")
        need(all(self.path), "data.path", list(self.path), "give a file, folder or Hub id in place of the empty name")
        need(self.subset != "", "data.subset", self.subset, "give a name, or leave it out")
        need(bool(self.split), "data.split", self.split, "give a name, such as train")
        need(self.chat_template != "", "data.chat_template", self.chat_template, "give a file, or leave it out")
        need(self.max_length is None or self.max_length >= 2, "data.max_length", self.max_length, "give 2 or more")
        need(self.epochs is None or self.epochs >= 1, "data.epochs", self.epochs, "give 1 or more")


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
            need(self.head_memory > 0, "parallel.head_memory", self.head_memory, "give speed, low or GiB above 0")
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
        need(self.timeout > 0, "run.timeout", self.timeout, "give more than 0 seconds")


GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
"""Advantages that compare the samples of a group."""


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
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    eval: EvalConfig = EvalConfig()

    def __post_init__(self) -> None:
        endless = self.data.epochs is None and self.run.steps is None
        need(not endless, "run.steps", None, "set run.steps=1000, or data.epochs=1, or the run never ends")
        falls = self.schedule.kind != "constant"
        cure = f"set run.steps=1000, schedule.kind {self.schedule.kind!r} needs it"
        need(self.run.steps is not None or not falls, "run.steps", None, cure)
        if self.run.steps is not None:
            need(
                self.schedule.warmup <= self.run.steps,
                "schedule.warmup",
                self.schedule.warmup,
                f"give at most run.steps, {self.run.steps}",
            )
        if self.loss.command == "rl":
            cure = "set batch.samples=64 and batch.tokens=none, RL takes whole groups of samples"
            need(self.batch.samples is not None, "batch.samples", None, cure)
            all_turns = self.data.loss_on == "assistant"
            cure = "leave it out, what is trained on in RL is the response"
            need(all_turns, "data.loss_on", self.data.loss_on, cure)
        if self.loss.command in ("dpo", "reward"):
            self._check_pairs()
        if self.loss.command == "dpo":
            self._check_pair_reference()
        else:
            precompute = self.reference.precompute
            need(not precompute, "reference.precompute", precompute, "leave it out, it is for padfree dpo")
        used = self.reference.path is None or self.loss.kl_coefficient > 0 or self.loss.command == "dpo"
        need(used, "reference.path", self.reference.path, "leave it out, or set loss.kl_coefficient")
        if self.loss.command == "distill" or self.loss.advantage == "teacher":
            need(self.teacher.path is not None, "teacher.path", None, "set teacher.path=MODEL, what is learned from")
        else:
            cure = "leave it out, or set loss.kind=distill, or loss.advantage=teacher"
            need(self.teacher.path is None, "teacher.path", self.teacher.path, cure)
        if self.loss.command == "reward":
            alone = self.lora.rank > 0 and self.lora.export == "adapter"
            cure = "set lora.export=merged, a reward model's head is trained beside the adapters and not among them"
            need(not alone, "lora.export", self.lora.export, cure)
        if self.lora.rank:
            cure = "set loss.router_bias=0 with lora.rank: biases of the model are not saved with its adapters"
            need(self.loss.router_bias == 0, "loss.router_bias", self.loss.router_bias, cure)
        if self.rollout.source is not None:
            self._check_rollouts(self.rollout.source)
        self._check_critic()
        self._check_eval()

    def _check_pairs(self) -> None:
        """Of data in pairs."""
        samples = self.batch.samples
        cure = "give an even number, it counts answers, two of a pair"
        need(samples is None or samples % 2 == 0, "batch.samples", samples, cure)
        loss_on = self.data.loss_on
        need(loss_on == "assistant", "data.loss_on", loss_on, "leave it out, what is compared are the answers")
        need(self.loss.weights == "token-mean", "loss.weights", self.loss.weights, "leave it out, pairs weigh the same")
        cap = self.eval.samples
        need(cap is None or cap % 2 == 0, "eval.samples", cap, "give an even number, it counts answers, two of a pair")

    def _check_pair_reference(self) -> None:
        """Of DPO. A reference that is not named is the model that the run begins with."""
        refresh, path = self.reference.refresh, self.reference.path
        need(refresh is None, "reference.refresh", refresh, "leave it out, the reference of DPO stays what it is")
        if not self.loss.dpo.needs_reference:
            cure = f"leave it out, loss.dpo.variant {self.loss.dpo.variant!r} has no reference"
            need(path is None, "reference.path", path, cure)
            need(not self.reference.precompute, "reference.precompute", True, cure)
        elif path is None:
            cure = "give it, a model that begins with random weights is no reference"
            need(self.model.init == "weights", "reference.path", path, cure)
            object.__setattr__(self, "reference", replace(self.reference, path=self.model.path))

    def _check_critic(self) -> None:
        """Of a critic, which is there where advantages come from it."""
        if self.loss.advantage != "gae":
            for entry in fields(CriticConfig):
                value = getattr(self.critic, entry.name)
                cure = "leave it out, or set loss.advantage=gae"
                need(value == entry.default, f"critic.{entry.name}", value, cure)
            return
        steps = self.run.steps
        cure = f"give less than run.steps, {steps}, or the policy is never trained"
        need(steps is None or self.critic.warmup < steps, "critic.warmup", self.critic.warmup, cure)

    def _check_eval(self) -> None:
        """Of evaluations, and of the checkpoint that they choose."""
        command, sampled = self.loss.command, self.rollout.source is not None
        if self.eval.path and (command == "rl" or sampled):
            cure = "set rollout.reward, responses to held-out prompts come from the sampler of the run"
            need(sampled, "eval.path", list(self.eval.path), cure)
            stale = self.rollout.staleness
            cure = (
                "set rollout.staleness=0, or eval.path=[] and use padfree eval: the sampler is busy with batches ahead"
            )
            need(stale == 0, "rollout.staleness", stale, cure)
        for name, unset in (("reward", None), ("greedy", True), ("draws", 1), ("passes", 1.0)):
            value = getattr(self.eval, name)
            need(sampled or value == unset, f"eval.{name}", value, "leave it out, nothing is sampled in this run")
        best = self.checkpoint.best
        if best is None:
            return
        need(bool(self.eval.path), "checkpoint.best", best, "set eval.path to held-out data, it is measured there")
        known = [f"eval/{name}" for name in EVAL_METRICS["rl" if sampled else command]]
        if sampled and self.eval.draws == 1:
            known.remove("eval/pass@k")
        right = best in known or (best.startswith("eval/") and f"eval/{best.rpartition('/')[2]}" in known)
        need(right, "checkpoint.best", best, f"give one of {', '.join(known)}, or of one source: eval/FILE/NAME")

    def _check_rollouts(self, setting: str) -> None:
        """Of responses that are written in the run, because of this setting."""
        command = self.loss.command
        sampled = command in ("rl", "distill")
        value = getattr(self.rollout, setting.removeprefix("rollout."))
        need(sampled, setting, value, f"leave it out, padfree {command} has no rollouts")
        group, samples = self.rollout.group, self.batch.samples
        need(samples is not None, "batch.samples", None, "set batch.samples=64 and batch.tokens=none for rollouts")
        assert samples is not None
        need(samples % group == 0, "batch.samples", samples, f"give a multiple of rollout.group, {group}")
        advantage = self.loss.advantage
        given = advantage == "given"
        need(not given, "loss.advantage", advantage, "choose grpo or another, responses written here bring none")
        compared = group > 1 or advantage not in GROUPED or command == "distill"
        cure = f"set rollout.group=8, or loss.advantage=reinforce++: {advantage!r} compares responses to a prompt"
        need(compared, "rollout.group", group, cure)
        cure = f"give at most run.timeout, {self.run.timeout:g}, which other processes wait"
        limit = self.rollout.episode_timeout
        need(not self.rollout.has_episodes or limit <= self.run.timeout, "rollout.episode_timeout", limit, cure)
        vllm = self.rollout.engine == "vllm"
        need(not vllm or self.rollout.timeout <= self.run.timeout, "rollout.timeout", self.rollout.timeout, cure)
        reward = self.rollout.reward
        judged = model_of(reward) is not None
        cure = "give a function: a reward model judges whole responses, without environments, processes and failures"
        need(not judged or not self.rollout.has_episodes, "rollout.reward", reward, cure)
        need(model_of(reward) != "", "rollout.reward", reward, "give the folder of a reward model, as in model:folder")
        cure = "set rollout.staleness=0, the reward model is asked by all processes together"
        need(not judged or self.rollout.staleness == 0, "rollout.staleness", self.rollout.staleness, cure)
        cure = "leave it out: rollout.reward, if that is a model, judges held-out responses, too"
        need(model_of(self.eval.reward) is None, "eval.reward", self.eval.reward, cure)
        known = self.loss.kl_coefficient == 0 or self.reference.path is not None
        cure = "set reference.path=MODEL, such as model.path, or loss.kl_coefficient=0"
        need(known, "reference.path", None, cure)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by section, fit for JSON."""
        return asdict(self)
