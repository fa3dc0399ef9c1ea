"""`padfree demo`: all of padfree on a small scale, in one folder, on two CPU cores, without a network.

    stage     does                                                              writes into the folder
    data      makes problems with answers, trains a tokenizer, makes a model    data/, model/
    plan      plans an epoch                                                    plan.html
    check     compares packed training with one sample at a time                check.json
    padded    the first steps of fine-tuning with plain transformers, padded
    packed    the same steps and more, packed: the losses must be the same      sft/
    reward    RL with in-process rollouts                                       rl/
    gpu       if there is a GPU: a larger model on it, padded and packed        gpu/
    report    both runs on one page                                             report.html

The trained model is so small that a CPU is as fast as a GPU, so its runs always use the CPU. The gpu stage shows the
gain of packing on a GPU with a few steps of a larger model.

`padfree demo --real MODEL --data FILE` trains a real model with SFT and GRPO instead. It writes everything into real/:

    rows      takes the first rows of the file for training, and holds out some train.jsonl, test.jsonl
    before    answers of the model, and its accuracy on the held-out rows
    tuned     a few steps of SFT, then the same questions again                 sft/
    rewarded  a few more steps of GRPO, then the same questions again           rl/
    page      both runs on one page                                             report.html

The file has one JSON object per line, with `question` and `answer` as in GSM8K, or with `prompt` and `response`.
Answers end in `#### 42`. A few steps teach a small model the form of an answer but hardly any arithmetic; for that, run
the recipes in `recipes/` for longer.

`demo.json` holds the results of all finished stages. With `--resume` the demo continues with the next stage, and an
unfinished training run continues from its checkpoint.
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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padfree.config import Config, config_from_dict
from padfree.data.rewards import hashed_number, number_after_hashes
from padfree.errors import UserError, need
from padfree.record.file_names import METRICS
from padfree.record.run_folder import check_not_in_use
from padfree.testing.arithmetic import Sizes, rl_config, sft_config, write_model, write_rows, write_task
from padfree.tools.talk.find_model import find_model

if TYPE_CHECKING:
    from rich.console import Console

STATE = "demo.json"
SAME_LOSS = {"float32": 1e-5, "bfloat16": 2e-2}
"""The largest difference allowed between padded and packed losses, by dtype."""
FORMS = (("question", "answer"), ("prompt", "response"))
FORM_REWARD = 0.2

Found = dict[str, Any]
"""The result of a stage, as stored in `demo.json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSizes(Sizes):
    """Sizes of the demo."""

    compared: int = 12  # number of SFT steps that also run padded
    gpu_hidden: int = 1024  # hidden size of the model for the GPU stage
    gpu_layers: int = 8
    gpu_samples: int = 512  # samples per step
    gpu_steps: int = 16
    gpu_set_up: int = 3  # first steps that are not timed: compilation, kernel selection, memory allocation


@dataclass(frozen=True, kw_only=True, slots=True)
class RealSizes:
    """Sizes of the demo with a real model: minutes on a CPU for 100 to 200 million parameters."""

    held_out: int = 12
    samples: int = 8  # samples per step of SFT
    sft_steps: int = 15
    responses: int = 16  # responses per step of GRPO
    group: int = 8
    rl_steps: int = 4
    max_new_tokens: int = 160
    shown: int = 1  # questions whose answers are shown


SIZES, REAL_SIZES = DemoSizes(), RealSizes()


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="plan, check, fine-tune and run RL with a tiny model, on a CPU",
        description="Makes a small data set and a tiny model, then plans, checks, fine-tunes packed and padded, and "
        "trains with rewards. Prints a summary and writes a report page. Needs no GPU and no network.",
        epilog="example: padfree demo --folder runs/demo",
    )
    add = command.add_argument
    add(
        "--folder",
        default="padfree-demo",
        help="output folder; an earlier demo in it is replaced (default %(default)s)",
    )
    add(
        "--real",
        nargs="?",
        const="",
        metavar="MODEL",
        help="train a real model with SFT and GRPO instead; needs --data",
    )
    add("--model", help="model folder or Hub id for --real")
    add("--data", metavar="FILE", help="data for --real: JSON Lines with question and answer, as in GSM8K")
    add("--resume", action="store_true", help="continue a demo that was stopped")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    model = _real_model(settings)
    demo = Demo(Path(settings.folder), console(), SIZES, resume=settings.resume)
    real = None if model is None else RealDemo(demo=demo, model=model, data=settings.data, sizes=REAL_SIZES)
    stages = STAGES if real is None else REAL_STAGES
    if demo.found.keys() - stages.keys():
        raise UserError(
            "--resume",
            f"{demo.folder} holds a demo {'without' if real is not None else 'with'} --real",
            "resume it with the options that it was started with, or give another --folder",
        )
    begin = time.perf_counter()
    try:
        with _surroundings(demo.folder / "cache"):
            for number, (name, (title, stage)) in enumerate(stages.items(), start=1):
                demo.console.print(f"{number}/{len(stages)}  {title}", style="bold", highlight=False)
                if name in demo.found:
                    demo.say("already done")
                else:
                    demo.keep(name, stage(real or demo))
    except KeyboardInterrupt:
        again = "" if real is None else f" --real {model} --data {settings.data}"
        demo.console.print(
            f"\nstopped; continue with: padfree demo{again} --folder {settings.folder} --resume",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise SystemExit(130) from None
    rows = _result(demo.found) if real is None else _real_result(demo.found)
    rows.append(("time", f"{time.perf_counter() - begin:.0f} s"))
    rows.append(("report", demo.found["report" if real is None else "page"]["path"]))
    if real is None:
        demo.console.print()
    else:
        rows.append(("chat with the model", f"padfree chat {real.folder / 'rl'}"))
    for name, text in rows:
        demo.console.print(f"{name:42}{text}", highlight=False, markup=False, soft_wrap=True)


def _real_model(settings: argparse.Namespace) -> str | None:
    """The model of `--real`; None without `--real`."""
    if settings.real is None:
        for name in ("model", "data"):
            need(getattr(settings, name) is None, f"--{name}", getattr(settings, name), "add --real, or remove it")
        return None
    if settings.real and settings.model is not None:
        raise UserError(
            "--model", f"and --real {settings.real!r} both name a model", "give one of them", value=settings.model
        )
    model: str | None = settings.real or settings.model
    if model is None:
        raise UserError(
            "--real", "names no model", "give a folder or a Hub id, as in --real HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    if settings.data is None:
        raise UserError("--data", "is missing", "give a JSON Lines file with question and answer, as in GSM8K")
    find_model(model)  # fail early if the model does not exist
    return model


@contextmanager
def _surroundings(cache: Path) -> Iterator[None]:
    """Context manager: keep the cache in the demo's folder, and hide the progress bars of transformers."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    before, bars = os.environ.get("PADFREE_CACHE"), logging.is_progress_bar_enabled()
    os.environ["PADFREE_CACHE"] = str(cache)
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


def console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise UserError("demo", "the package rich is missing", "pip install rich") from error
    return Console()


class Demo:
    """The folder of a demo, the results of its finished stages, and the console to print on."""

    def __init__(self, folder: Path, console: Console, sizes: DemoSizes, *, resume: bool) -> None:
        self.folder, self.console, self.sizes = folder, console, sizes
        self.found: dict[str, Found] = {}
        state = folder / STATE
        if resume:
            if not state.exists():
                raise UserError(
                    "--resume", f"{folder} does not hold a demo", "remove --resume, or give the demo's --folder"
                )
            self.found = _read_state(state, "--resume")
            return
        if state.exists():
            _read_state(state, "--folder")
            if others := sorted(path.name for path in folder.iterdir() if path.name not in OWN):
                raise UserError(
                    "--folder", f"{folder} holds {others[0]} next to an earlier demo", "give a new or empty folder"
                )
            for run in ("sft", "rl", "real/sft", "real/rl"):
                check_not_in_use(folder / run)
            shutil.rmtree(folder)  # an earlier demo
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError("--folder", f"{folder} is not empty", "give a new or empty folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            state.write_text("{}", encoding="utf-8")
        except OSError as error:
            raise UserError(
                "--folder", f"{folder} cannot be written ({error.strerror})", "give another folder"
            ) from None

    def keep(self, stage: str, found: Found) -> None:
        self.found[stage] = found
        temporary = self.folder / f"{STATE}.writing"
        temporary.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        temporary.replace(self.folder / STATE)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(f"     {text}", style=style, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, total: int | None) -> Iterator[Callable[[int, str], None]]:
        """A progress bar on a terminal, a few printed lines elsewhere. Yields a function of (done, text)."""
        if not self.console.is_terminal:
            interval = max((total or 1) // 5, 1)
            yield lambda done, text: self.say(f"{done}/{total}  {text}") if total and done % interval == 0 else None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counted = (MofNCompleteColumn(),) if total else ()
        columns = (TextColumn("    "), BarColumn(), *counted, TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=total)
            yield lambda done, text: progress.update(task, completed=done, description=text)

    def train(self, config: Config, name: str, digits: str) -> list[dict[str, Any]]:
        """Start or resume a run; the bar shows the metric `name`. Returns the metrics of every step."""
        from padfree.train import train

        with self.bar(config.run.steps) as bar:
            result = train(config, on_step=lambda step: bar(step["step"] + 1, f"{name} {step[name]:{digits}}"))
        if result.stopped:
            raise KeyboardInterrupt
        return _metrics(config)

    def write_report(self, folder: Path, names: list[str]) -> Found:
        from padfree.tools.report import write_report

        with self.bar(None) as bar:
            bar(0, "plots")
            write_report([folder / "sft", folder / "rl"], folder / "report.html", names=names)
        return {"path": str(folder / "report.html")}


def _read_state(path: Path, setting: str) -> dict[str, Found]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not found.keys() <= STAGES.keys() | REAL_STAGES.keys():
        raise UserError(setting, f"{path} was not written by a demo", "give a new or empty --folder")
    return found


def _metrics(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run.folder) / METRICS).read_text(encoding="utf-8").splitlines()]


# The stages of the demo


def make_data(demo: Demo) -> Found:
    with demo.bar(None) as bar:
        bar(0, "problems, tokenizer and model")
        rows, tokenizer, parameters = write_task(demo.folder, demo.sizes)
    demo.say(
        f"{len(rows):,} problems with answers, {demo.sizes.prompts} without; {len(tokenizer)} tokens in the vocabulary"
    )
    demo.say(f"a Qwen3 with {parameters:,} random parameters; an example of a problem and its answer:")
    worked = next(row for row in rows if row["response"].count("=") == 2)
    for line in (worked["prompt"] + worked["response"]).splitlines():
        demo.say(f"  {line}", style="dim")
    return {"rows": len(rows), "parameters": parameters}


def make_plan(demo: Demo) -> Found:
    import torch

    from padfree.model.structure import skeleton
    from padfree.tools import planner
    from padfree.train.resolve_auto import device_memory, resolve_auto

    here, config = torch.device("cpu"), sft_config(demo.folder, demo.sizes)
    model, page = skeleton(config.model.path), demo.folder / "plan.html"
    config = resolve_auto(config, model, processes=1, device_type=here.type, memory=device_memory(here)).config
    with demo.bar(None) as bar:
        bar(0, "tokenising and planning")
        needed = planner.DeviceMemory(config, model)
        time_model = planner.choose_time_model(config, needed.model.config, None)
        shape = planner.PlanShape(ranks=1, max_tokens=config.batch.max_tokens)
        plan = planner.make_plan(planner.load_steps(config), shape, time_model, need=needed)
        planner.write_page(plan, page, title="Plan of the demo's fine-tuning")
    summary = plan.summary()
    shortest, longest = (summary["length"][name] for name in ("shortest", "longest"))
    demo.say(
        f"{summary['tokens']:,} tokens in samples of {shortest} to {longest} tokens; "
        f"padded batches would be {summary['padding_avoided']:.0%} padding"
    )
    demo.say(f"see {page}")
    return {"padding": summary["padding_avoided"]}


def check(demo: Demo) -> Found:
    from padfree.tools.check import check_model, chosen_samples

    config = sft_config(demo.folder, demo.sizes)
    with demo.bar(None) as bar:
        bar(0, "samples")
        samples = chosen_samples(list(config.data.path), 6, tokenizer=config.model.path, max_length=256)
        report = check_model(
            config.model.path, samples, origin="of the demo's data", device="cpu", on_progress=lambda text: bar(0, text)
        )
    (demo.folder / "check.json").write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
    demo.say(report.verdict)
    if not report.passed:
        raise UserError(
            "demo", "padfree check failed", "run padfree check to see which results differ, or install another torch"
        )
    gradients = max(result.difference for result in report.rows if result.quantity == "gradients")
    demo.say(f"gradients of all parameters differ by at most {gradients:.1e} from one sample at a time")
    return {"gradients": gradients}


def train_padded(demo: Demo) -> Found:
    return padded_steps(demo, sft_config(demo.folder, demo.sizes), demo.sizes.compared)


def train_packed(demo: Demo) -> Found:
    found = train_and_compare(demo, sft_config(demo.folder, demo.sizes), demo.found["padded"], set_up=1)
    demo.say(f"the first {demo.sizes.compared} losses differ by at most {found['difference']:.1e} from the padded ones")
    demo.say(f"these steps were {found['faster']:.1f} times as fast as padded")
    return found


def train_by_reward(demo: Demo) -> Found:
    rewards = [step["reward"] for step in demo.train(rl_config(demo.folder, demo.sizes), "reward", ".2f")]
    last = rewards[-5:]
    found = {"before": rewards[0], "after": sum(last) / len(last)}
    demo.say(
        f"mean reward: {found['before']:.2f} in the first step, {found['after']:.2f} in the last {len(last)} steps"
    )
    return found


def compare_on_gpu(demo: Demo) -> Found:
    """Padded and packed steps of a model that is large enough for a GPU."""
    import torch
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():
        demo.say("skipped: this machine has no GPU")
        return {}
    config, sizes = gpu_config(demo), demo.sizes
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.folder / "model")
    parameters = write_model(Path(config.model.path), tokenizer, sizes.gpu_hidden, layers=sizes.gpu_layers, head=64)
    padded = padded_steps(demo, config, sizes.gpu_steps)
    found = train_and_compare(demo, config, padded, set_up=sizes.gpu_set_up)
    demo.say(f"a Qwen3 with {parameters:,} random parameters: packed is {found['faster']:.1f} times as fast as padded")
    demo.say(f"losses differ by at most {found['difference']:.1e}, in bfloat16")
    return {**found, "parameters": parameters, "device": torch.cuda.get_device_name()}


def make_report(demo: Demo) -> Found:
    return demo.write_report(demo.folder, ["fine-tuning", "rewards"])


def gpu_config(demo: Demo) -> Config:
    return config_from_dict(
        {
            "model": {"path": str(demo.folder / "gpu" / "model"), "dtype": "bfloat16"},
            "data": {"path": [str(demo.folder / "data" / "train.jsonl")], "epochs": None},
            "batch": {"samples": demo.sizes.gpu_samples, "max_tokens": 65536},
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"export": False},
            "run": {"folder": str(demo.folder / "gpu" / "run"), "steps": demo.sizes.gpu_steps, "device": "cuda"},
        }
    )


def padded_steps(demo: Demo, config: Config, steps: int) -> Found:
    """Train with plain transformers code: each batch is padded to its longest sample, one optimizer step per batch."""
    import torch
    from transformers import AutoModelForCausalLM

    from padfree.optim.optimizer import make_optimizer
    from padfree.optim.schedule import learning_rate_factor
    from padfree.tools.check.padded import padded_loss
    from padfree.train.training_data import load_tokenizer, load_training_data, make_batcher

    device, lower = config.run.device, config.model.dtype != "float32"
    assert config.optimizer.max_grad_norm is not None
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train().to(device)
    optimizer = make_optimizer(model, config.optimizer)
    batcher = make_batcher(config, load_training_data(config, load_tokenizer(config)).samples)
    schedule: dict[str, Any] = asdict(config.schedule)  # kind, warmup, final
    losses, seconds = [], []
    with demo.bar(steps) as bar:
        for step in range(steps):
            samples: list[Any] = [sample for group in next(batcher) for sample in group]
            begin = time.perf_counter()
            optimizer.set_rates(learning_rate_factor(step, steps=config.run.steps, **schedule))
            with torch.autocast(device, dtype=torch.bfloat16, enabled=lower):
                losses.append(padded_loss(model, [samples], sum(sample.num_labels for sample in samples)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            bar(step + 1, f"loss {losses[-1]:.4f}")
    return {"losses": losses, "seconds": seconds}


def train_and_compare(demo: Demo, config: Config, padded: Found, *, set_up: int) -> Found:
    """Train packed and compare with `padded_steps`. The losses must agree. The first `set_up` steps are not timed."""
    steps = demo.train(config, "loss", ".4f")[: len(padded["losses"])]
    difference = max(abs(step["loss"] - loss) for step, loss in zip(steps, padded["losses"], strict=True))
    if difference > SAME_LOSS[config.model.dtype]:
        raise UserError(
            "demo",
            f"packed and padded losses differ by {difference:.1e}",
            "run padfree check, or install another torch",
        )
    faster = sum(padded["seconds"][set_up:]) / sum(step["seconds"] for step in steps[set_up:])
    return {"difference": difference, "faster": faster}


def _result(found: Mapping[str, Found]) -> list[tuple[str, str]]:
    packed, reward, gpu = found["packed"], found["reward"], found["gpu"]
    rows = [
        (f"packed compared with padded{', CPU' if gpu else ''}", f"{packed['faster']:.1f} times as fast"),
        ("difference of their losses", f"at most {packed['difference']:.0e}"),
        ("gradients, packed and one at a time", f"differ by at most {found['check']['gradients']:.0e}"),
        ("mean reward before and after RL", f"{reward['before']:.2f} -> {reward['after']:.2f}"),
    ]
    if gpu:
        size = f"{gpu['parameters'] / 1e6:.0f}M parameters"
        rows.insert(2, (f"the same on {gpu['device']}", f"{gpu['faster']:.1f} times as fast, {size}"))
    return rows


# The stages of a demo with a real model


@dataclass(frozen=True, kw_only=True, slots=True)
class RealDemo:
    """A demo with the user's model and data."""

    demo: Demo
    model: str
    data: str
    sizes: RealSizes

    @property
    def folder(self) -> Path:
        return self.demo.folder / "real"

    def config(self, model: str, name: str, steps: int, **sections: Mapping[str, Any]) -> Config:
        import torch

        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        return config_from_dict(
            {
                "model": {"path": model, "dtype": dtype},
                "data": {"path": [str(self.folder / "train.jsonl")], "epochs": None},
                "eval": {"path": [str(self.folder / "test.jsonl")], "start": False},
                "run": {"folder": str(self.folder / name), "steps": steps},
                **sections,
            }
        )

    def sft(self) -> Config:
        return self.config(
            self.model,
            "sft",
            self.sizes.sft_steps,
            batch={"samples": self.sizes.samples, "max_tokens": 4096},
            optimizer={"lr": 5e-5},
            schedule={"kind": "linear", "warmup": 2, "final": 0.1},
        )

    def rl(self, model: str) -> Config:
        sizes = self.sizes
        rollout = {
            "samples_per_prompt": sizes.group,
            "max_new_tokens": sizes.max_new_tokens,
            "max_concurrent": sizes.responses,
        }
        return self.config(
            model,
            "rl",
            sizes.rl_steps,
            loss={"kind": "clip", "advantage": "grpo"},
            batch={"samples": sizes.responses, "max_tokens": 4096},
            rollout={"reward": f"{__name__}:reward", **rollout},
            optimizer={"lr": 5e-6},
        )


def reward(response: str, row: Mapping[str, Any]) -> float:
    """1 for the right number after `####`, `FORM_REWARD` for a wrong number, 0 without a number."""
    return 1.0 if number_after_hashes(response, row) else FORM_REWARD * (hashed_number(response) is not None)


def split_rows(real: RealDemo) -> Found:
    sizes = real.sizes
    wanted = sizes.held_out + max(sizes.samples * sizes.sft_steps, sizes.responses // sizes.group * sizes.rl_steps)
    rows = read_rows(real.data, wanted)
    if len(rows) <= sizes.held_out:
        raise UserError("--data", f"{real.data} has only {len(rows)} rows", f"give more than {sizes.held_out} rows")
    train, test = rows[: -sizes.held_out], rows[-sizes.held_out :]
    write_rows(real.folder / "train.jsonl", train)
    write_rows(real.folder / "test.jsonl", test)
    real.demo.say(f"{len(train)} rows for training, {len(test)} held out")
    return {"train": len(train), "test": len(test)}


def read_rows(name: str, most: int) -> list[dict[str, str]]:
    """The first rows of a JSON Lines file, as prompt, response and answer."""
    path = Path(name).expanduser()
    if path.exists() and not path.is_file():
        raise UserError("--data", f"{name} is not a file", "give a JSON Lines file")
    try:
        with path.open(encoding="utf-8") as file:
            return [_row(line, f"{name}:{number}") for number, line in enumerate(islice(file, most), start=1)]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError("--data", f"{name} cannot be read ({reason})", "give a JSON Lines file") from None


def _row(line: str, location: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    for prompt, response in FORMS:
        if isinstance(row, dict) and isinstance(row.get(prompt), str) and isinstance(row.get(response), str):
            if hashed_number(row[response]) is None:
                raise UserError(
                    "--data",
                    f"the answer of {location} does not end in '#### number'",
                    "end every answer with #### and a number, as in GSM8K",
                )
            return {"prompt": row[prompt], "response": row[response], "answer": row[response]}
    raise UserError(
        "--data",
        f"{location} is not a JSON object whose question and answer are strings",
        "give each row a question and an answer, as in GSM8K",
    )


def measured(real: RealDemo, model: str) -> Found:
    """Held-out accuracy and mean reward of a model. Prints some of its answers."""
    from padfree.tools.talk.speaker import open_speaker
    from padfree.train.run import evaluate

    rows = [json.loads(line) for line in (real.folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    speaker = open_speaker(find_model(model))
    prompts = [speaker.prompt(row["prompt"]) for row in rows[: real.sizes.shown]]
    for row, answer in zip(rows, speaker.answer(prompts, max_new_tokens=real.sizes.max_new_tokens), strict=False):
        real.demo.say(f"> {row['prompt']}", style="dim")
        for line in answer.text.splitlines():
            real.demo.say(f"  {line}", style="dim")
    found = evaluate(real.rl(model))
    real.demo.say(f"held-out rows: {found['eval/pass@1']:.0%} correct, mean reward {found['eval/reward']:.2f}")
    return {"right": found["eval/pass@1"], "reward": found["eval/reward"]}


def tuned(real: RealDemo) -> Found:
    real.demo.train(real.sft(), "loss", ".4g")
    return measured(real, str(real.folder / "sft" / "model"))


def rewarded(real: RealDemo) -> Found:
    real.demo.train(real.rl(str(real.folder / "sft" / "model")), "reward", ".4g")
    return measured(real, str(real.folder / "rl" / "model"))


def _real_result(found: Mapping[str, Found]) -> list[tuple[str, str]]:
    names = ("before", "tuned", "rewarded")
    return [(name, f"{found[name]['right']:.0%} correct, mean reward {found[name]['reward']:.2f}") for name in names]


STAGES: Mapping[str, tuple[str, Callable[[Any], Found]]] = {
    "data": ("data, tokenizer and model", make_data),
    "plan": ("plan an epoch", make_plan),
    "check": ("check that packing does not change results", check),
    "padded": ("fine-tune with padding, plain transformers", train_padded),
    "packed": ("fine-tune with packing", train_packed),
    "reward": ("train with rewards", train_by_reward),
    "gpu": ("the same comparison on a GPU", compare_on_gpu),
    "report": ("report", make_report),
}
REAL_STAGES: Mapping[str, tuple[str, Callable[[Any], Found]]] = {
    "rows": ("training and held-out rows", split_rows),
    "before": ("the model before training", lambda real: measured(real, real.model)),
    "tuned": ("fine-tune (SFT)", tuned),
    "rewarded": ("train with rewards (GRPO)", rewarded),
    "page": ("report", lambda real: real.demo.write_report(real.folder, ["SFT", "GRPO"])),
}
OWN = {STATE, f"{STATE}.writing", "cache", "data", "model", "plan.html", "check.json", "sft", "rl", "gpu", "real"}
OWN |= {"report.html"}
"""Names of all files and folders that a demo writes. A folder that holds other files is not removed."""
