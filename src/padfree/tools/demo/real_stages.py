"""The stages of a demo with a real model: the user's model, trained on the user's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from padfree.config import Config, config_from_dict
from padfree.data.rewards import hashed_number, number_after_hashes
from padfree.errors import UserError
from padfree.testing.arithmetic import write_rows
from padfree.tools.demo.demo_folder import Demo, Found
from padfree.tools.json_objects import parsed_object
from padfree.tools.talk.find_model import find_model

FORMS = (("question", "answer"), ("prompt", "response"))
FORM_REWARD = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class RealSizes:
    """Sizes of the demo with a real model. A model of 100 to 200 million parameters takes minutes on a CPU."""

    held_out: int = 12
    samples: int = 8  # samples per step of SFT
    sft_steps: int = 15
    responses: int = 16  # responses per step of GRPO
    group: int = 8
    rl_steps: int = 4
    max_new_tokens: int = 160
    shown: int = 1  # questions whose answers are shown


@dataclass(frozen=True, kw_only=True, slots=True)
class RealDemo:
    """A demo that trains the user's model on the user's data."""

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
    """Return 1 if the number after `####` is right, `FORM_REWARD` if it is wrong, and 0 if there is no number."""
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
    """Return at most `most` rows of a JSON Lines file, each with prompt, response and answer."""
    path = Path(name)
    if path.exists() and not path.is_file():
        raise UserError("--data", f"{name} is not a file", "give a JSON Lines file")
    try:
        with path.open(encoding="utf-8") as file:
            return [_row(line, f"{name}:{number}") for number, line in enumerate(islice(file, most), start=1)]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError("--data", f"{name} cannot be read ({reason})", "give a JSON Lines file") from None


def _row(line: str, location: str) -> dict[str, str]:
    row = parsed_object(line) or {}
    for prompt, response in FORMS:
        if isinstance(row.get(prompt), str) and isinstance(row.get(response), str):
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
    """Print some answers of a model, and return its accuracy and mean reward on the held-out rows."""
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


def real_result_rows(found: Mapping[str, Found]) -> list[tuple[str, str]]:
    names = ("before", "tuned", "rewarded")
    return [(name, f"{found[name]['right']:.0%} correct, mean reward {found[name]['reward']:.2f}") for name in names]


REAL_STAGES: Mapping[str, tuple[str, Callable[[Any], Found]]] = {
    "rows": ("training and held-out rows", split_rows),
    "before": ("the model before training", lambda real: measured(real, real.model)),
    "tuned": ("fine-tune (SFT)", tuned),
    "rewarded": ("train with rewards (GRPO)", rewarded),
    "page": ("report", lambda real: real.demo.write_report(real.folder, ["SFT", "GRPO"])),
}
