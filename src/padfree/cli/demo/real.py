"""`padfree demo --real MODEL --data FILE`: SFT and then GRPO of a real model, in small.

    rows     the first rows of the file for training, the next ones held out      real/train.jsonl, real/test.jsonl
    before   what the model answers, and how many held-out answers are right
    tuned    a few steps of SFT, and the same questions again                     real/sft/
    rewarded a few steps of GRPO from there, and the same questions again         real/rl/
    page     both runs on one page                                                real/report.html

The file has one JSON object a line, with `question` and `answer` as GSM8K has, or with `prompt` and `response`. Answers
end in `#### 42`. A few steps teach a small model the form of an answer and hardly any arithmetic: for that, run the
recipes in `recipes/` for longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from padfree.cli.demo.folder import Demo
from padfree.config import Config, config_from_dict
from padfree.data.rewards import hashed_number, number_after_hashes
from padfree.errors import UserError
from padfree.report import write_report

FORMS = (("question", "answer"), ("prompt", "response"))
FORM_REWARD = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class RealSizes:
    """How much is done: minutes on a CPU for a model of 100 to 200 million parameters."""

    held_out: int = 12
    samples: int = 8  # of a step of SFT
    sft_steps: int = 15
    responses: int = 16  # of a step of GRPO
    group: int = 8
    rl_steps: int = 4
    max_new_tokens: int = 160
    shown: int = 1  # questions whose answers are shown


REAL_SIZES = RealSizes()


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
        return self.config(
            model,
            "rl",
            sizes.rl_steps,
            loss={"kind": "clip", "advantage": "grpo"},
            batch={"samples": sizes.responses, "max_tokens": 4096},
            rollout={
                "reward": f"{__name__}:reward",
                "group": sizes.group,
                "max_new_tokens": sizes.max_new_tokens,
                "batch": sizes.responses,
            },
            optimizer={"lr": 5e-6},
        )


def reward(response: str, row: Mapping[str, Any]) -> float:
    """1 for the right number after `####`, less for another number there, 0 for none."""
    return 1.0 if number_after_hashes(response, row) else FORM_REWARD * (hashed_number(response) is not None)


# Stages


def split_rows(real: RealDemo) -> dict[str, Any]:
    sizes = real.sizes
    wanted = sizes.held_out + max(sizes.samples * sizes.sft_steps, sizes.responses // sizes.group * sizes.rl_steps)
    rows = read_rows(real.data, wanted)
    if len(rows) <= sizes.held_out:
        raise UserError("--data", f"{real.data} has {len(rows)} rows", f"give more than {sizes.held_out}")
    train, test = rows[: -sizes.held_out], rows[-sizes.held_out :]
    real.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (real.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    real.demo.say(f"{len(train)} rows for training, {len(test)} held out")
    return {"train": len(train), "test": len(test)}


def read_rows(name: str, most: int) -> list[dict[str, str]]:
    """The first rows of a JSON Lines file, as prompt, response and answer."""
    rows = []
    path = Path(name).expanduser()
    if path.exists() and not path.is_file():
        raise UserError("--data", f"{name} is not a file", "give a JSON Lines file")
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(islice(file, most), start=1):
                rows.append(_row(line, f"{name}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError("--data", f"{name} cannot be read ({reason})", "give a JSON Lines file") from None
    return rows


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


def before(real: RealDemo) -> dict[str, Any]:
    return measured(real, real.model)


def tuned(real: RealDemo) -> dict[str, Any]:
    _train(real, real.sft(), "loss")
    return measured(real, str(real.folder / "sft" / "model"))


def rewarded(real: RealDemo) -> dict[str, Any]:
    _train(real, real.rl(str(real.folder / "sft" / "model")), "reward")
    return measured(real, str(real.folder / "rl" / "model"))


def page(real: RealDemo) -> dict[str, Any]:
    path = real.folder / "report.html"
    write_report([real.folder / "sft", real.folder / "rl"], path, names=["SFT", "GRPO"])
    return {"path": str(path)}


def measured(real: RealDemo, model: str) -> dict[str, Any]:
    """Held-out accuracy and reward of a model, and what it answers."""
    from padfree.talk.find import find_model
    from padfree.talk.speaker import open_speaker
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


def _train(real: RealDemo, config: Config, name: str) -> None:
    from padfree.train import train

    with real.demo.bar(config.run.steps) as bar:
        result = train(config, on_step=lambda step: bar(step["step"] + 1, f"{name} {step[name]:.4g}"))
    if result.stopped:
        raise KeyboardInterrupt


REAL_STAGES: Mapping[str, tuple[str, Callable[[RealDemo], dict[str, Any]]]] = {
    "rows": ("rows for training, and held-out ones", split_rows),
    "before": ("the model as it is", before),
    "tuned": ("fine-tune (SFT)", tuned),
    "rewarded": ("train by rewards (GRPO)", rewarded),
    "page": ("report", page),
}


def show_real_result(real: RealDemo, seconds: float) -> None:
    found = real.demo.found
    for name in ("before", "tuned", "rewarded"):
        text = f"{found[name]['right']:.0%} right, reward {found[name]['reward']:.2f}"
        real.demo.console.print(f"{name:42}{text}", highlight=False, markup=False, soft_wrap=True)
    talk = f"padfree chat {real.folder / 'rl'}"
    for name, text in (("this took", f"{seconds:.0f} s"), ("report", found["page"]["path"]), ("talk to it", talk)):
        real.demo.console.print(f"{name:42}{text}", highlight=False, markup=False, soft_wrap=True)
