"""Mistakes in calls of `padfree doctor`, each with the correct call, for `test_errors`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from padfree.cli.main import main
from padfree.errors import UserError
from padfree.testing.models import save_with_tokenizer
from tests.rollout.vllm.vllm_cases import unused_url
from tests.tools.doctor.openai_server import OpenAiService, serving_openai

Attempt = Callable[[Path], Any]


def doctor(*words: str, logprobs: bool = True, model: str = "model") -> Attempt:
    """The command in a folder with a model, a wider one, and rollouts of one row. `FOLDER` stands for that folder."""

    def attempt(folder: Path) -> None:
        save_with_tokenizer(folder / "model")
        save_with_tokenizer(folder / "wide", hidden_size=64)
        row = {"tokens": [5, 6, 7, 8], "response_length": 2, "reward": 0.0}
        row |= {"logprobs": [-1.0, -2.0]} if logprobs else {}
        (folder / "r.jsonl").write_text(json.dumps(row) + "\n")
        told([str(folder / model), *(word.replace("FOLDER", str(folder)) for word in words)])

    return attempt


def rollouts(*words: str, logprobs: bool = True, model: str = "model") -> Attempt:
    return doctor("--rollouts", "FOLDER/r.jsonl", *words, logprobs=logprobs, model=model)


def told(words: list[str]) -> None:
    """Run the command, and raise its message as an error. A difference that it finds is not a mistake."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            code = main(["doctor", *words, "--device", "cpu"] if "--device" not in words else ["doctor", *words])
    except SystemExit:
        return
    if code:
        raise UserError.of(printed.getvalue().removesuffix("\n").removeprefix("padfree doctor: "))


def served(*words: str, fields: bool = True) -> Attempt:
    """The command with a server of the model. `fields`: whether its answers have log-probabilities."""

    def attempt(folder: Path) -> None:
        path = save_with_tokenizer(folder / "model")
        make: Any = AutoModelForCausalLM
        service: Any = OpenAiService(make.from_pretrained(path), PreTrainedTokenizerFast.from_pretrained(path))
        if not fields:
            service.completion = lambda ids, body: {"index": 0, "text": "", "logprobs": None}
        with serving_openai(service) as url:
            told([str(path), *(words if "--server" in words else ("--server", url, *words))])

    return attempt


CASES: list[tuple[str, Attempt, Attempt]] = [
    ("MODEL", rollouts(model="nowhere"), rollouts()),
    ("--device", rollouts("--device", "tpu"), rollouts("--device", "auto")),
    ("--dtype", rollouts("--dtype", "int8"), rollouts("--dtype", "bfloat16")),
    ("--temperature", rollouts("--temperature", "0"), rollouts("--temperature", "0.5")),
    ("--samples", rollouts("--samples", "0"), rollouts("--samples", "1")),
    ("--max-length", rollouts("--max-length", "1"), rollouts("--max-length", "4")),
    ("--name", rollouts("--name", "policy"), rollouts()),
    ("--name", served("--name", "policy"), served("--name", "served")),
    ("--previous", rollouts("--previous", "FOLDER/wide"), rollouts("--previous", "FOLDER/model")),
    ("--previous", rollouts("--previous", "FOLDER/nowhere"), rollouts("--previous", "FOLDER/model")),
    ("--base", rollouts("--base", "FOLDER/wide"), rollouts()),
    ("--json", rollouts("--json", "FOLDER"), rollouts("--json", "FOLDER/report.json")),
    ("--rollouts", doctor("--rollouts", "FOLDER/none.jsonl"), rollouts()),
    ("--rollouts", rollouts(logprobs=False), rollouts()),
    ("--server", served("--server", "127.0.0.1:8000"), served()),
    ("--server", served("--server", unused_url()), served()),
    ("--server", served(fields=False), served()),
]
