"""`padfree demo`: the whole job at a small size, in one folder, on two CPU cores, without a network.

    stage     does                                                              leaves in the folder
    data      writes problems with answers, trains a tokenizer, makes a model   data/, model/
    plan      plans an epoch                                                    plan.html
    check     compares packed training with one sample at a time                check.json
    padded    the first steps of fine-tuning, plain transformers, padded rows
    packed    the same steps and more, packed: the losses must be the same      sft/
    reward    RL with rollouts written in the process                           rl/
    gpu       if there is one: a larger model on it, padded and packed          gpu/
    report    both runs on one page                                             report.html

The model that learns is so small that a CPU is as fast as a GPU for it, and its runs are on the CPU everywhere. The gpu
stage shows what packing gains on a GPU, with a few steps of a larger model.

`padfree demo --real MODEL --data FILE` takes a real model through SFT and GRPO instead. It leaves everything in real/:

    rows      the first rows of the file for training, the next ones held out   train.jsonl, test.jsonl
    before    what the model answers, and how many held-out answers are right
    tuned     a few steps of SFT, and the same questions again                  sft/
    rewarded  a few steps of GRPO from there, and the same questions again      rl/
    page      both runs on one page                                             report.html

The file has one JSON object a line, with `question` and `answer` as GSM8K has, or with `prompt` and `response`. Answers
end in `#### 42`. A few steps teach a small model the form of an answer and hardly any arithmetic: for that, run the
recipes in `recipes/` for longer.

`demo.json` holds the result of every stage that is done. With `--resume` the demo continues with the next stage, and an
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
"""By dtype: how much the losses of the padded and the packed way may differ."""
FORMS = (("question", "answer"), ("prompt", "response"))
FORM_REWARD = 0.2

Found = dict[str, Any]
"""The result of a stage, as `demo.json` has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSizes(Sizes):
    """How much the demo does."""

    compared: int = 12  # steps of SFT that are made padded, too
    gpu_hidden: int = 1024  # of the model for a GPU
    gpu_layers: int = 8
    gpu_samples: int = 512  # of one of its steps
    gpu_steps: int = 16
    gpu_set_up: int = 3  # of these steps are not timed: compiling, choosing kernels, the first memory


@dataclass(frozen=True, kw_only=True, slots=True)
class RealSizes:
    """How much is done with a real model: minutes on a CPU for 100 to 200 million parameters."""

    held_out: int = 12
    samples: int = 8  # of a step of SFT
    sft_steps: int = 15
    responses: int = 16  # of a step of GRPO
    group: int = 8
    rl_steps: int = 4
    max_new_tokens: int = 160
    shown: int = 1  # questions whose answers are shown


SIZES, REAL_SIZES = DemoSizes(), RealSizes()


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="plan, check, fine-tune and reinforce a tiny model, on a CPU",
        description="Makes a small data set and a tiny model, then plans, checks, fine-tunes packed and padded side by "
        "side, and trains by rewards. Ends with a table and a report page. Needs no GPU and no network.",
        epilog="example: padfree demo --folder runs/demo",
    )
    add = command.add_argument
    add(
        "--folder",
        default="padfree-demo",
        help="for everything; an earlier demo in it is replaced (default %(default)s)",
    )
    add("--real", nargs="?", const="", metavar="MODEL", help="SFT and GRPO of a real model instead, with --data")
    add("--model", help="model folder or Hub id for --real")
    add("--data", metavar="FILE", help="rows for --real: JSON Lines as GSM8K has")
    add("--resume", action="store_true", help="go on with a demo that was stopped")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    model = _real_model(settings)
    demo = Demo(Path(settings.folder), console(), SIZES, resume=settings.resume)
    real = None if model is None else RealDemo(demo=demo, model=model, data=settings.data, sizes=REAL_SIZES)
    stages = STAGES if real is None else REAL_STAGES
    if others := demo.found.keys() - stages.keys():
        raise UserError(
            "--resume", f"{demo.folder} holds another kind of demo (it has {min(others)})", "give its --folder"
        )
    begin = time.perf_counter()
    try:
        with _surroundings(demo.folder / "cache"):
            for number, (name, (title, stage)) in enumerate(stages.items(), start=1):
                demo.console.print(f"{number}/{len(stages)}  {title}", style="bold", highlight=False)
                if name in demo.found:
                    demo.say("done before")
                else:
                    demo.keep(name, stage(real or demo))
    except KeyboardInterrupt:
        again = "" if real is None else f" --real {model} --data {settings.data}"
        demo.console.print(
            f"\nstopped; go on with: padfree demo{again} --folder {settings.folder} --resume",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise SystemExit(130) from None
    rows = _result(demo.found) if real is None else _real_result(demo.found)
    rows.append(("this took", f"{time.perf_counter() - begin:.0f} s"))
    rows.append(("report", demo.found["report" if real is None else "page"]["path"]))
    if real is None:
        demo.console.print()
    else:
        rows.append(("talk to it", f"padfree chat {real.folder / 'rl'}"))
    for name, text in rows:
        demo.console.print(f"{name:42}{text}", highlight=False, markup=False, soft_wrap=True)


def _real_model(settings: argparse.Namespace) -> str | None:
    """The model of `--real`; None: it is not asked for."""
    if settings.real is None:
        for name in ("model", "data"):
            need(getattr(settings, name) is None, f"--{name}", getattr(settings, name), "give --real with it")
        return None
    if settings.real and settings.model is not None:
        raise UserError("--model", f", but --real names {settings.real!r}", "give one of them", value=settings.model)
    model: str | None = settings.real or settings.model
    if model is None:
        raise UserError(
            "--real", "no model", "give a folder or a Hub id, as in --real HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    if settings.data is None:
        raise UserError("--data", "missing", "give a JSON Lines file with question and answer, as GSM8K has")
    find_model(model)  # before anything is made
    return model


@contextmanager
def _surroundings(cache: Path) -> Iterator[None]:
    """Tokenised data go to the demo's own folder, and transformers shows no progress bars."""
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
    """The folder of a demo, what its stages have found so far, and where to show it."""

    def __init__(self, folder: Path, console: Console, sizes: DemoSizes, *, resume: bool) -> None:
        self.folder, self.console, self.sizes = folder, console, sizes
        self.found: dict[str, Found] = {}
        state = folder / STATE
        if resume:
            if not state.exists():
                raise UserError(
                    "--resume", f"{folder} holds no demo", "leave --resume out, or give the demo's --folder"
                )
            self.found = _read_state(state, "--resume")
            return
        if state.exists():
            _read_state(state, "--folder")
            if others := sorted(path.name for path in folder.iterdir() if path.name not in OWN):
                raise UserError("--folder", f"{folder} has {others[0]} besides a demo", "give a new or an empty folder")
            for run in ("sft", "rl", "real/sft", "real/rl"):
                check_not_in_use(folder / run)
            shutil.rmtree(folder)  # an earlier demo
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError("--folder", f"{folder} holds other things", "give a new folder or an empty one")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            state.write_text("{}", encoding="utf-8")
        except OSError as error:
            raise UserError("--folder", f"{folder} cannot be written ({error.strerror})", "give another") from None

    def keep(self, stage: str, found: Found) -> None:
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

    def train(self, config: Config, name: str, digits: str) -> list[dict[str, Any]]:
        """A run, or the rest of it; the bar shows a metric. Returns the metrics of every step."""
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
        raise UserError(setting, f"{path} is not what a demo writes", "give another --folder, new or empty")
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
    demo.say(f"a random Qwen3 of {parameters:,} parameters; a problem, and its answer worked out:")
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
        f"{summary['tokens']:,} tokens in samples of {shortest} to {longest}; "
        f"padded, {summary['padding_avoided']:.0%} of what is computed would be pads"
    )
    demo.say(f"more in {page}")
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
        raise UserError("demo", "padfree check failed", "run padfree check for the table, this torch cannot be trusted")
    gradients = max(row.difference for row in report.rows if row.quantity == "gradients")
    demo.say(f"gradients of all parameters differ by at most {gradients:.1e}")
    return {"gradients": gradients}


def train_padded(demo: Demo) -> Found:
    return padded_steps(demo, sft_config(demo.folder, demo.sizes), demo.sizes.compared)


def train_packed(demo: Demo) -> Found:
    found = train_and_compare(demo, sft_config(demo.folder, demo.sizes), demo.found["padded"], set_up=1)
    demo.say(f"the first {demo.sizes.compared} losses differ by at most {found['difference']:.1e} from the padded ones")
    demo.say(f"and these steps were {found['faster']:.1f} times as fast")
    return found


def train_by_reward(demo: Demo) -> Found:
    rewards = [step["reward"] for step in demo.train(rl_config(demo.folder, demo.sizes), "reward", ".2f")]
    last = rewards[-5:]
    found = {"before": rewards[0], "after": sum(last) / len(last)}
    demo.say(f"the fine-tuned model earned {found['before']:.2f}; in the last {len(last)} steps {found['after']:.2f}")
    return found


def compare_on_gpu(demo: Demo) -> Found:
    """Padded and packed steps of a model that is worth a GPU."""
    import torch
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():
        demo.say("there is none here; skipped")
        return {}
    config, sizes = gpu_config(demo), demo.sizes
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.folder / "model")
    parameters = write_model(Path(config.model.path), tokenizer, sizes.gpu_hidden, layers=sizes.gpu_layers, head=64)
    padded = padded_steps(demo, config, sizes.gpu_steps)
    found = train_and_compare(demo, config, padded, set_up=sizes.gpu_set_up)
    demo.say(f"a random Qwen3 of {parameters:,} parameters: packed {found['faster']:.1f} times as fast as padded")
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
    """Steps by plain transformers code: each batch padded to its longest sample, one optimizer step."""
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
    """Packed steps beside those of `padded_steps`: losses must be the same. The first `set_up` steps are not timed."""
    steps = demo.train(config, "loss", ".4f")[: len(padded["losses"])]
    difference = max(abs(step["loss"] - loss) for step, loss in zip(steps, padded["losses"], strict=True))
    if difference > SAME_LOSS[config.model.dtype]:
        raise UserError(
            "demo", f"losses differ by {difference:.1e} from the padded ones", "this torch cannot be trusted"
        )
    faster = sum(padded["seconds"][set_up:]) / sum(step["seconds"] for step in steps[set_up:])
    return {"difference": difference, "faster": faster}


def _result(found: Mapping[str, Found]) -> list[tuple[str, str]]:
    packed, reward, gpu = found["packed"], found["reward"], found["gpu"]
    rows = [
        (f"packed against padded{', on the CPU' if gpu else ''}", f"{packed['faster']:.1f} times as fast"),
        ("their losses", f"the same to {packed['difference']:.0e}"),
        ("gradients, packed against one at a time", f"the same to {found['check']['gradients']:.0e}"),
        ("reward before and after", f"{reward['before']:.2f} -> {reward['after']:.2f}"),
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
    """1 for the right number after `####`, less for another number there, 0 for none."""
    return 1.0 if number_after_hashes(response, row) else FORM_REWARD * (hashed_number(response) is not None)


def split_rows(real: RealDemo) -> Found:
    sizes = real.sizes
    wanted = sizes.held_out + max(sizes.samples * sizes.sft_steps, sizes.responses // sizes.group * sizes.rl_steps)
    rows = read_rows(real.data, wanted)
    if len(rows) <= sizes.held_out:
        raise UserError("--data", f"{real.data} has {len(rows)} rows", f"give more than {sizes.held_out}")
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


def _row(line: str, place: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    for prompt, response in FORMS:
        if isinstance(row, dict) and isinstance(row.get(prompt), str) and isinstance(row.get(response), str):
            if hashed_number(row[response]) is None:
                raise UserError(
                    "--data", f"the answer of {place} does not end in '#### number'", "give rows as GSM8K has"
                )
            return {"prompt": row[prompt], "response": row[response], "answer": row[response]}
    raise UserError("--data", f"{place} has no text for question and answer", "give rows as GSM8K has")


def measured(real: RealDemo, model: str) -> Found:
    """Held-out accuracy and reward of a model, and what it answers."""
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
    real.demo.say(f"held out: {found['eval/pass@1']:.0%} right, mean reward {found['eval/reward']:.2f}")
    return {"right": found["eval/pass@1"], "reward": found["eval/reward"]}


def tuned(real: RealDemo) -> Found:
    real.demo.train(real.sft(), "loss", ".4g")
    return measured(real, str(real.folder / "sft" / "model"))


def rewarded(real: RealDemo) -> Found:
    real.demo.train(real.rl(str(real.folder / "sft" / "model")), "reward", ".4g")
    return measured(real, str(real.folder / "rl" / "model"))


def _real_result(found: Mapping[str, Found]) -> list[tuple[str, str]]:
    names = ("before", "tuned", "rewarded")
    return [(name, f"{found[name]['right']:.0%} right, reward {found[name]['reward']:.2f}") for name in names]


STAGES: Mapping[str, tuple[str, Callable[[Any], Found]]] = {
    "data": ("data, tokenizer and model", make_data),
    "plan": ("plan an epoch", make_plan),
    "check": ("check that packing changes nothing", check),
    "padded": ("fine-tune, padded, by plain transformers", train_padded),
    "packed": ("fine-tune, packed", train_packed),
    "reward": ("train by rewards", train_by_reward),
    "gpu": ("the same comparison on a GPU", compare_on_gpu),
    "report": ("report", make_report),
}
REAL_STAGES: Mapping[str, tuple[str, Callable[[Any], Found]]] = {
    "rows": ("rows for training, and held-out ones", split_rows),
    "before": ("the model as it is", lambda real: measured(real, real.model)),
    "tuned": ("fine-tune (SFT)", tuned),
    "rewarded": ("train by rewards (GRPO)", rewarded),
    "page": ("report", lambda real: real.demo.write_report(real.folder, ["SFT", "GRPO"])),
}
OWN = {STATE, f"{STATE}.writing", "cache", "data", "model", "plan.html", "check.json", "sft", "rl", "gpu", "real"}
OWN |= {"report.html"}
"""What the stages leave. A folder that has more is somebody's, and is not removed."""
