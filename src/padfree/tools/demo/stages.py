"""The stages of the demo: a tiny model with random weights learns a made-up task."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from padfree.config import Config, config_from_dict
from padfree.errors import UserError
from padfree.testing.arithmetic import rl_config, sft_config, write_model, write_task
from padfree.tools.demo.demo_folder import Demo, Found

SAME_LOSS = {"float32": 1e-5, "bfloat16": 2e-2}
"""The largest difference allowed between padded and packed losses, by dtype."""


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
            "demo",
            "padfree check failed",
            "run padfree check to see which results differ, or install another version of torch",
        )
    gradients = max(result.difference for result in report.rows if result.quantity == "gradients")
    demo.say(f"gradients of packed training and of one sample at a time differ by at most {gradients:.1e} (relative)")
    return {"gradients": gradients}


def train_padded(demo: Demo) -> Found:
    return padded_steps(demo, sft_config(demo.folder, demo.sizes), demo.sizes.compared)


def train_packed(demo: Demo) -> Found:
    found = train_and_compare(demo, sft_config(demo.folder, demo.sizes), demo.found["padded"], set_up=1)
    demo.say(
        f"the losses of the first {demo.sizes.compared} steps differ by at most {found['difference']:.1e} from those "
        "with padding"
    )
    demo.say(f"with packing, these steps were {found['faster']:.1f} times as fast as with padding")
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
    """Compare padded and packed steps of a model that is large enough to make use of a GPU."""
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
    demo.say(f"packed and padded losses differ by at most {found['difference']:.1e}, in bfloat16")
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
    from padfree.train.batcher import make_batcher
    from padfree.train.training_data import load_tokenizer, load_training_data

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
    """Train with packing. Compare losses and time with the result of `padded_steps`, for the same samples.

    The first `set_up` steps are not timed.
    """
    steps = demo.train(config, "loss", ".4f")[: len(padded["losses"])]
    difference = max(abs(step["loss"] - loss) for step, loss in zip(steps, padded["losses"], strict=True))
    if difference > SAME_LOSS[config.model.dtype]:
        raise UserError(
            "demo",
            f"packed and padded losses differ by {difference:.1e}",
            "run padfree check, or install another version of torch",
        )
    faster = sum(padded["seconds"][set_up:]) / sum(step["seconds"] for step in steps[set_up:])
    return {"difference": difference, "faster": faster}


def result_rows(found: Mapping[str, Found]) -> list[tuple[str, str]]:
    packed, reward, gpu = found["packed"], found["reward"], found["gpu"]
    rows = [
        (f"packed compared with padded{', CPU' if gpu else ''}", f"{packed['faster']:.1f} times as fast"),
        ("difference of their losses", f"at most {packed['difference']:.0e}"),
        ("gradients, packed and one at a time", f"differ by at most {found['check']['gradients']:.0e}"),
        ("mean reward before and after RL", f"{reward['before']:.2f} -> {reward['after']:.2f}"),
    ]
    if gpu:
        size = f"{gpu['parameters'] / 1e6:.0f}M parameters"
        rows.insert(2, (f"packed compared with padded, {gpu['device']}", f"{gpu['faster']:.1f} times as fast, {size}"))
    return rows


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
