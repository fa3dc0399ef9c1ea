"""`padfree plan`: packs, load balance, time and memory of a run, before a GPU is rented.

Examples:

    padfree plan --data train.jsonl --model Qwen/Qwen3-0.6B --max-tokens 8192 --ranks 8 --gpu H100 --html plan.html
    padfree plan sft data.epochs=1 --ranks 8
    padfree plan --lengths lengths.npy --max-tokens 8192 --samples 512 --ranks 8
    padfree plan --lengths lengths.npy --model qwen3-8b --max-tokens 16384 --ranks 1024 --gpu H100 --hosts 128
    padfree plan --calibrate --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from padfree.config import Config, load_config
from padfree.config.hub import check_name, check_names
from padfree.config.inputs import path_word
from padfree.config.output_sections import check_output
from padfree.errors import UserError

if TYPE_CHECKING:
    from padfree.tools.planner import RunPlan, Suggestion
    from padfree.tools.planner.scaling import Scaling

USAGE = "padfree plan [recipe.toml] [section.name=value ...] [options]"
SAMPLES, MEMORY, FIRST_CAP = 64, 80.0, 8192
GIBIBYTE = 1 << 30
NO_MODEL = "no model"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "plan",
        help="plan an epoch: packs, load balance, time and memory",
        usage=USAGE,
        description="Plan an epoch without loading weights: packs, load balance, time, memory.",
        epilog="example: padfree plan --data train.jsonl --model my-model --ranks 8 --suggest",
        add_help=False,
    )
    add = command.add_argument
    add("-h", "--help", action="help", help=argparse.SUPPRESS)
    add("settings", nargs="*", help=argparse.SUPPRESS)
    add(
        "--data",
        type=path_word("--data"),
        action="append",
        metavar="PATH",
        help="training data: file, folder or Hub id; may be repeated",
    )
    add("--rollouts", action="store_true", help="--data holds rollouts, and a batch takes whole groups")
    add(
        "--lengths",
        type=path_word("--lengths"),
        metavar="FILE",
        help="file of sample lengths (.npy or text), instead of --data",
    )
    add(
        "--model",
        type=path_word("--model"),
        metavar="PATH",
        help="model: folder, Hub id or config; no weights are loaded",
    )
    add("--ranks", type=int, metavar="N", default=1, help="number of devices (default 1)")
    add("--cp", type=int, metavar="N", help="number of context ranks that share a pack (default 1)")
    add("--max-tokens", type=int, metavar="N", help="maximum tokens of a micro-batch on one device")
    add("--samples", type=int, metavar="N", help=f"samples per step (default {SAMPLES})")
    add("--tokens", type=int, metavar="N", help="tokens per step, instead of --samples")
    add("--layout", metavar="KIND", help="context layout: contiguous, headtail or balanced")
    add("--gpu", metavar="NAME", help="GPU to plan for, such as H100 (default: this machine's)")
    add("--memory", type=float, metavar="GIB", help=f"memory of a device (default: that of the GPU, or {MEMORY:.0f})")
    add("--hosts", type=int, metavar="N", help="number of hosts; also predicts larger clusters")
    # The following options are documented in docs/guides/plan.md only, so that the help fits on one screen.
    add("--link-inside", help=argparse.SUPPRESS)
    add("--link-between", help=argparse.SUPPRESS)
    add("--exact-steps", default="128", help=argparse.SUPPRESS)
    add("--html", type=path_word("--html"), metavar="FILE", help="write an HTML page with figures")
    add("--json", action="store_true", help="print the numbers as JSON")
    add("--suggest", action="store_true", help="recommend --max-tokens, --cp and --layout")
    add("--calibrate", action="store_true", help="measure the cost model on this device")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    _check(settings)
    config = _config(settings)
    if config.model.path == NO_MODEL and (settings.suggest or settings.calibrate):
        flag, why = (
            ("--suggest", ": the memory of a run depends on the model") if settings.suggest else ("--calibrate", "")
        )
        raise UserError(f"{flag}", "needs a model", f"give --model{why}")
    config = _resolved(config, settings)
    if settings.calibrate:
        _calibrate(config, settings)
        if not _has_data(settings):
            return
    plan, suggestion = _plan(config, settings)
    scaling = _scaling(plan, config, settings)
    if settings.json:
        shown = plan.summary()
        if scaling is not None:
            shown["scaling"] = scaling.summary()
        if suggestion is not None:
            shown["suggestion"] = asdict(suggestion)
        print(json.dumps(shown, indent=1))
    else:
        for line in (*plan.lines(), *(() if scaling is None else scaling.lines())):
            print(line)
        if suggestion is not None:
            print("\nsuggestion  " + (" ".join(suggestion.overrides()) or "none"))
            for reason in suggestion.reasons:
                print(f"  - {reason}")
    if settings.html:
        _write_page(plan, suggestion, scaling, config, settings)


def _check(settings: argparse.Namespace) -> None:
    """Raise a `UserError` for wrong flags of `padfree plan`. Settings of the recipe are checked later, when the
    `Config` is made.
    """
    for name in ("ranks", "cp", "max_tokens", "samples", "tokens", "memory", "hosts"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(
                f"--{name.replace('_', '-')}",
                "",
                f"give {'more than 0' if name == 'memory' else '1 or more'}",
                value=value,
            )
    if settings.samples is not None and settings.tokens is not None:
        raise UserError(
            "--tokens",
            f"{settings.tokens} cannot be combined with --samples {settings.samples}",
            "give only one of them",
        )
    if settings.lengths is not None and (settings.data or settings.rollouts):
        raise UserError(
            "--lengths",
            f"{settings.lengths} cannot be combined with --data or --rollouts",
            "give either the data or the lengths",
        )
    if settings.html is not None:
        from padfree.tools.page.page import refuse_foreign

        check_output(settings.html, "--html", makes_folder=True)
        refuse_foreign(Path(settings.html), "--html")
    if settings.json and settings.calibrate:
        raise UserError("--json", "cannot be combined with --calibrate", "run padfree plan once for each")


def _recipe(settings: argparse.Namespace) -> str | None:
    """Return the recipe: the first positional argument, unless this argument is an override such as `data.epochs=1`."""
    first = settings.settings[0] if settings.settings else None
    return None if first is None or "=" in first else first


def _overrides(settings: argparse.Namespace) -> list[str]:
    return list(settings.settings[_recipe(settings) is not None :])


def _has_override(settings: argparse.Namespace, name: str) -> bool:
    """Return whether an override on the command line, such as `data.epochs=1`, sets the setting `name`."""
    return any(override.partition("=")[0].strip() == name for override in _overrides(settings))


def _has_data(settings: argparse.Namespace) -> bool:
    return bool(settings.data or settings.lengths or _recipe(settings)) or any(
        _has_override(settings, f"data.{name}") for name in ("path", "sources")
    )


def _has_cap(settings: argparse.Namespace) -> bool:
    return bool(settings.max_tokens or _recipe(settings)) or _has_override(settings, "batch.max_tokens")


def _config(settings: argparse.Namespace) -> Config:
    """Return the settings of the planned run. Flags replace values of the recipe, and overrides replace both."""
    recipe = _recipe(settings)
    flags: dict[str, Any] = {}
    if recipe is None:
        if not _has_data(settings) and not settings.calibrate:
            raise UserError("--data", "missing", "give --data, --lengths or a recipe")
        if settings.data and settings.model is None and not _has_override(settings, "model.path"):
            raise UserError("--model", "missing", "give a model, whose tokenizer splits the data into tokens")
        if _has_data(settings) and not settings.suggest and not _has_cap(settings):
            raise UserError(
                "--max-tokens", "missing", "give the maximum number of tokens in a micro-batch, or add --suggest"
            )
        flags = {
            "model.path": NO_MODEL,
            "data.path": [] if _has_override(settings, "data.sources") else [settings.lengths or "no data"],
            "batch.max_tokens": FIRST_CAP,
            "run.folder": "runs",
        }
        if settings.tokens is None and not _has_override(settings, "batch.tokens"):
            flags["batch.samples"] = SAMPLES
    flags |= {
        name: value
        for name, value in {
            "data.path": settings.data,
            "model.path": settings.model,
            "batch.max_tokens": settings.max_tokens,
            "parallel.context": settings.cp,
            "parallel.layout": settings.layout,
            "loss.kind": "clip" if settings.rollouts else None,
        }.items()
        if value is not None
    }
    for name, other in (("samples", "tokens"), ("tokens", "samples")):
        if getattr(settings, name) is not None:
            flags |= {f"batch.{name}": getattr(settings, name), f"batch.{other}": None}
    # Values are written as JSON, because JSON strings, lists and numbers are valid TOML.
    written = [
        f"{name}={'none' if value is None else json.dumps(value, ensure_ascii=False)}" for name, value in flags.items()
    ]
    config = load_config(recipe, [*written, *_overrides(settings)])
    if config.model.path != NO_MODEL and settings.lengths is None and _has_data(settings):
        check_names(config)
    elif config.model.path != NO_MODEL:
        check_name(config.model.path, "model.path")
    if recipe is None and not _has_override(settings, "model.dtype"):
        import torch  # only after the settings have been checked, because the import takes seconds

        dtype: Literal["bfloat16", "float32"] = "bfloat16" if settings.gpu or torch.cuda.is_available() else "float32"
        return replace(config, model=replace(config.model, dtype=dtype))
    return config


def _resolved(config: Config, settings: argparse.Namespace) -> Config:
    """Return the settings with every `auto` replaced by the value that a run on the planned devices would choose."""
    from padfree.model.structure import model_skeleton
    from padfree.train.resolve_auto import resolve_auto

    if config.model.path == NO_MODEL:
        return config
    for_gpu = settings.gpu is not None or _sees_gpu(config)
    return resolve_auto(
        config,
        model_skeleton(config),
        processes=settings.ranks,
        device_type="cuda" if for_gpu else "cpu",
        memory=_device_memory(settings),
    ).config


def _sees_gpu(config: Config) -> bool:
    import torch

    return config.run.device != "cpu" and torch.cuda.is_available()


def _calibrate(config: Config, settings: argparse.Namespace) -> None:
    from padfree.model.structure import model_skeleton
    from padfree.tools.planner import calibrate

    model = model_skeleton(config)
    with _bar("measuring") as progress:
        found = calibrate(model.config, config, max_tokens=settings.max_tokens, progress=progress)
    print(
        f"measured    on {found.device}, {config.model.dtype}, compile {config.parallel.compile}, checkpointing "
        f"{config.parallel.checkpointing}, models with {_listed(found.layers)} layers; milliseconds per micro-batch:"
    )
    for each in found.measurements:
        lengths = f"{len(each.lengths)} x {each.lengths[0]:,}"
        print(f"            {lengths:>12} tokens {each.seconds * 1e3:10.2f}  fitted {each.predicted * 1e3:10.2f}")
    cost = found.cost
    print(
        f"cost        {cost.linear:.3e} s per token, {cost.quadratic:.3e} s per token squared, {cost.constant:.3e} s "
        f"per micro-batch, {cost.step:.3e} s per step; measured and fitted times differ by a factor of at most "
        f"{found.worst:.2f}"
    )
    print(f"stored      {found.path}")
    print(
        "            on this device, padfree plan uses this file automatically; for training or other devices, set "
        f"batch.cost={found.path}"
    )


def _plan(config: Config, settings: argparse.Namespace) -> tuple[RunPlan, Suggestion | None]:
    from padfree.model.structure import model_skeleton
    from padfree.tools.planner import DeviceMemory, PlanShape, choose_time_model, load_steps, make_plan, suggest
    from padfree.train.preflight import check_experts

    if config.parallel.context == "auto":
        raise UserError(
            "parallel.context",
            "'auto' is not supported by padfree plan, which plans a fixed number of context ranks",
            "set parallel.context=1 for the plan, or use --dry-run of the training command",
        )
    shape = PlanShape(
        ranks=settings.ranks,
        context=config.parallel.context,
        replicate=config.parallel.replicate,
        max_tokens=config.batch.max_tokens,
    )
    exact_steps = _exact_steps(settings.exact_steps)
    need = None
    if config.model.path != NO_MODEL:
        need = DeviceMemory(config, model_skeleton(config))
        check_experts(config, need.model, settings.ranks)
    time_model = choose_time_model(config, need and need.model.config, settings.gpu)
    with _bar("tokenising") as progress:
        notes: list[str] = []
        data = load_steps(
            config, lengths=settings.lengths, processes=settings.ranks, progress=progress, on_note=notes.append
        )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if need is not None:
        need.copied_keys = data.copied_keys
    layout, suggestion = config.parallel.layout, None
    if settings.suggest:
        assert need is not None
        suggestion = suggest(data.steps, shape, time_model.cost, need=need, memory=_device_memory(settings))
        if not _has_cap(settings) and suggestion.max_tokens is not None and suggestion.context is not None:
            shape = replace(shape, max_tokens=suggestion.max_tokens, context=suggestion.context)
            layout = suggestion.layout or layout
    with _bar("planning") as progress:
        plan = make_plan(data, shape, time_model, layout=layout, need=need, exact_steps=exact_steps, progress=progress)
    return plan, suggestion


def _scaling(plan: RunPlan, config: Config, settings: argparse.Namespace) -> Scaling | None:
    if settings.hosts is None:
        return None
    from padfree.model.structure import model_skeleton
    from padfree.tools.planner import DeviceMemory
    from padfree.tools.planner.scaling import Links, plan_scaling

    if config.model.path == NO_MODEL:
        raise UserError(
            "--hosts", f"{settings.hosts} needs a model", "give --model: the traffic between hosts depends on the model"
        )
    if config.parallel.expert > 1:
        raise UserError(
            "--hosts",
            f"{settings.hosts} cannot be planned with parallel.expert={config.parallel.expert}, because the exchange "
            "of tokens between experts is not modelled",
            "leave out --hosts, or set parallel.expert=1",
        )
    return plan_scaling(
        plan.epoch.steps,
        plan.shape,
        plan.time_model,
        config.parallel,
        config.model.dtype,
        hosts=settings.hosts,
        links=Links.of(settings.link_inside, settings.link_between, settings.gpu),
        need=DeviceMemory(config, model_skeleton(config)),
        memory=_device_memory(settings),
    )


def _exact_steps(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError("--exact-steps", "", "give 1 or more, or all", value=text)
    return int(text)


def _device_memory(settings: argparse.Namespace) -> float:
    """Return the memory of a device in bytes: from --memory, from the GPU of this machine, or a default."""
    import torch

    if settings.memory is not None:
        return float(settings.memory) * GIBIBYTE
    if settings.gpu is None and torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return MEMORY * GIBIBYTE


def _write_page(
    plan: RunPlan,
    suggestion: Suggestion | None,
    scaling: Scaling | None,
    config: Config,
    settings: argparse.Namespace,
) -> None:
    from padfree.tools.planner import write_page

    names = ", ".join(config.data.paths)
    title = f"Plan for {names}" if config.model.path == NO_MODEL else f"Plan for {config.model.path} on {names}"
    try:
        write_page(plan, settings.html, title=title, suggestion=suggestion, scaling=scaling)
    except OSError as error:
        raise UserError(
            "--html", f"{settings.html} cannot be written ({error.strerror})", "give another file"
        ) from None
    if not settings.json:
        print(f"page        {settings.html}")


def _is_terminal() -> bool:
    return sys.stderr.isatty()


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Context manager that shows a progress bar named `what` on stderr, and yields the function that updates it.

    If stderr is not a terminal, the context manager shows nothing and yields None. Stdout stays free for results.
    """
    if not _is_terminal():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError as error:
        raise UserError("padfree", "the package rich is missing", "install it with pip install rich") from error
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))
