"""Every planted fault with several seeds, and healthy servers: how many are named, and how many are accused.

    python -m tests.tools.doctor.fault_table --seeds 5

It is not a test, because it takes minutes: `test_examine.py` has one seed of each fault.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging

from padfree.tools.doctor import DoctorReport, examine_server, open_patient
from padfree.tools.talk.find_model import find_model
from tests.tools.doctor.fault_cases import ABILITIES, FAULTS, loaded, save, tokenizer_of, write_case
from tests.tools.doctor.openai_server import OpenAiService, serving_openai

ARCHITECTURES = ("qwen3", "llama_tied", "gemma2", "qwen3_moe", "mistral", "gpt_oss", "gemma3", "granite")
SERVED = {torch.float32: (torch.float32,), torch.bfloat16: (torch.bfloat16, torch.float16, torch.float32)}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def examined(folder: Path, service: OpenAiService, temperature: float, previous: bool = False) -> DoctorReport:
    older = [str(folder.parent / "previous")] if previous else []
    patient = open_patient(str(folder), find_model(str(folder)), previous=older)
    with serving_openai(service) as url:
        return examine_server(patient, url, temperature=temperature)


def faults(seeds: int) -> None:
    total = named = 0
    for name, fault in FAULTS.items():
        right = 0
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as place:
                folder = write_case(Path(place), fault, seed)
                report = examined(folder, fault.serve(folder, seed), fault.temperature, fault.previous)
            right += report.causes[:1] == [fault.cause] and fault.says in "\n".join(report.lines())
        say(f"{name:24} {fault.cause:24} {right} of {seeds}")
        total, named = total + seeds, named + right
    say(f"named: {named} of {total}")


def healthy(seeds: int) -> None:
    total = accused = 0
    for architecture in ARCHITECTURES:
        for number, (stored, kinds) in enumerate(SERVED.items()):
            for seed in range(100, 100 + seeds):
                with tempfile.TemporaryDirectory() as place:
                    folder = save(Path(place) / "model", architecture, seed, dtype=stored)
                    for kind in kinds:
                        abilities = list(ABILITIES.values())[(seed + number) % len(ABILITIES)]
                        service = OpenAiService(loaded(folder, dtype=kind), tokenizer_of(folder), abilities=abilities)
                        report = examined(folder, service, temperature=0.7 if seed % 3 == 0 else 1.0)
                        total, accused = total + 1, accused + (not report.healthy)
                        if not report.healthy:
                            say(f"{architecture} {stored} {kind} {seed} {report.causes}")
    say(f"healthy servers accused: {accused} of {total}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=("faults", "healthy"))
    settings = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if settings.only != "healthy":
        faults(settings.seeds)
    if settings.only != "faults":
        healthy(settings.seeds)


if __name__ == "__main__":
    main()
