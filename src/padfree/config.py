"""The settings of a run: one frozen dataclass per section, read from TOML and from `section.name=value`.

    recipe.toml                      command line              what a run is given
    [model]                          optimizer.lr=1e-5         Config(model=ModelConfig(path="Qwen/Qwen3-0.6B", ...),
    path = "Qwen/Qwen3-0.6B"                                          optimizer=OptimizerConfig(lr=1e-05, ...), ...)

The last word wins: defaults, then the file, then the overrides in their order. An override's value is TOML (`0.1`,
`true`, `["token_tis"]`), or a string where it is no TOML. A name that does not exist, a value of another type and a
setting that is missing are each one line that names the setting and the cure.

This module imports neither torch nor anything of padfree, so that a recipe can be checked where neither works.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def _need(right: bool, name: str, value: Any, cure: str) -> None:
    if not right:
        raise ValueError(f"{name}: {value!r}; {cure}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """`path`: a folder, a Hub id, or a config file (random weights). `dtype` is what is computed in."""

    path: str
    tokenizer: str | None = None  # None: that of the model
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: str = "auto"
    trust_remote_code: bool = False
    reference: str | None = None  # a second model for the KL term; None: without

    def __post_init__(self) -> None:
        _need(bool(self.path), "model.path", self.path, "give a folder, a Hub id or a config file")


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

    def __post_init__(self) -> None:
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
    checkpointing: Literal["none", "full", "selective"] = "none"
    compile: Literal["none", "inductor", "aot_eager"] = "none"

    def __post_init__(self) -> None:
        for name in ("context", "replicate"):
            _need(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "give 1 or more")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """`every` so many steps, and at the end; the last `keep` stay. `export`: at the end, a folder for transformers."""

    every: int | None = None  # None: at the end only
    keep: int = 2
    asynchronous: bool = False
    resume: bool = True  # from the newest in the run folder, if there is one
    export: bool = True

    def __post_init__(self) -> None:
        _need(self.every is None or self.every >= 1, "checkpoint.every", self.every, "give 1 or more")
        _need(self.keep >= 1, "checkpoint.keep", self.keep, "give 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """`folder` holds everything a run writes. `steps` is a number of optimizer steps."""

    folder: str
    steps: int | None = None  # None: until the data ends
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 600.0

    def __post_init__(self) -> None:
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
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

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
        used = self.model.reference is None or self.loss.kl_coefficient > 0
        _need(used, "model.reference", self.model.reference, "leave it out, or set loss.kl_coefficient")

    def to_dict(self) -> dict[str, Any]:
        """Plain values by section, fit for JSON."""
        return asdict(self)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The settings in a TOML file (or none), changed by `section.name=value` overrides."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"config: {path} cannot be read ({error.strerror}); give a TOML file") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"config: {path} is not TOML: {error}; correct it there") from None
    for override in overrides:
        _override(values, override)
    return config_from_dict(values)


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """The settings in nested plain values, every one checked."""
    config = _build(Config, values, "")
    assert isinstance(config, Config)
    return config


def _override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ValueError(f"override: {override!r}; write section.name=value, such as optimizer.lr=1e-5")
    place = values
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ValueError(f"override: {override!r} goes into {part!r}, which is a value; write section.name=value")
    place[parts[-1]] = _parsed(text.strip())


def _parsed(text: str) -> Any:
    """TOML's value, or the text itself where it is none; `none` switches a setting off."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(kind: type[Any], values: Any, prefix: str) -> Any:
    """An instance of the dataclass `kind` from a table."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix.rstrip('.')}: {values!r} is no table; write [{prefix.rstrip('.')}] and its settings")
    hints = get_type_hints(kind)
    names: dict[str, Field[Any]] = {entry.name: entry for entry in fields(kind)}
    for name in values:
        if name not in names:
            raise ValueError(f"{prefix}{name}: no such setting; {_closest(name, tuple(names), prefix)}")
    given: dict[str, Any] = {}
    for name, entry in names.items():
        hint = hints[name]
        if name in values:
            nested = is_dataclass(hint)
            given[name] = (
                _build(hint, values[name], f"{prefix}{name}.")
                if nested
                else _value(hint, values[name], f"{prefix}{name}")
            )
        elif entry.default is MISSING and entry.default_factory is MISSING:
            if is_dataclass(hint):
                given[name] = _build(hint, {}, f"{prefix}{name}.")  # type: ignore[arg-type]
            else:
                raise ValueError(f"{prefix}{name}: missing; give {_words(hint)}, as in {prefix}{name}=...")
    return kind(**given)


def _closest(name: str, names: Sequence[str], prefix: str) -> str:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if found:
        return f"did you mean {prefix}{found[0]}?"
    return f"there are {', '.join(prefix + each for each in names)}"


def _value(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type `hint` says: no guessing but int to float, and one entry to a list of one."""
    converted = _converted(hint, value)
    if converted is _WRONG:
        choices = _choices(hint)
        cure = f"give {_words(hint)}"
        if isinstance(value, str) and (near := difflib.get_close_matches(value, choices, n=1, cutoff=0.5)):
            cure = f"did you mean {near[0]!r}? {cure}"
        raise ValueError(f"{name}: {value!r}; {cure}")
    return converted


_WRONG = object()


def _converted(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for argument in arguments:
            if (found := _converted(argument, value)) is not _WRONG:
                return found
        return _WRONG
    if origin is Literal:
        return value if isinstance(value, str) and value in arguments else _WRONG
    if origin is tuple:
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        repeated = arguments[-1] is Ellipsis
        if not repeated and len(entries) != len(arguments):
            return _WRONG
        kinds = [arguments[0]] * len(entries) if repeated else arguments
        found = tuple(_converted(kind, entry) for kind, entry in zip(kinds, entries, strict=True))
        return _WRONG if any(entry is _WRONG for entry in found) else found
    if origin is dict:
        plain = isinstance(value, dict) and all(isinstance(entry, str) for pair in value.items() for entry in pair)
        return dict(value) if plain else _WRONG
    if hint is type(None):
        return None if value is None else _WRONG
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint else _WRONG


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for argument in get_args(hint) for choice in _choices(argument))


def _words(hint: Any) -> str:
    """What a type is called in a sentence."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is tuple:
        return f"a list, each {_words(arguments[0])}"
    if origin is dict:
        return "a table of strings"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): '"none"'}
    return names[hint]
