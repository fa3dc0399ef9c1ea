"""A whole run in one call: `padfree.sft`, `dpo`, `kto`, `reward`, `distill`, `rl`, and `padfree.evaluate`.

    run = padfree.sft(
        model="my-model",  # short for {"path": "my-model"}
        data={"path": "train.jsonl", "epochs": 2},
        optimizer={"lr": 1e-5},
        run="runs/first",  # short for {"folder": "runs/first"}
    )
    run.metrics[-1]["loss"], run.model  # the last loss, the exported folder

The keywords are the sections of a recipe. Under torchrun, every process makes the same call.

Ctrl-C ends the run after the current step with a checkpoint, and the same call resumes the run. A mistake of the user
raises `padfree.UserError`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypedDict, Unpack

from padfree.config import Config, EvaluationConfig, config_from_dict
from padfree.config.config import missing_held_out
from padfree.config.functions import returns_coroutine
from padfree.config.hub import check_names
from padfree.config.loss import TASKS
from padfree.config.reader import changed_recipe
from padfree.data.first_look import check_inputs
from padfree.errors import UserError, bug_note
from padfree.garbage_collection import paused_collector

OnStep = Callable[[Mapping[str, Any]], None]
OnNote = Callable[[str], None]

MAIN_SETTING = {
    "model": "path",
    "data": "path",
    "reference": "path",
    "teacher": "path",
    "critic": "path",
    "eval": "path",
    "run": "folder",
}
"""The main setting of each section: `model="my-model"` stands for `model={"path": "my-model"}`."""

OF_CALLER = "_padfree_of_caller"
"""The attribute that marks exceptions raised by a function that the user passed."""

SAMPLES, MAX_TOKENS = 64, 16384
"""Defaults of `batch.samples` and `batch.max_tokens` for a call without a recipe."""


class Sections(TypedDict, total=False):
    """The keywords of `padfree.sft`, `padfree.rl` and so on: the sections of a recipe. Each is a dictionary or the
    value of the section's main setting.
    """

    model: Any
    data: Any
    batch: Mapping[str, Any]
    run: Any
    lora: Mapping[str, Any]
    reference: Any
    teacher: Any
    critic: Any
    rollout: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any]
    parallel: Mapping[str, Any]
    loss: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    track: Mapping[str, Any]
    eval: Any
    slurm: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run that has ended."""

    folder: Path  # everything that the run wrote
    model: Path | None  # the exported model; None: the run was stopped, or checkpoint.export is false
    best_model: Path | None  # the exported model with the best evaluation; None without checkpoint.best
    steps: int  # optimizer steps, including the steps before a resume
    stopped: bool  # whether a signal stopped the run; the same call then resumes it
    metrics: list[dict[str, Any]]  # one entry per step, as in metrics.jsonl
    evaluations: list[dict[str, Any]]  # one entry per evaluation, as in evaluation.jsonl
    config: Config  # all settings


class TrainCall:
    """A function such as `padfree.sft` or `padfree.rl`: it trains a model for one task and returns the run.

    All tasks have the same signature. `command` is the name of the task.
    """

    def __init__(self, command: str) -> None:
        self.__name__ = self.__qualname__ = command
        self.__doc__ = f"{TASKS[command].help[0].upper()}{TASKS[command].help[1:]}.\n\n    {TrainCall.__call__.__doc__}"

    def __call__(
        self,
        *,
        recipe: str | PathLike[str] | None = None,
        on_step: OnStep | None = None,
        on_note: OnNote | None = None,
        progress: bool = False,
        **sections: Unpack[Sections],
    ) -> TrainedRun:
        """Run the task and return when the run has ended.

        `sections` override the settings of the recipe file `recipe`. `on_step` is called with the metrics of each step,
        and `on_note` with each message. If `progress` is True, the call prints steps and messages.
        """
        return _trained(self.__name__, recipe, sections, on_step, on_note, progress)


sft, dpo, kto, reward = TrainCall("sft"), TrainCall("dpo"), TrainCall("kto"), TrainCall("reward")
distill, rl = TrainCall("distill"), TrainCall("rl")


def evaluate(
    *,
    recipe: str | PathLike[str] | None = None,
    on_note: OnNote | None = None,
    **sections: Unpack[Sections],
) -> dict[str, float]:
    """Evaluate a model on held-out data and return the metrics by name. Nothing is trained or written to a run folder.

    `eval` selects the data. If `rollout` is given, the model answers held-out prompts. Otherwise, it scores held-out
    samples.
    """
    _check_callbacks(on_note=on_note)
    values = _values(recipe, sections)
    held_out = values.get("eval", {}).get("path")
    if not held_out:
        raise missing_held_out()
    values.setdefault("data", {}).setdefault("path", held_out)  # required, but not read
    values.setdefault("loss", {}).setdefault("kind", TASKS["rl" if values.get("rollout") else "sft"].kind)
    config = config_from_dict(_with_defaults(values, "eval"), config_type=EvaluationConfig)
    check_names(config.with_held_out_data())
    with paused_collector():
        from padfree.train.run import evaluate as measured

    with _undisturbed(config):
        return measured(config, on_note=None if on_note is None else partial(_called, on_note))


def _trained(
    command: str,
    recipe: str | PathLike[str] | None,
    sections: Mapping[str, Any],
    on_step: OnStep | None,
    on_note: OnNote | None,
    progress: bool,
) -> TrainedRun:
    _check_callbacks(on_step=on_step, on_note=on_note)
    values = _values(recipe, sections)
    values.setdefault("loss", {}).setdefault("kind", TASKS[command].kind)
    config = config_from_dict(_with_defaults(values, command))
    if config.loss.command != command:
        raise UserError(
            "loss.kind",
            f"does not belong to padfree.{command}",
            f"call padfree.{config.loss.command} for this loss",
            value=config.loss.kind,
        )
    check_inputs(config)
    with paused_collector():
        from padfree.record.file_names import BEST_MODEL, EVALUATION, METRICS, MODEL
        from padfree.train.run import train

    def stepped(metrics: Mapping[str, Any]) -> None:
        if progress:
            of = "" if config.run.steps is None else f"/{config.run.steps}"
            _say(f"step {metrics['step'] + 1}{of}  loss {metrics['loss']:.4f}")
        if on_step is not None:
            _called(on_step, metrics)

    def noted(line: str) -> None:
        if progress:
            _say(f"note: {line}")
        if on_note is not None:
            _called(on_note, line)

    with _undisturbed(config):
        result = train(config, on_step=stepped, on_note=noted)
    folder = Path(config.run.folder)
    exported = config.checkpoint.export and not result.stopped
    best = exported and config.checkpoint.best is not None
    return TrainedRun(
        folder=folder,
        model=folder / MODEL if exported else None,
        best_model=folder / BEST_MODEL if best and (folder / BEST_MODEL).exists() else None,
        steps=result.step,
        stopped=result.stopped,
        metrics=_lines(folder / METRICS),
        evaluations=_lines(folder / EVALUATION),
        config=config,
    )


@contextmanager
def _undisturbed(config: Config) -> Iterator[None]:
    """Context manager that restores the random number generators at its end, and adds a note to unexpected exceptions
    that asks the user to report a bug.
    """
    from padfree.train.determinism import random_state, restore_random_state
    from padfree.train.failures import one_line_failures

    state = random_state()
    try:
        with one_line_failures(config.batch.max_tokens):
            yield
    except Exception as error:
        if not isinstance(error, UserError) and not hasattr(error, OF_CALLER):
            error.add_note(bug_note())
        raise
    finally:
        restore_random_state(state)


def _check_callbacks(**callbacks: Callable[[Any], None] | None) -> None:
    """Raise a `UserError` for a callback that cannot be called, or whose call would only make a coroutine."""
    for name, function in callbacks.items():
        if function is None:
            continue
        if not callable(function):
            raise UserError(name, f"is of type {type(function).__name__}", "give a function with one argument")
        if returns_coroutine(function):
            raise UserError(name, "is async, but nothing awaits it", "give a function that is defined with def")


def _called(function: Callable[[Any], None], argument: Any) -> None:
    """Call a function that the user passed. Mark its exceptions, so that they are not reported as bugs in padfree."""
    try:
        function(argument)
    except Exception as error:
        setattr(error, OF_CALLER, True)
        raise


# Settings


def _values(recipe: str | PathLike[str] | None, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe as nested dictionaries. The keywords of a call (`sections`) override them."""
    changes = {}
    for name, given in sections.items():
        value = _plain(given, name)
        is_table = isinstance(value, dict) or name not in MAIN_SETTING
        changes[name] = value if is_table else {MAIN_SETTING[name]: value}
    values = changes if recipe is None else changed_recipe(recipe, changes)
    for name, value in values.items():
        if name in Sections.__annotations__ and not isinstance(value, dict):
            raise UserError(name, "is not a dict of settings", f"give {name}={{...}} with its settings", value=value)
    return values


def _with_defaults(values: dict[str, Any], command: str) -> dict[str, Any]:
    """Set the batch size and the run folder in the settings `values`, unless they are set. `command`: such as "sft"."""
    batch = values.setdefault("batch", {})
    if batch.get("tokens") is None:
        batch.setdefault("samples", SAMPLES)
    batch.setdefault("max_tokens", MAX_TOKENS)
    values.setdefault("run", {}).setdefault("folder", f"runs/{command}")
    return values


def _plain(value: Any, name: str) -> Any:
    """Convert the value of a keyword to its form in a recipe: a path to a string, a function to `module:function`.

    `name` is the name of the setting, for error messages.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, name) for entry in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if callable(value):
        return _function_name(value, name)
    return value


def _function_name(function: Callable[..., Any], name: str) -> str:
    module, own = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not own and hasattr(function, "save_pretrained"):
        raise UserError(
            name,
            f"is an object of the class {type(function).__name__}, but a run reads its files",
            "give the name of a folder or a Hub id; save_pretrained writes an object to a folder",
        )
    if getattr(sys.modules.get(str(module)), own, None) is not function:
        raise UserError(
            name,
            f"{own or type(function).__name__} cannot be imported from {module} by its name",
            "define it with `def` at the top level of a module or notebook cell, or give 'module:function'",
        )
    return f"{module}:{own}"


# Results


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the caller asked for it
