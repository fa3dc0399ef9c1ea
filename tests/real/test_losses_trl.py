"""With real weights, the first step of DPO, reward modelling, GRPO and distillation equals that of TRL.

TRL's trainers are created as by a user, and their own code computes the loss of the same batch. If TRL
defines something differently, the test removes the difference:

    newline          SmolLM2's template writes a newline after <|im_end|>. TRL's DPO scores it as part of an answer;
                     padfree's answers end with <|im_end|>. Reward models read their score there in both
    advantages       TRL divides by the standard deviation + 1e-4, padfree by the standard deviation + 1e-6
    KL weighting     TRL multiplies the KL estimate by the ratio to the old policy (`use_bias_correction_kl`)
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from padfree.sample import Sample
from tests.real.cases import (
    BAD,
    GOOD,
    QUESTIONS,
    SMOLLM2,
    Found,
    assert_as_close,
    config_of,
    distance,
    gradients_of,
    load,
    message,
    needs_smollm2,
    ours,
    pairs,
)

pytest.importorskip("trl", reason="TRL is not installed", exc_type=ImportError)
datasets = pytest.importorskip("datasets", reason="datasets is not installed", exc_type=ImportError)

pytestmark = [needs_smollm2, pytest.mark.slow]

DTYPES = (torch.float32, torch.float64)
BETA = 0.05
PAIRS = pairs()[:2]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with every matrix changed by 2%, as a reference model and a teacher."""
    folder = tmp_path_factory.mktemp("other")
    model, generator = load(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    """Collect garbage: trainers are in reference cycles and hold gigabytes."""
    yield
    gc.collect()


def arguments(folder: Path, batch: int) -> dict[str, Any]:
    """The common settings of all trainers."""
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }


def newline() -> int:
    (token,) = AutoTokenizer.from_pretrained(SMOLLM2)("\n")["input_ids"]
    return int(token)


def first_batch(trainer: Any) -> dict[str, Any]:
    return dict(next(iter(trainer.get_train_dataloader())))


def without_last_newline(ids: Tensor, mask: Tensor) -> Tensor:
    """The mask [B, L] without the last token that it has in each row, which must be the newline."""
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rows = torch.arange(len(mask))
    assert (ids[rows, last] == newline()).all()
    changed = mask.clone()
    changed[rows, last] = 0
    return changed


# Pairs


def test_dpo(tmp_path: Path, other_model: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    def theirs(dtype: torch.dtype) -> Found:
        trainer = DPOTrainer(
            model=load(dtype=dtype),
            ref_model=load(other_model, dtype),
            args=DPOConfig(beta=BETA, **arguments(tmp_path, len(PAIRS))),
            train_dataset=datasets.Dataset.from_list(PAIRS),
            processing_class=AutoTokenizer.from_pretrained(SMOLLM2),
        )
        batch = first_batch(trainer)
        batch["completion_mask"] = without_last_newline(batch["input_ids"], batch["completion_mask"])
        return gradients_of(trainer.model, trainer.compute_loss(trainer.model, batch))

    loss = {"kind": "dpo", "dpo": {"beta": BETA}}
    found = ours(config_of(tmp_path, PAIRS, loss=loss, reference={"path": str(other_model)}))
    assert_as_close(found, *(theirs(dtype) for dtype in DTYPES))


def test_reward_model(tmp_path: Path) -> None:
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    scored = AutoModelForSequenceClassification.from_pretrained(SMOLLM2, num_labels=1, dtype=torch.float32)
    scored.save_pretrained(tmp_path / "scored")
    AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(tmp_path / "scored")

    def theirs(dtype: torch.dtype) -> Found:
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(
                tmp_path / "scored", dtype=dtype, attn_implementation="eager"
            ).train(),
            args=RewardConfig(**arguments(tmp_path, len(PAIRS))),
            train_dataset=datasets.Dataset.from_list(PAIRS),
            processing_class=AutoTokenizer.from_pretrained(SMOLLM2),
        )
        batch = first_batch(trainer)
        return gradients_of(trainer.model, trainer.compute_loss(trainer.model, batch))

    sections = {"loss": {"kind": "reward"}, "model": {"path": str(tmp_path / "scored")}}
    found = ours(config_of(tmp_path, PAIRS, **sections))
    assert_as_close(found, *(theirs(dtype) for dtype in DTYPES))


# Prompts and completions


def completions(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The batch of TRL's trainers with completions, which are padded behind, [B, L]; the prompts are equally long.

    TRL pads prompts in front, and eager attention in float64 gives NaN for such pads.
    """
    prompts, answers = [], []
    for sample in samples:
        scored = np.flatnonzero(sample.mask)
        first, end = int(scored[0]), int(scored[-1]) + 1  # a newline may follow
        assert len(scored) == end - first
        prompts.append(torch.tensor(sample.tokens[:first], dtype=torch.int64))
        answers.append(torch.tensor(sample.tokens[first:end], dtype=torch.int64))
    masks = [torch.ones_like(answer) for answer in answers]
    ids, mask = (torch.nn.utils.rnn.pad_sequence(entries, batch_first=True) for entries in (answers, masks))
    prompt = torch.stack(prompts)
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": ids,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
    }


def no_reward(**_: Any) -> list[float]:
    raise AssertionError("rewards are given")


def test_grpo(tmp_path: Path, other_model: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    rewards = (1.0, 0.0, 1.0, 0.25)
    rows = [
        {"prompt": [message("user", QUESTIONS[0])], "response": text, "reward": reward, "group": 0}
        for text, reward in zip((GOOD[0], BAD[0], "Paris.", "I do not know."), rewards, strict=True)
    ]
    loss = {"kind": "clip", "advantage": "grpo", "kl_coefficient": BETA, "kl_estimator": "k3"}
    found = ours(config_of(tmp_path, rows, loss=loss, reference={"path": str(other_model)}))

    advantages = torch.tensor([float(sample.advantages[-1]) for sample in found.samples])
    groups = torch.tensor(rewards, dtype=torch.float64).view(1, -1)
    deviation = groups.std(1, keepdim=True)
    for epsilon, tolerance in ((1e-6, 1e-6), (1e-4, 3e-4)):
        expected = ((groups - groups.mean(1, keepdim=True)) / (deviation + epsilon)).flatten()
        np.testing.assert_allclose(advantages.numpy(), expected.numpy(), rtol=tolerance)

    def theirs(dtype: torch.dtype, *, weighted: bool = False) -> Found:
        trainer = GRPOTrainer(
            model=load(dtype=dtype),
            reward_funcs=no_reward,
            args=GRPOConfig(
                beta=BETA,
                loss_type="bnpo",  # the mean over the tokens of a batch
                num_generations=len(rows),
                use_bias_correction_kl=weighted,
                **arguments(tmp_path, len(rows)),
            ),
            train_dataset=datasets.Dataset.from_list([{"prompt": question} for question in QUESTIONS]),
            processing_class=AutoTokenizer.from_pretrained(SMOLLM2),
        )
        trainer.current_gradient_accumulation_steps = 1
        batch = {**completions(found.samples), "advantages": advantages.to(dtype)}
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            logits = load(other_model, dtype)(ids, attention_mask=mask).logits[
                :, -batch["completion_ids"].shape[1] - 1 : -1
            ]
        scores = torch.log_softmax(logits, dim=-1)
        batch["ref_per_token_logps"] = scores.gather(2, batch["completion_ids"][:, :, None])[:, :, 0]
        return gradients_of(trainer.model, trainer._compute_loss(trainer.model, batch))

    plain, wide = (theirs(dtype) for dtype in DTYPES)
    assert_as_close(found, plain, wide)
    weighted = theirs(torch.float32, weighted=True)
    assert weighted.loss == pytest.approx(plain.loss, rel=1e-5), "the ratio is 1 in a first step,"
    assert distance(weighted.gradients, plain.gradients).whole > 1e-3, "and its gradient is not 0"


@pytest.mark.parametrize(("divergence", "beta"), [("forward-kl", 0.0), ("reverse-kl", 1.0)])
def test_distillation(tmp_path: Path, other_model: Path, divergence: str, beta: float) -> None:
    from trl import DistillationConfig, DistillationTrainer

    asked = message("user", QUESTIONS[0])
    rows = [{"messages": [asked, message("assistant", text)]} for text in (GOOD[0], BAD[0])]
    loss = {"kind": "distill", "distill": {"divergence": divergence}}
    found = ours(config_of(tmp_path, rows, loss=loss, teacher={"path": str(other_model)}))

    def theirs(dtype: torch.dtype) -> Found:
        trainer = DistillationTrainer(
            model=load(dtype=dtype),
            teacher_model=load(other_model, dtype),
            args=DistillationConfig(beta=beta, temperature=1.0, **arguments(tmp_path, len(rows))),
            train_dataset=datasets.Dataset.from_list([{"prompt": question} for question in QUESTIONS]),
            processing_class=AutoTokenizer.from_pretrained(SMOLLM2),
        )
        batch = completions(found.samples)
        return gradients_of(trainer.model, trainer.compute_loss(trainer.model, batch))

    assert_as_close(found, *(theirs(dtype) for dtype in DTYPES))
