"""What each stage of a demo does; what it returns is kept in the folder's state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from padfree.cli.demo.data import problems, train_tokenizer, write_model, write_rows
from padfree.cli.demo.folder import LEAVES, Demo
from padfree.cli.demo.padded import comparison, padded_steps, read_metrics
from padfree.cli.demo.real import REAL_STAGES
from padfree.config import Config
from padfree.errors import UserError

SET_UP = 3
"""Steps on a GPU that pay for set-up: compiling, choosing kernels, the first memory."""


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
        raise UserError("demo", "padfree check failed", "run padfree check for the table, this torch cannot be trusted")
    gradients = max(row.difference for row in report.rows if row.quantity == "gradients")
    demo.say(f"gradients of all parameters differ by at most {gradients:.1e}")
    return {"gradients": gradients}


def train_padded(demo: Demo) -> dict[str, Any]:
    """The first steps by plain transformers code."""
    return padded_steps(demo, demo.sft, demo.sizes.compared)


def train_packed(demo: Demo) -> dict[str, Any]:
    _train(demo, demo.sft, lambda metrics: f"loss {metrics['loss']:.4f}")
    found = compared(demo)
    demo.say(f"the first {demo.sizes.compared} losses differ by at most {found['difference']:.1e} from the padded ones")
    demo.say(f"and these steps were {found['faster']:.1f} times as fast")
    return found


def compared(demo: Demo) -> dict[str, Any]:
    """The steps that both ways have made: their losses, which must be the same, and their time."""
    return comparison(demo.sft, demo.found["padded"], set_up=1)


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
    rewards = [step["reward"] for step in read_metrics(demo.folder / "rl")]
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


def _train(demo: Demo, config: Config, shown: Callable[[Mapping[str, Any]], str]) -> None:
    from padfree.train import train

    with demo.bar(config.run.steps) as bar:
        result = train(config, on_step=lambda metrics: bar(metrics["step"] + 1, shown(metrics)))
    if result.stopped:
        raise KeyboardInterrupt


class Stage(NamedTuple):
    title: str
    run: Callable[[Demo], dict[str, Any]]


STAGES: Mapping[str, Stage] = {
    "data": Stage("data, tokenizer and model", make_data),
    "plan": Stage("plan an epoch", make_plan),
    "check": Stage("check that packing changes nothing", check),
    "padded": Stage("fine-tune, padded, by plain transformers", train_padded),
    "packed": Stage("fine-tune, packed", train_packed),
    "reward": Stage("train by rewards", train_by_reward),
    "gpu": Stage("the same comparison on a GPU", compare_on_gpu),
    "report": Stage("report", make_report),
}
assert STAGES.keys() | REAL_STAGES.keys() == LEAVES.keys()
