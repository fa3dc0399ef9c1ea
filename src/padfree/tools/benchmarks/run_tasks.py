"""`padfree eval --tasks`: run tasks of lm-evaluation-harness with padfree's scorer and sampler."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from padfree.errors import UserError, shown_error
from padfree.model import attach
from padfree.tools.benchmarks.harness_model import HarnessAnswers, harness_class
from padfree.tools.talk.find_model import ModelFiles
from padfree.tools.talk.speaker import Speaker, device_named, dtype_named, load_language_model
from padfree.train.training_data import open_tokenizer

PACKAGE = "lm_eval"
FIRST, END = (0, 4), (0, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """Options of `padfree eval --tasks`.

    `include`: folders with YAML files of tasks. `limit`: the number of rows of each task; None: all rows.
    """

    tasks: tuple[str, ...]
    include: tuple[str, ...] = ()
    fewshot: int | None = None
    limit: int | None = None
    chat: bool = False
    system: str | None = None
    seed: int = 0
    samples: bool = False  # whether the results hold every request and its answer
    bootstrap: int = 100_000  # resamples for the standard errors of metrics that are not means


def check_harness() -> None:
    """Raise a `UserError` if the package lm_eval is missing, or if padfree does not support its version."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            "--tasks", "needs the package lm_eval, which is not installed", 'pip install "padfree[lm-eval]"'
        )
    version = importlib.metadata.version(PACKAGE)
    if not FIRST <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < END:
        raise UserError(
            "--tasks", f"needs lm_eval 0.4, but {version} is installed", 'pip install "lm_eval>=0.4.9,<0.5"'
        )


def run_tasks(files: ModelFiles, options: TaskOptions, *, dtype: str = "auto", device: str = "auto") -> dict[str, Any]:
    """Evaluate a model. Return the dict of results that lm-evaluation-harness makes: `results`, `versions`, ..."""
    check_harness()
    manager = _manager(options)
    place = device_named(device)
    tokenizer = open_tokenizer(files.tokenizer, "MODEL")
    if options.chat and not tokenizer.chat_template:
        raise UserError("--apply-chat-template", "the tokenizer has no chat template", "remove this option")
    model, kind = load_language_model(files, dtype_named(dtype, place), place)
    model = attach(model.to(device=place, dtype=kind).eval())  # type: ignore[call-arg]

    @cache
    def speaker_at(temperature: float) -> Speaker:
        return Speaker(
            model, tokenizer, chat=None, temperature=temperature, seed=options.seed, dtype=kind, device=place
        )

    answers = HarnessAnswers(model, tokenizer, speaker_at)
    evaluator = importlib.import_module("lm_eval.evaluator")
    try:
        found = evaluator.simple_evaluate(
            model=harness_class()(answers),
            tasks=list(options.tasks),
            task_manager=manager,
            num_fewshot=options.fewshot,
            limit=options.limit,
            apply_chat_template=options.chat,
            fewshot_as_multiturn=options.chat,
            system_instruction=options.system,
            log_samples=options.samples,
            bootstrap_iters=options.bootstrap,
        )
    except UserError:
        raise
    except Exception as error:  # tasks contain code and data of third parties, which can raise any error
        raise UserError(
            "--tasks",
            f"{', '.join(options.tasks)}: the tasks raised {shown_error(error)}",
            "correct the tasks or their data",
        ) from error
    assert found is not None
    return dict(found)


def _manager(options: TaskOptions) -> Any:
    for folder in options.include:
        if not Path(folder).is_dir():
            raise UserError("--include-path", "is not a folder", "give a folder with YAML files of tasks", value=folder)
    tasks = importlib.import_module("lm_eval.tasks")
    include = list(options.include) or None
    # Listing the package's own thousands of tasks takes seconds, so do it only if one of them is needed.
    for defaults in (False, True) if include else (True,):
        manager = tasks.TaskManager(include_path=include, include_defaults=defaults)
        unknown = [name for name in options.tasks if not manager.match_tasks([name])]
        if not unknown:
            break
    if unknown:
        raise UserError(
            "--tasks",
            "is not a task of lm_eval",
            "correct the name, or give its folder as --include-path",
            value=unknown[0],
        )
    return manager


def numbers_of(found: dict[str, Any]) -> dict[str, float]:
    """Return the metrics by name, e.g. `arc_easy/acc` and `arc_easy/acc_stderr`.

    If a task filters the generated texts, the filter follows in brackets, as in `gsm8k/exact_match (strict-match)`.
    """
    numbers: dict[str, float] = {}
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            name, comma, kind = key.partition(",")
            if comma and isinstance(value, (int, float)):
                numbers[f"{task}/{name}" + ("" if kind == "none" else f" ({kind})")] = float(value)
    return numbers
