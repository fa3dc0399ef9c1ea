"""`padfree demo`: the whole job at a small size, in one folder, on two CPU cores, without a network.

    stage     does                                                              leaves in the folder
    data      writes problems with answers, trains a tokenizer, makes a model   data/, model/
    plan      plans an epoch                                                    plan.html
    check     compares packed training with one sample at a time                check.json
    padded    the first steps of fine-tuning, plain transformers, padded rows
    packed    the same steps and more, packed: the losses must be the same      sft/
    reward    RL with rollouts written in the process                           rl/
    gpu       where there is one: a larger model on it, padded and packed       gpu/
    report    both runs on one page                                             report.html

The model that learns is so small that a CPU is as fast as a GPU for it, and its runs are on the CPU everywhere. What a
GPU gains from packing is shown by a few steps of a model that is worth one.

What a stage found is in `demo.json` once it is done. With `--resume` the demo goes on behind the last of these, and the
two training runs go on from their checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from padfree.cli.demo_data import problems, train_tokenizer, write_model, write_rows
from padfree.config import Config, config_from_dict
from padfree.record.files import METRICS

if TYPE_CHECKING:
    from rich.console import Console

STATE = "demo.json"
OWN = (
    STATE,
    f"{STATE}.writing",
    "cache",
    "data",
    "model",
    "plan.html",
    "check.json",
    "sft",
    "rl",
    "gpu",
    "report.html",
)
"""What a demo leaves in its folder; one that has more is somebody's, and is not removed."""
SAME_LOSS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Losses of the padded and the packed way may differ by so much, by what is computed in."""

SET_UP = 3
"""Steps on a GPU that pay for set-up: compiling, choosing kernels, the first memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is done."""

    rows: int = 4000
    prompts: int = 512
    hidden: int = 64
    samples: int = 40  # of a step of fine-tuning
    sft_steps: int = 200
    compared: int = 12  # of them padded, too
    responses: int = 128  # of a step of RL
    group: int = 8
    rl_steps: int = 20
    max_new_tokens: int = 64
    gpu_hidden: int = 1024  # of the model for a GPU
    gpu_layers: int = 8
    gpu_samples: int = 512  # of one of its steps
    gpu_steps: int = 16


SIZES = Sizes()


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="plan, check, fine-tune and reinforce a tiny model; a few minutes on a CPU",
        description="Makes a small data set and a tiny model, then plans, checks, fine-tunes packed and padded side by "
        "side, and trains by rewards. Ends with a table and a report page. Needs no GPU and no network.",
        epilog="example: padfree demo --folder runs/demo",
    )
    command.add_argument(
        "--folder",
        default="padfree-demo",
        help="for everything; an earlier demo in it is replaced (default %(default)s)",
    )
    command.add_argument("--resume", action="store_true", help="go on with a demo that was stopped")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    demo = Demo(Path(settings.folder), _console(), SIZES, resume=settings.resume)
    begin = time.perf_counter()
    try:
        with _cache(demo.folder / "cache"):
            for number, (name, title, stage) in enumerate(STAGES, start=1):
                demo.console.print(f"{number}/{len(STAGES)}  {title}", style="bold", highlight=False)
                if name in demo.found:
                    demo.say("done before")
                    continue
                demo.keep(name, stage(demo))
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: padfree demo --folder {settings.folder} --resume")
        raise SystemExit(130) from None
    show_result(demo, time.perf_counter() - begin)


class Demo:
    """The folder of a demo, what its stages have found so far, and where to show it."""

    def __init__(self, folder: Path, console: Console, sizes: Sizes, *, resume: bool) -> None:
        self.folder, self.console, self.sizes = folder, console, sizes
        self.found: dict[str, Any] = {}
        state = folder / STATE
        if resume:
            if not state.exists():
                raise ValueError(f"--resume: {folder} holds no demo; leave --resume out, or give the demo's --folder")
            self.found = _read_state(state, "--resume")
            return
        if folder.exists() and not state.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--folder: {folder} holds other things; give a new folder or an empty one")
        if state.exists():
            from padfree.record.run_folder import check_not_in_use

            _read_state(state, "--folder")
            if others := sorted(path.name for path in folder.iterdir() if path.name not in OWN):
                raise ValueError(f"--folder: {folder} has {others[0]} besides a demo; give a new or an empty folder")
            for run in ("sft", "rl"):
                check_not_in_use(folder / run)
            shutil.rmtree(folder)  # an earlier demo
        try:
            folder.mkdir(parents=True, exist_ok=True)
            state.write_text("{}", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--folder: {folder} cannot be written ({error.strerror}); give another") from None

    def keep(self, stage: str, found: Mapping[str, Any]) -> None:
        self.found[stage] = found
        beside = self.folder / f"{STATE}.writing"
        beside.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        beside.replace(self.folder / STATE)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(f"     {text}", style=style, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, total: int | None) -> Iterator[Callable[[int, str], None]]:
        """A bar on a terminal, now and then a line elsewhere: the function takes what is done, and a text."""
        if not self.console.is_terminal:
            often = max((total or 1) // 5, 1)
            yield lambda done, text: self.say(f"{done}/{total}  {text}") if total and done % often == 0 else None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counted = (MofNCompleteColumn(),) if total else ()
        columns = (TextColumn("    "), BarColumn(), *counted, TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=total)
            yield lambda done, text: progress.update(task, completed=done, description=text)

    @property
    def sft(self) -> Config:
        """The settings of the fine-tuning run."""
        sizes = self.sizes
        return config_from_dict(
            {
                "model": {"path": str(self.folder / "model")},
                "data": {"path": [str(self.folder / "data" / "train.jsonl")], "epochs": None},
                "batch": {"samples": sizes.samples, "max_tokens": 8192},
                "optimizer": {"lr": 8e-3, "eps": 1e-6},
                "schedule": {"kind": "linear", "warmup": sizes.sft_steps // 20, "final": 0.1},
                "checkpoint": {"every": 25},
                "run": {"folder": str(self.folder / "sft"), "steps": sizes.sft_steps, "device": "cpu"},
            }
        )

    @property
    def rl(self) -> Config:
        """The settings of the run with rewards; it begins with the fine-tuned model."""
        sizes = self.sizes
        return config_from_dict(
            {
                "model": {"path": str(self.folder / "sft" / "model")},
                "data": {"path": [str(self.folder / "data" / "prompts.jsonl")], "epochs": None},
                "batch": {"samples": sizes.responses, "max_tokens": 8192},
                "rollout": {
                    "reward": "number_after_hashes",
                    "group": sizes.group,
                    "max_new_tokens": sizes.max_new_tokens,
                },
                "loss": {"kind": "clip", "advantage": "grpo"},
                "optimizer": {"lr": 1e-3},
                "checkpoint": {"every": 5},
                "run": {"folder": str(self.folder / "rl"), "steps": sizes.rl_steps, "device": "cpu"},
            }
        )

    @property
    def gpu(self) -> Config:
        """The settings of the larger model's steps."""
        sizes = self.sizes
        return config_from_dict(
            {
                "model": {"path": str(self.folder / "gpu" / "model"), "dtype": "bfloat16"},
                "data": {"path": [str(self.folder / "data" / "train.jsonl")], "epochs": None},
                "batch": {"samples": sizes.gpu_samples, "max_tokens": 65536},
                "optimizer": {"lr": 1e-4},
                "checkpoint": {"export": False},
                "run": {"folder": str(self.folder / "gpu" / "run"), "steps": sizes.gpu_steps, "device": "cuda"},
            }
        )


def _read_state(path: Path, setting: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not found.keys() <= {name for name, _, _ in STAGES}:
        raise ValueError(f"{setting}: {path} is not what a demo writes; give another --folder, new or empty")
    return found


def make_data(demo: Demo) -> dict[str, Any]:
    sizes, data = demo.sizes, demo.folder / "data"
    with demo.bar(4) as bar:
        bar(0, "problems")
        rows = write_rows(data / "train.jsonl", problems(sizes.rows, seed=0))
        short = problems(sizes.prompts, seed=1, most_steps=3)
        asked = ({"prompt": row["prompt"], "answer": row["answer"]} for row in short)
        write_rows(data / "prompts.jsonl", asked)
        bar(2, "tokenizer")
        tokenizer = train_tokenizer(rows)
        bar(3, "model")
        parameters = write_model(demo.folder / "model", tokenizer, sizes.hidden)
        bar(4, "")
    demo.say(f"{len(rows):,} problems with answers, {sizes.prompts} without; {len(tokenizer)} tokens in the vocabulary")
    demo.say(f"a random Qwen3 of {parameters:,} parameters; a problem, and its answer worked out:")
    worked = next(row for row in rows if row["response"].count("=") == 2)
    for line in (worked["prompt"] + worked["response"]).splitlines():
        demo.say(f"  {line}", style="dim")
    return {"rows": len(rows), "parameters": parameters}


def make_plan(demo: Demo) -> dict[str, Any]:
    from padfree import planner
    from padfree.model.structure import skeleton
    from padfree.train.settle import device_memory, settle

    here = torch.device("cpu")
    config = settle(
        demo.sft, skeleton(demo.sft.model.path), processes=1, device_type=here.type, memory=device_memory(here)
    ).config
    with demo.bar(None) as bar:
        bar(0, "tokenising and planning")
        need = planner.DeviceMemory(config, skeleton(config.model.path))
        time_model = planner.choose_time_model(config, need.model.config, None)
        shape = planner.Shape(ranks=1, max_tokens=config.batch.max_tokens)
        plan = planner.make_plan(planner.load_steps(config), shape, time_model, need=need)
        planner.write_page(plan, demo.folder / "plan.html", title="Plan of the demo's fine-tuning")
    summary = plan.summary()
    shortest, longest = (summary["length"][name] for name in ("shortest", "longest"))
    demo.say(
        f"{summary['tokens']:,} tokens in samples of {shortest} to {longest}; "
        f"padded, {summary['padding_avoided']:.0%} of what is computed would be pads"
    )
    demo.say(f"more in {demo.folder / 'plan.html'}")
    return {"padding": summary["padding_avoided"]}


def check(demo: Demo) -> dict[str, Any]:
    from padfree.check import check_model, chosen_samples

    config = demo.sft
    with demo.bar(None) as bar:
        bar(0, "samples")
        samples = chosen_samples(list(config.data.path), 6, tokenizer=config.model.path, max_length=256)
        report = check_model(
            config.model.path, samples, origin="of the demo's data", device="cpu", on_progress=lambda text: bar(0, text)
        )
    (demo.folder / "check.json").write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
    demo.say(report.verdict)
    if not report.passed:
        raise ValueError("demo: padfree check failed; run padfree check for the table, this torch cannot be trusted")
    gradients = max(row.difference for row in report.rows if row.quantity == "gradients")
    demo.say(f"gradients of all parameters differ by at most {gradients:.1e}")
    return {"gradients": gradients}


def train_padded(demo: Demo) -> dict[str, Any]:
    """The first steps by plain transformers code."""
    return padded_steps(demo, demo.sft, demo.sizes.compared)


def padded_steps(demo: Demo, config: Config, steps: int) -> dict[str, Any]:
    """Steps by plain transformers code: each batch padded to its longest sample, one optimizer step."""
    from transformers import AutoModelForCausalLM

    from padfree.check.padded import padded_loss
    from padfree.train.optimizer import make_optimizer, set_learning_rate
    from padfree.train.schedule import learning_rate_factor
    from padfree.train.sources import load_source, load_tokenizer, make_batcher

    device, lower = config.run.device, config.model.dtype != "float32"
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train().to(device)
    chosen = config.optimizer
    optimizer = make_optimizer(
        model, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, weight_decay=chosen.weight_decay
    )
    batcher = make_batcher(config, load_source(config, load_tokenizer(config)).samples)
    schedule: dict[str, Any] = asdict(config.schedule)  # kind, warmup, final
    losses, seconds = [], []
    with demo.bar(steps) as bar:
        for step in range(steps):
            samples: list[Any] = [sample for group in next(batcher) for sample in group]
            begin = time.perf_counter()
            set_learning_rate(optimizer, chosen.lr * learning_rate_factor(step, steps=config.run.steps, **schedule))
            with torch.autocast(device, dtype=torch.bfloat16, enabled=lower):
                losses.append(padded_loss(model, [samples], sum(sample.num_labels for sample in samples)))
            assert chosen.max_grad_norm is not None
            torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            bar(step + 1, f"loss {losses[-1]:.4f}")
    return {"losses": losses, "seconds": seconds}


def train_packed(demo: Demo) -> dict[str, Any]:
    _train(demo, demo.sft, lambda metrics: f"loss {metrics['loss']:.4f}")
    found = compared(demo)
    demo.say(f"the first {demo.sizes.compared} losses differ by at most {found['difference']:.1e} from the padded ones")
    demo.say(f"and these steps were {found['faster']:.1f} times as fast")
    return found


def compared(demo: Demo) -> dict[str, Any]:
    """The steps that both ways have made: their losses, which must be the same, and their time."""
    return comparison(demo.sft, demo.found["padded"], set_up=1)


def comparison(config: Config, padded: Mapping[str, Any], *, set_up: int) -> dict[str, Any]:
    """The same of the steps of a run that `padded_steps` made, too; the first `set_up` of either are not timed."""
    steps = _metrics(Path(config.run.folder))[: len(padded["losses"])]
    difference = max(abs(step["loss"] - loss) for step, loss in zip(steps, padded["losses"], strict=True))
    if difference > SAME_LOSS[config.model.dtype]:
        raise ValueError(f"demo: losses differ by {difference:.1e} from the padded ones; this torch cannot be trusted")
    faster = sum(padded["seconds"][set_up:]) / sum(step["seconds"] for step in steps[set_up:])
    return {"difference": difference, "faster": faster}


def compare_on_gpu(demo: Demo) -> dict[str, Any]:
    """Padded and packed steps of a model that is worth a GPU."""
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():
        demo.say("there is none here; skipped")
        return {}
    config, sizes = demo.gpu, demo.sizes
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.folder / "model")
    parameters = write_model(
        demo.folder / "gpu" / "model", tokenizer, sizes.gpu_hidden, layers=sizes.gpu_layers, head=64
    )
    padded = padded_steps(demo, config, sizes.gpu_steps)
    _train(demo, config, lambda metrics: f"loss {metrics['loss']:.4f}")
    found = {**comparison(config, padded, set_up=SET_UP), "parameters": parameters}
    found["device"] = torch.cuda.get_device_name()
    demo.say(f"a random Qwen3 of {parameters:,} parameters: packed {found['faster']:.1f} times as fast as padded")
    demo.say(f"losses differ by at most {found['difference']:.1e}, in bfloat16")
    return found


def train_by_reward(demo: Demo) -> dict[str, Any]:
    _train(demo, demo.rl, lambda metrics: f"reward {metrics['reward']:.2f}")
    rewards = [step["reward"] for step in _metrics(demo.folder / "rl")]
    last = rewards[-5:]
    found = {"before": rewards[0], "after": sum(last) / len(last)}
    demo.say(f"the fine-tuned model earned {found['before']:.2f}; in the last {len(last)} steps {found['after']:.2f}")
    return found


def make_report(demo: Demo) -> dict[str, Any]:
    from padfree.report import write_report

    path = demo.folder / "report.html"
    with demo.bar(None) as bar:
        bar(0, "plots")
        write_report([demo.folder / "sft", demo.folder / "rl"], path, names=["fine-tuning", "rewards"])
    return {"path": str(path)}


Stage = Callable[[Demo], dict[str, Any]]
STAGES: tuple[tuple[str, str, Stage], ...] = (
    ("data", "data, tokenizer and model", make_data),
    ("plan", "plan an epoch", make_plan),
    ("check", "check that packing changes nothing", check),
    ("padded", "fine-tune, padded, by plain transformers", train_padded),
    ("packed", "fine-tune, packed", train_packed),
    ("reward", "train by rewards", train_by_reward),
    ("gpu", "the same comparison on a GPU", compare_on_gpu),
    ("report", "report", make_report),
)


def show_result(demo: Demo, seconds: float) -> None:
    found = demo.found
    rows = (
        (
            f"packed against padded{', on the CPU' if found['gpu'] else ''}",
            f"{found['packed']['faster']:.1f} times as fast",
        ),
        ("their losses", f"the same to {found['packed']['difference']:.0e}"),
        *_gpu_rows(found["gpu"]),
        ("gradients, packed against one at a time", f"the same to {found['check']['gradients']:.0e}"),
        ("reward before and after", f"{found['reward']['before']:.2f} -> {found['reward']['after']:.2f}"),
        ("this took", f"{seconds:.0f} s"),
        ("report", found["report"]["path"]),
    )
    demo.console.print()
    for name, value in rows:
        demo.console.print(f"{name:42}{value}", highlight=False, markup=False, soft_wrap=True)


def _gpu_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not found:
        return []
    size = f"{found['parameters'] / 1e6:.0f}M parameters"
    return [(f"the same on {found['device']}", f"{found['faster']:.1f} times as fast, {size}")]


def _train(demo: Demo, config: Config, shown: Callable[[Mapping[str, Any]], str]) -> None:
    from padfree.train import train

    with demo.bar(config.run.steps) as bar:
        result = train(config, on_step=lambda metrics: bar(metrics["step"] + 1, shown(metrics)))
    if result.stopped:
        raise KeyboardInterrupt


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Tokenised data in the demo's own folder; and no bars of transformers among ours."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    before, bars = os.environ.get("PADFREE_CACHE"), logging.is_progress_bar_enabled()
    os.environ["PADFREE_CACHE"] = str(folder)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PADFREE_CACHE"]
        else:
            os.environ["PADFREE_CACHE"] = before
        if bars:
            logging.enable_progress_bar()


def _console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ValueError("demo: the package rich is missing; pip install rich") from error
    return Console()
