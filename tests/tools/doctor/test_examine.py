"""Each planted fault is named, a healthy server is never accused, and an unknown fault is called unexplained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TopPLogitsWarper

from padfree.cli.main import main
from padfree.errors import UserError
from padfree.sample import Sample
from padfree.tools.doctor import DoctorReport, examine_rollouts, examine_server, open_patient
from padfree.tools.doctor.diagnosis import Noise, measure_noise
from padfree.tools.doctor.evidence import Evidence
from padfree.tools.doctor.examine import Patient
from padfree.tools.talk.find_model import find_model
from tests.tools.doctor.fault_cases import (
    ABILITIES,
    FAULTS,
    Fault,
    healthy,
    loaded,
    processed,
    save,
    stale,
    tokenizer_of,
    write_case,
)
from tests.tools.doctor.openai_server import Abilities, OpenAiService, serving_openai

NO_PROMPT_IDS = Abilities(prompt_ids=False, tokenize=False)


def patient_of(folder: Path, *, previous: bool = False, **options: Any) -> Patient:
    older = [str(folder.parent / "previous")] if previous else []
    return open_patient(str(folder), find_model(str(folder)), previous=older, **options)


def examined(patient: Patient, service: OpenAiService, **options: Any) -> DoctorReport:
    with serving_openai(service) as url:
        return examine_server(patient, url, **options)


def text_of(report: DoctorReport) -> str:
    return "\n".join(report.lines())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with older weights."""
    return write_case(tmp_path_factory.mktemp("plain"), FAULTS["stale head"], 3)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Fault], tuple[Path, Patient]]:
    """The folder and the patient of a fault. Faults of the same model share them."""
    found: dict[str, tuple[Path, Patient]] = {}

    def made(fault: Fault) -> tuple[Path, Patient]:
        key = repr((fault.architecture, fault.changes, fault.adapter, fault.previous))
        if key not in found:
            folder = write_case(tmp_path_factory.mktemp("case"), fault, SEED)
            found[key] = folder, patient_of(folder, previous=fault.previous)
        return found[key]

    return made


@pytest.fixture(scope="module")
def _noise_is_measured_once() -> Iterator[None]:
    """The prompts of a patient, and so the noise on them, are the same whatever the fault of the server is."""
    found: dict[tuple[int, bytes], Noise] = {}

    def measured(model: PreTrainedModel, evidence: Evidence) -> Noise:
        key = id(model), evidence.tokens.tobytes()
        if key not in found:
            found[key] = measure_noise(model, evidence)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("padfree.tools.doctor.examine.measure_noise", measured)
        yield


SEED = 0
"""`fault_table.py` has more."""


@pytest.mark.usefixtures("_noise_is_measured_once")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, case: Callable[[Fault], tuple[Path, Patient]]) -> None:
    fault = FAULTS[name]
    if fault.adapter:
        pytest.importorskip("peft")
    folder, patient = case(fault)
    report = examined(patient, fault.serve(folder, SEED), temperature=fault.temperature)
    assert report.causes[:1] == [fault.cause], text_of(report)
    assert fault.says in text_of(report)
    for finding in report.findings:
        if finding.best is not None and finding.best.proposal.dtype is None:
            assert finding.best.after <= finding.limit < finding.before


@pytest.mark.parametrize(
    ("architecture", "stored", "served", "abilities"),
    [
        ("qwen3", torch.float32, torch.float32, "all"),
        ("mistral", torch.float32, torch.float32, "responses only"),
        ("llama_tied", torch.bfloat16, torch.bfloat16, "OpenAI's own fields"),
        ("qwen3_moe", torch.bfloat16, torch.bfloat16, "all"),
        ("gemma2", torch.bfloat16, torch.float16, "echo"),
    ],
)
def test_a_healthy_server_is_not_accused(
    architecture: str, stored: torch.dtype, served: torch.dtype, abilities: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", architecture, 7, dtype=stored)
    service = OpenAiService(loaded(folder, dtype=served), tokenizer_of(folder), abilities=ABILITIES[abilities])
    report = examined(patient_of(folder), service, temperature=0.8)
    assert report.healthy, text_of(report)
    assert report.causes == []
    assert report.verdict == "healthy: all differences are the size of rounding"


def test_what_a_server_does_not_support_is_listed(plain: Path) -> None:
    report = examined(patient_of(plain), healthy(plain, 0, abilities=ABILITIES["OpenAI's own fields"]))
    assert "not tested: prompt log-probabilities (the server does not support it)" in text_of(report)
    assert [finding.part for finding in report.findings] == ["responses"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [({"bos_twice": True}, "special tokens twice"), ({"generation_prompt": False}, "chat template")],
)
def test_without_ids_prompts_are_compared_by_the_scores_of_responses(
    options: dict[str, Any], cause: str, plain: Path
) -> None:
    report = examined(patient_of(plain), healthy(plain, 0, abilities=NO_PROMPT_IDS, **options))
    found = [text for text in report.texts if text.cause is not None]
    assert found
    assert found[0].cause == cause
    assert found[0].by == "log-probabilities"


def noisy(folder: Path) -> OpenAiService:
    service = healthy(folder, 0)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in service.model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return service


def test_a_fault_that_is_not_in_the_list_is_unexplained(plain: Path) -> None:
    report = examined(patient_of(plain, previous=True), noisy(plain))
    assert report.causes == ["unexplained"]
    assert report.verdict == "unexplained: the log-probabilities differ, and no hypothesis explains it"
    assert "not tested: sampling of responses" in text_of(report)


def test_two_faults_are_named_by_the_stages_that_show_them(plain: Path) -> None:
    service = stale("layers.0.mlp")(plain, 0)
    service.temperature = 0.7
    service.bos_twice = True
    report = examined(patient_of(plain, previous=True), service)
    assert report.causes[:3] == ["stale weights", "temperature", "special tokens twice"], text_of(report)
    best = report.findings[1].best
    assert best is not None
    assert "temperature 0.7" in best.proposal.says


def test_stale_tensors_are_listed_one_by_one(plain: Path) -> None:
    """Tensors that form no group: the least-squares fit finds them."""
    service, old = healthy(plain, 0), loaded(plain.parent / "previous").state_dict()
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"]
    with torch.no_grad():
        for name in names:
            service.model.state_dict()[name].copy_(old[name])
    report = examined(patient_of(plain, previous=True), service)
    best = report.findings[0].best
    assert best is not None
    assert best.cause == "stale weights"
    assert f"({', '.join(names)})" in best.proposal.says


def test_a_server_in_bfloat16_with_a_fault(plain: Path) -> None:
    """The model is meant to be float32. The fault is named, and what is left is called rounding of bfloat16."""
    service = OpenAiService(loaded(plain.parent / "previous", dtype=torch.bfloat16), tokenizer_of(plain))
    report = examined(patient_of(plain, previous=True), service)
    assert report.findings[0].cause == "stale weights", text_of(report)
    assert report.findings[0].coarse
    assert "the server seems to compute in bfloat16" in text_of(report)


def test_a_tie_is_reported(tmp_path: Path) -> None:
    """Without its scale of 3, all logits are those at temperature 1/3. The explanation without a fitted number wins."""
    folder = save(tmp_path / "model", "granite", 0)
    service = OpenAiService(loaded(folder, logits_scaling=1.0), tokenizer_of(folder))
    finding = examined(patient_of(folder), service).findings[0]
    assert finding.cause == "logit scale"
    assert [each.cause for each in finding.tied] == ["temperature"]


def test_a_window_longer_than_the_probes_is_not_tested(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "mistral", 0, sliding_window=300, max_position_embeddings=256)
    service = OpenAiService(loaded(folder, rms_norm_eps=1e-3), tokenizer_of(folder))
    report = examined(patient_of(folder), service)
    assert "not tested: sliding window (the window of 300 tokens is longer than the longest sequence" in text_of(report)


def test_the_settings_of_generation_config(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen3", 0)
    settings = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    from transformers.generation.logits_process import TopKLogitsWarper

    service = processed(TopKLogitsWarper(20), TopPLogitsWarper(0.95), temperature=0.6)(folder, 0)
    report = examined(patient_of(folder), service)
    assert report.causes == ["generation config"], text_of(report)


# Rollouts


def sampled(folder: Path, change: Callable[[torch.Tensor], torch.Tensor], *, bos: bool = False) -> list[Sample]:
    """Rollouts of random tokens, with the log-probabilities of plain transformers code after `change` of the logits.

    `bos`: the sampler adds a second bos token to the prompt, which the rollouts do not have.
    """
    model, rng, samples = loaded(folder).eval(), np.random.default_rng(0), []
    for _ in range(6):
        tokens = np.array([1, *rng.integers(4, 300, 47)])
        given = [1, *tokens] if bos else list(tokens)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([given])).logits[0, :-1].float()
        scores = change(logits).log_softmax(-1).gather(1, torch.tensor(given[1:])[:, None])[:, 0].numpy()
        logprobs = np.concatenate([[0.0], scores[-47:]]).astype(np.float32)
        mask = np.arange(48) >= 16
        samples.append(Sample(tokens=tokens, loss_mask=mask, logprobs=np.where(mask, logprobs, 0), reward=0.0))
    return samples


def rollout_report(folder: Path, samples: list[Sample], **options: Any) -> DoctorReport:
    return examine_rollouts(patient_of(folder, previous=True), samples, subject="rollouts.jsonl", **options)


def test_rollouts(plain: Path) -> None:
    good = sampled(plain, lambda logits: logits / 0.7)
    assert rollout_report(plain, good, temperature=0.7).healthy
    assert rollout_report(plain, good).causes == ["temperature"]
    old = sampled(plain.parent / "previous", lambda logits: logits)
    assert rollout_report(plain, old).causes == ["stale weights"]
    assert rollout_report(plain, sampled(plain, lambda logits: logits, bos=True)).causes == ["special tokens twice"]
    shifted = [
        Sample(tokens=one.tokens, loss_mask=one.mask, logprobs=np.roll(one.logprobs, 1), reward=0.0)
        for one in sampled(plain, lambda logits: logits)
        if one.logprobs is not None
    ]
    assert rollout_report(plain, shifted).causes == ["shifted log-probabilities"]


def test_rounded_log_probabilities_are_healthy(plain: Path) -> None:
    """A file with three decimals has that rounding error, which is measured."""
    samples = [
        Sample(tokens=one.tokens, loss_mask=one.mask, logprobs=one.logprobs.round(3), reward=0.0)
        for one in sampled(plain, lambda logits: logits)
        if one.logprobs is not None
    ]
    assert rollout_report(plain, samples).healthy


def test_rollouts_without_log_probabilities_are_refused(plain: Path) -> None:
    samples = [Sample(tokens=np.arange(9), loss_mask=np.arange(9) > 3, reward=0.0)]
    with pytest.raises(UserError, match=r"--rollouts: .* has no logprobs; give rollouts with log-probabilities"):
        rollout_report(plain, samples)


# The command


def test_the_command(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_openai(healthy(plain, 0)) as url:
        assert main(["doctor", str(plain), "--server", url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "healthy: all differences are the size of rounding"
    target = tmp_path / "report.json"
    rows = [
        {
            "tokens": one.tokens.tolist(),
            "loss_mask": one.mask.astype(int).tolist(),
            "logprobs": [] if one.logprobs is None else one.logprobs.tolist(),
            "reward": 0.0,
        }
        for one in sampled(plain, lambda logits: logits / 0.5)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", str(plain), "--rollouts", str(path), "--json", str(target)])
    assert stopped.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "differs: temperature"
    report = json.loads(target.read_text())
    assert report["causes"] == ["temperature"]
    assert report["findings"][0]["mean"] > report["findings"][0]["limit"] > report["findings"][0]["best"]["mean"]
