"""Mistakes a user can make, each provoked for real, for `test_errors`.

    CASES["config"]    ("optimizer.lr", changed("optimizer.lr=-1"))
                        ^^^^^^^^^^^^    a function of a folder of its own, which raises a ValueError
                        the message begins with this

Every part of padfree has its list.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import build, row, save_with_tokenizer
from torch import Tensor

import padfree
from padfree import losses
from padfree.attention import varlen_attention
from padfree.batch import PackedBatch, Sample, Segments
from padfree.cli.main import main
from padfree.compat import slime
from padfree.compat.hf import PackedCollator
from padfree.config import config_from_dict, load_config
from padfree.cp import attend, gather_tokens, make_layout, shard
from padfree.data import (
    RolloutDataSettings,
    SFTDataSettings,
    TokenizedDataset,
    check_reward_name,
    exact_match,
    load_reward,
    load_sft,
    number_after_hashes,
    read_rollouts,
)
from padfree.dist.mesh import distributed
from padfree.head import fused_loss, score
from padfree.model import attach
from padfree.model.load import load_model
from padfree.packing import CostModel, FixedSizeBatcher, TokenBudgetBatcher, balance, fill, pack, plan_step, unpack
from padfree.train.credit import with_advantages
from padfree.train.schedule import learning_rate_factor

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
Mistake = Callable[[Path], Any]
CASES: dict[str, list[tuple[str, Mistake]]] = {}
"""By part: (the beginning of the message, what provokes it in a folder of its own)."""


def changed(*overrides: str, recipe: str = "sft") -> Mistake:
    """A recipe with settings that cannot be."""
    return lambda folder: load_config(RECIPES / f"{recipe}.toml", overrides)


def written(folder: Path, name: str, *records: Any) -> Path:
    path = folder / name
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


CASES["config"] = [
    ("config", lambda folder: load_config(folder / "nowhere.toml")),
    ("config", lambda folder: load_config(written(folder, "bad.toml", "[model"))),
    ("override", changed("lr")),
    ("override", changed("=3")),
    ("override", changed("model.path=m", "model.path.deeper=1")),
    ("optimiser", changed("optimiser.lr=1")),
    ("optimizer.rl", changed("optimizer.rl=1")),
    ("optimizer.lr", changed("optimizer.lr=fast")),
    ("optimizer.lr", changed("optimizer.lr=-1")),
    ("optimizer.betas", changed("optimizer.betas=[0.9]")),
    ("optimizer.betas", changed("optimizer.betas=[0.9, 1.0]")),
    ("optimizer.eps", changed("optimizer.eps=0")),
    ("optimizer.weight_decay", changed("optimizer.weight_decay=-0.1")),
    ("optimizer.max_grad_norm", changed("optimizer.max_grad_norm=0")),
    ("model", lambda folder: config_from_dict({"model": "Qwen/Qwen3-0.6B"})),
    ("model.path", lambda folder: config_from_dict({})),
    ("model.path", changed("model.path=''")),
    ("model.dtype", changed("model.dtype=float16")),
    ("data.path", changed("data.path=[]")),
    ("data.max_length", changed("data.max_length=1")),
    ("data.epochs", changed("data.epochs=0")),
    ("data.overlong", changed("data.overlong=cut")),
    ("data.columns", changed("data.columns={ a = 1 }")),
    ("batch.samples", changed("batch.tokens=1000")),
    ("batch.samples", changed("batch.samples=0")),
    ("batch.max_tokens", changed("batch.max_tokens=0")),
    ("batch.samples", changed("batch.samples=none", "batch.tokens=100", recipe="rl")),
    ("lora.rank", changed("lora.rank=-1")),
    ("lora.alpha", changed("lora.alpha=0")),
    ("lora.dropout", changed("lora.dropout=1")),
    ("lora.targets", changed("lora.targets=[]")),
    ("reference.path", changed("reference.path=''")),
    ("reference.path", changed("reference.path=m", recipe="rl")),
    ("reference.path", changed("reference.offload=true", recipe="rl")),
    ("reference.refresh", changed("reference.refresh=0", recipe="rl")),
    ("rollout.group", changed("rollout.group=0", recipe="rl")),
    ("rollout.max_new_tokens", changed("rollout.max_new_tokens=0", recipe="rl")),
    ("rollout.reward", changed("rollout.reward=exact_match")),
    ("batch.samples", changed("rollout.reward=exact_match", "batch.samples=12", recipe="rl")),
    ("schedule.warmup", changed("schedule.warmup=-1")),
    ("schedule.warmup", changed("schedule.warmup=9", "run.steps=3")),
    ("schedule.final", changed("schedule.final=2")),
    ("run.steps", changed("schedule.kind=cosine")),
    ("run.steps", changed("data.epochs=none")),
    ("run.steps", changed("run.steps=0")),
    ("run.seed", changed("run.seed=-1")),
    ("run.timeout", changed("run.timeout=0")),
    ("run.folder", changed("run.folder=''")),
    ("parallel.context", changed("parallel.context=0")),
    ("parallel.method", changed("parallel.method=rings")),
    ("loss.temperature", changed("loss.temperature=0", recipe="rl")),
    ("loss.epochs", changed("loss.epochs=2")),
    ("loss.low", changed("loss.low=0.2")),
    ("loss.dual", changed("loss.kind=gspo", "loss.dual=3", recipe="rl")),
    ("loss.icepop.high", changed("loss.icepop.high=3", recipe="rl")),
    ("loss.corrections", changed("loss.corrections=['tis']", recipe="rl")),
    ("checkpoint.every", changed("checkpoint.every=0")),
    ("checkpoint.keep", changed("checkpoint.keep=0")),
    ("track.wandb", changed("track.wandb=''")),
]


def sample(length: int = 4, **values: Any) -> Sample:
    return Sample(tokens=np.arange(length), **values)


def batch(*lengths: int) -> PackedBatch:
    return padfree.collate([sample(length) for length in lengths or (3, 2)])


CASES["batch"] = [
    ("tokens of sample 'a'", lambda folder: Sample(tokens=[[1, 2]], uid="a")),
    ("tokens of sample", lambda folder: Sample(tokens=[0.5])),
    ("tokens of sample", lambda folder: Sample(tokens=[3, -1])),
    ("loss_mask of sample 7", lambda folder: sample(loss_mask=[1, 0], uid=7)),
    ("loss_mask of sample", lambda folder: sample(loss_mask=[0, 1, 2, 1])),
    ("advantages of sample", lambda folder: sample(advantages=[0, 1])),
    ("logprobs of sample", lambda folder: sample(logprobs=[0, float("nan"), 0, 0])),
    ("lengths", lambda folder: Segments.from_lengths([3, -1])),
    ("lengths", lambda folder: Segments.from_lengths([2**31])),
    ("length", lambda folder: batch(3, 2).padded_to(4)),
    ("multiple", lambda folder: batch().padded_to_multiple(0)),
    ("values", lambda folder: batch().unpack(torch.zeros(3))),
    ("reward", lambda folder: with_advantages([sample(group=0), sample(group=0)], "grpo")),
    ("group", lambda folder: with_advantages([sample(reward=1.0), sample(reward=0.0)], "rloo")),
    ("advantages", lambda folder: with_advantages([sample()], "given")),
    ("logprobs", lambda folder: padfree.collate([sample(logprobs=[0, 0, 0, 0]), sample()])),
]
CASES["packing"] = [
    ("capacity", lambda folder: fill([1, 2], 0)),
    ("lengths", lambda folder: fill([1, 9], 8)),
    ("lengths", lambda folder: fill([1.5], 8)),
    ("lengths", lambda folder: fill([-1], 8)),
    ("k", lambda folder: balance([1, 2], 0)),
    ("k", lambda folder: balance([1, 2], 3, equal_count=True)),
    ("costs", lambda folder: balance([1, float("inf")], 1)),
    ("costs", lambda folder: balance([["a"]], 1)),
    ("lengths", lambda folder: balance([1, 2], 1, lengths=[1], cap=4)),
    ("cap", lambda folder: balance([1, 2], 1, lengths=[5, 1], cap=4)),
    ("cap", lambda folder: balance([1, 2], 1, lengths=[3, 3], cap=4)),
    ("samples", lambda folder: padfree.collate([])),
    ("multiple_of", lambda folder: pack([sample()], multiple_of=0)),
    ("num_packs", lambda folder: pack([sample()], num_packs=0)),
    ("num_packs", lambda folder: pack([sample()], num_packs=2)),
    ("max_tokens", lambda folder: pack([sample()], max_tokens=6, multiple_of=4)),
    ("max_tokens", lambda folder: pack([sample(9)], max_tokens=8)),
    ("uid", lambda folder: pack([sample(uid=1), sample(uid=1)])),
    ("weights", lambda folder: pack([sample()], weights=[])),
    ("weights of sample", lambda folder: pack([sample()], weights=[np.ones(2)])),
    ("weights of sample", lambda folder: pack([sample()], weights=[np.full(4, np.nan)])),
    ("values", lambda folder: unpack([batch()], [])),
    ("ranks", lambda folder: plan_step([1], ranks=0, max_tokens=8)),
    ("lengths", lambda folder: plan_step([], ranks=1, max_tokens=8)),
    ("max_tokens", lambda folder: plan_step([9], ranks=1, max_tokens=8)),
    ("overlong", lambda folder: plan_step([9], ranks=1, max_tokens=8, overlong="cut")),  # type: ignore[arg-type]
    ("linear", lambda folder: CostModel(linear=-1)),
    ("seconds", lambda folder: CostModel.fit([10, 20], [1.0])),
    ("seconds", lambda folder: CostModel.fit([10, 20], [1.0, 0.0])),
    ("config", lambda folder: CostModel.from_config({})),
    ("budget", lambda folder: TokenBudgetBatcher([sample()], budget=0)),
    ("max_tokens", lambda folder: TokenBudgetBatcher([sample()], budget=8, count="trained")),
    ("warmup_steps", lambda folder: TokenBudgetBatcher([sample()], budget=8, warmup_steps=2)),
    ("budget", lambda folder: next(iter(TokenBudgetBatcher([sample(9)], budget=8)))),
    ("source", lambda folder: FixedSizeBatcher(iter([sample()]), batch_size=2, shuffle=True)),
    ("epochs", lambda folder: FixedSizeBatcher([sample()], batch_size=2, epochs=0)),
    ("drop_last", lambda folder: FixedSizeBatcher([sample()], batch_size=2, drop_last=True)),
    ("max_length", lambda folder: FixedSizeBatcher([sample()], batch_size=2).padded_length),
    ("max_length", lambda folder: next(iter(FixedSizeBatcher([sample(9)], batch_size=1, max_length=8)))),
    ("length", lambda folder: next(iter(FixedSizeBatcher([{"ids": [1]}], batch_size=1)))),
    ("state", lambda folder: FixedSizeBatcher([sample()], batch_size=1).load_state_dict({})),
]


@cache
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(save_with_tokenizer(folder / "model"))


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def sft(*records: Any, **settings: Any) -> Mistake:
    def provoke(folder: Path) -> Any:
        path = written(folder, "a.jsonl", *records)
        return load_sft(path, tokenizer(folder), SFTDataSettings(**settings), cache=folder / "cache", num_workers=0)

    return provoke


def rollouts(*records: Any, **settings: Any) -> Mistake:
    return lambda folder: read_rollouts(written(folder, "r.jsonl", *records), settings=RolloutDataSettings(**settings))


PAIR = {"prompt": "1+1=", "response": "2"}
ROLLOUT = {"tokens": [1, 2, 3, 4, 5], "response_length": 2, "reward": 1.0}
CASES["data"] = [
    ("data", lambda folder: load_sft([], tokenizer(folder))),
    ("data", lambda folder: load_sft(folder / "nowhere.jsonl", tokenizer(folder))),
    ("data", lambda folder: load_sft(written(folder, "a.csv", "x"), tokenizer(folder))),
    ("data", lambda folder: load_sft(empty(folder), tokenizer(folder))),
    ("data", lambda folder: load_sft([written(folder, "a.jsonl", PAIR)] * 2, tokenizer(folder))),
    ("data", sft()),
    ("data", sft("not JSON", on_bad_row="skip")),
    ("a.jsonl line 1", sft("not JSON")),
    ("a.jsonl line 2", sft(PAIR, {"prompt": "1", "response": None})),
    ("columns", sft({"question": "1", "answer": "2"})),
    ("columns", sft({**PAIR, "text": "1"})),
    ("columns", sft(PAIR, columns={"prompt": "promt"})),
    ("columns", sft(PAIR, columns={"query": "prompt"})),
    ("columns", sft(PAIR, columns={"prompt": "response", "response": "response"})),
    ("prompt_format", sft({"messages": [{"role": "user", "content": "1"}]}, prompt_format="plain")),
    ("chat_template", sft(PAIR, prompt_format="chat")),
    ("max_length", sft(PAIR, max_length=3)),
    ("max_length", lambda folder: SFTDataSettings(max_length=1)),
    ("overlong", lambda folder: SFTDataSettings(overlong="cut")),  # type: ignore[arg-type]
    ("num_workers", lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder), num_workers=-1)),
    ("cache", lambda folder: TokenizedDataset(folder)),
    ("cache", lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder), cache=written(folder, "f"))),
    ("data", rollouts()),
    ("tokenizer", rollouts({**PAIR, "reward": 1.0})),
    ("max_length", rollouts(ROLLOUT, max_length=4)),
    ("r.jsonl line 1", rollouts({**ROLLOUT, "reward": "good"})),
    ("r.jsonl line 1", rollouts({**ROLLOUT, "logprobs": [0.1]})),
    ("reward", lambda folder: load_reward("best")),
    ("reward", lambda folder: load_reward("no_such_module:reward")),
    ("reward", lambda folder: load_reward("math:no_such_function")),
    ("reward", lambda folder: load_reward("math:pi")),
    ("reward", lambda folder: load_reward("textwrap:dedent")),
    ("reward", lambda folder: load_reward("math:gcd")("x", {}, uid="a")),
    ("answer", lambda folder: number_after_hashes("#### 1", {"answer": "none"})),
    ("answer", lambda folder: exact_match("1", {"answer": [1]})),
]


def heads(count: int = 2, tokens: int = 5, size: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(tokens, count, size, dtype=dtype)


FIVE, THREE = Segments.from_lengths([3, 2]), Segments.from_lengths([3])
CASES["attention"] = [
    ("q, k, v", lambda folder: varlen_attention(heads()[None], heads(), heads(), FIVE, FIVE)),
    ("q, k", lambda folder: varlen_attention(heads(3), heads(2), heads(2), FIVE, FIVE)),
    ("q, k, v", lambda folder: varlen_attention(heads(), heads(dtype=torch.float64), heads(), FIVE, FIVE)),
    ("segments_q, segments_k", lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, THREE)),
    ("segments_q", lambda folder: varlen_attention(heads(tokens=4), heads(), heads(), FIVE, FIVE)),
    ("sinks", lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, sinks=torch.zeros(3))),
    ("window", lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, window=0)),
    ("window", lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, window=2, causal=False)),
    ("softcap", lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, softcap=-1.0)),
    ("backend", lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, backend="fastest")),
    ("backend", lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, backend="torch")),
]


def context(**values: Any) -> Any:
    return shard(batch(), **values).context


CASES["cp"] = [
    ("kind", lambda folder: make_layout(FIVE, 1, "zigzag")),  # type: ignore[arg-type]
    ("world", lambda folder: make_layout(FIVE, 0)),
    ("segments", lambda folder: make_layout(FIVE, 2)),
    ("method", lambda folder: shard(batch(), method="rings")),  # type: ignore[arg-type]
    ("rank", lambda folder: shard(batch(), world=2, rank=2)),
    ("segments", lambda folder: shard(batch(3, 2), world=2, rank=0)),
    ("q", lambda folder: attend(heads(tokens=4), heads(), heads(), context())),
    ("window", lambda folder: attend(heads(), heads(), heads(), context(), window=0)),
    ("values", lambda folder: gather_tokens(torch.zeros(4), context())),
    ("group", lambda folder: gather_tokens(torch.zeros(2), shard(batch(2, 2), world=2, rank=0).context)),
    ("device", lambda folder: distributed(device="tpu").__enter__()),
    ("timeout", lambda folder: distributed(device="cpu", timeout=0).__enter__()),
]


@cache
def attached() -> Any:
    return attach(build("qwen3"))


def forward(**changes: Any) -> Mistake:
    """A call of an attached model with some of its inputs replaced."""

    def provoke(folder: Path) -> Any:
        inputs = {**shard(row([3, 2])).model_inputs(), **changes}
        return attached()(**{name: value for name, value in inputs.items() if value is not ...})

    return provoke


def broken_model(change: Callable[[Path], None]) -> Mistake:
    def provoke(folder: Path) -> Any:
        path = save_with_tokenizer(folder / "broken")
        change(path)
        return load_model(path, dtype=torch.float32, device=torch.device("cpu"))

    return provoke


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def renamed_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


CASES["model"] = [
    ("model", lambda folder: attach(torch.nn.Linear(2, 2))),  # type: ignore[type-var]
    ("backend", lambda folder: attach(build("qwen3"), backend="fastest")),
    ("attn_context", forward(attn_context=...)),
    ("position_ids", forward(position_ids=None)),
    ("attention_mask", forward(attention_mask=torch.ones(1, 5))),
    ("use_cache", forward(use_cache=True)),
    ("output_attentions", forward(output_attentions=True)),
    ("attn_context", forward(input_ids=torch.zeros(1, 6, dtype=torch.int64), position_ids=torch.arange(6)[None])),
    ("input_ids", forward(input_ids=torch.zeros(2, 5, dtype=torch.int64), position_ids=torch.zeros(2, 5).long())),
    ("Qwen3ForCausalLM", lambda folder: attached()(torch.zeros(1, 5).long(), None, attn_context=context())),
    ("model", broken_model(lambda path: (path / "config.json").unlink())),
    ("model", broken_model(lambda path: (path / "config.json").write_text("{"))),
    ("model", broken_model(with_config(hidden_size=64))),
    ("model", broken_model(with_config(tie_word_embeddings=False))),
    ("model", broken_model(with_config(quantization_config={"quant_method": "fp8"}))),
    ("model", broken_model(with_config(model_type="bert"))),
    ("model", broken_model(lambda path: (path / "model.safetensors").write_bytes(b"x"))),
    ("model", broken_model(renamed_weights)),
    ("model", lambda folder: load_model(folder / "nowhere", dtype=torch.float32, device=torch.device("cpu"))),
]
HIDDEN, WEIGHT, LABELS = torch.randn(5, 8), torch.randn(7, 8), torch.tensor([1, 2, -100, 6, 0])
TRAINED = HIDDEN.clone().requires_grad_()
CASES["head"] = [
    ("hidden", lambda folder: score(HIDDEN.half(), WEIGHT.half(), LABELS)),
    ("hidden, weight", lambda folder: score(HIDDEN[:, :4], WEIGHT, LABELS)),
    ("weight", lambda folder: score(HIDDEN, WEIGHT.double(), LABELS)),
    ("labels", lambda folder: score(HIDDEN, WEIGHT, LABELS[:3])),
    ("labels", lambda folder: score(HIDDEN, WEIGHT, LABELS.float())),
    ("labels", lambda folder: score(HIDDEN, WEIGHT, LABELS + 1)),
    ("bias", lambda folder: score(HIDDEN, WEIGHT, LABELS, bias=torch.zeros(3))),
    ("softcap", lambda folder: score(HIDDEN, WEIGHT, LABELS, softcap=0.0)),
    ("temperature", lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=0.0)),
    ("temperature", lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=torch.ones(3))),
    ("temperature", lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=torch.zeros(5))),
    ("num_labels", lambda folder: score(HIDDEN, WEIGHT, LABELS, num_labels=9)),
    ("memory", lambda folder: score(HIDDEN, WEIGHT, LABELS, memory="small")),  # type: ignore[arg-type]
    ("memory", lambda folder: score(HIDDEN, WEIGHT, LABELS, memory=0)),
    ("backend", lambda folder: score(HIDDEN, WEIGHT, LABELS, backend="fast")),  # type: ignore[arg-type]
    ("backend", lambda folder: score(HIDDEN.double(), WEIGHT.double(), LABELS, backend="triton")),
    ("token_loss", lambda folder: fused_loss(HIDDEN, WEIGHT, LABELS, lambda logprobs, *_: logprobs[:1])),
    ("token_loss", lambda folder: fused_loss(TRAINED, WEIGHT, LABELS, lambda logprobs, *_: logprobs.detach())),
]
MASKS = [np.array([False, True, True]), np.array([False, True])]


def policy(inputs: dict[str, Any], **settings: Any) -> Mistake:
    def provoke(folder: Path) -> Any:
        given = losses.LossInputs(
            mask=torch.ones(4, dtype=torch.bool),
            weights=torch.ones(4),
            sample_index=torch.zeros(4, dtype=torch.int32),
            num_samples=1,
            **inputs,
        )
        return losses.policy_loss(given, losses.PolicySettings(**settings))

    return provoke


FOUR = torch.zeros(4)
SCORED = {"logprobs": FOUR, "advantages": FOUR, "old_logprobs": FOUR}
CASES["losses"] = [
    ("weights", lambda folder: losses.token_weights("mean", MASKS)),  # type: ignore[arg-type]
    ("constant", lambda folder: losses.token_weights("constant", MASKS)),
    ("constant", lambda folder: losses.token_weights("token-mean", MASKS, constant=3)),
    ("groups", lambda folder: losses.token_weights("group-mean", MASKS)),
    ("groups", lambda folder: losses.token_weights("group-mean", MASKS, groups=["a", None])),
    ("clip low", lambda folder: losses.ClipSettings(low=2)),
    ("clip dual", lambda folder: losses.ClipSettings(dual=1)),
    ("gspo high", lambda folder: losses.GSPOSettings(high=-1)),
    ("cispo low", lambda folder: losses.CISPOSettings(low=3)),
    ("token TIS", lambda folder: losses.TokenTISSettings(low=2, high=3)),
    ("sequence mask statistic", lambda folder: losses.SequenceMaskSettings(statistic="max")),  # type: ignore[arg-type]
    ("opsm delta", lambda folder: losses.OPSMSettings(delta=-1)),
    ("old_policy", lambda folder: losses.PolicySettings(old_policy="other")),  # type: ignore[arg-type]
    ("kl_estimator", lambda folder: losses.PolicySettings(kl_estimator="k4")),  # type: ignore[arg-type]
    ("kl_coefficient", lambda folder: losses.PolicySettings(kl_coefficient=-1)),
    ("entropy_coefficient", lambda folder: losses.PolicySettings(entropy_coefficient=float("nan"))),
    ("corrections", lambda folder: losses.PolicySettings(corrections=(losses.OPSMSettings(),) * 2)),
    (
        "corrections",
        lambda folder: losses.PolicySettings(corrections=(losses.TokenTISSettings(),), old_policy="sampler"),
    ),
    (
        "corrections",
        lambda folder: losses.PolicySettings(corrections=(losses.OPSMSettings(),), old_policy="current"),
    ),
    ("value clip", lambda folder: losses.ValueSettings(clip=-1)),
    ("beta", lambda folder: losses.DPOSettings(beta=0)),
    ("label_smoothing", lambda folder: losses.DPOSettings(label_smoothing=0.5)),
    ("margin", lambda folder: losses.RewardModelSettings(margin=-1)),
    ("logprobs", policy({})),
    ("old_logprobs", policy({"logprobs": FOUR, "advantages": FOUR})),
    ("advantages", policy({"logprobs": FOUR, "old_logprobs": FOUR})),
    ("advantages", policy({**SCORED, "advantages": torch.zeros(3)})),
    ("ref_logprobs", policy(SCORED, kl_coefficient=0.1)),
    ("entropy", policy(SCORED, entropy_coefficient=0.1)),
    ("rollout_logprobs", policy(SCORED, corrections=(losses.TokenTISSettings(),))),
    ("kl_estimator", lambda folder: losses.kl_divergence(FOUR, FOUR, "k4")),  # type: ignore[arg-type]
    ("labels", lambda folder: losses.score_logits(torch.zeros(4, 7), LABELS)),
    ("group", lambda folder: losses.preference_pairs(batch().samples)),
    ("steps", lambda folder: learning_rate_factor(3, kind="cosine", warmup=0, steps=None, final=0.0)),
]
SEQUENCES: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5]],
    "loss_masks": [[1, 1], [1]],
    "rewards": [1.0, 0.0],
    "raw_rewards": [1.0, 0.0],
    "response_lengths": [2, 1],
    "advantages": [torch.zeros(2), torch.zeros(1)],
    "returns": [torch.zeros(2), torch.zeros(1)],
}


def packs(**changes: Any) -> Mistake:
    return lambda folder: slime.pack_sequences(**{**SEQUENCES, **changes})


def collator(**settings: Any) -> PackedCollator:
    return PackedCollator(build("qwen3"), **settings)


CASES["compat"] = [
    ("features", lambda folder: collator()([])),
    ("features", lambda folder: collator()([{"text": "x"}])),
    ("attention_mask", lambda folder: collator()([{"input_ids": [1, 2], "attention_mask": [1, 0]}])),
    ("labels", lambda folder: collator()([{"input_ids": [1, 2], "labels": [2, -100]}])),
    ("loss_mask", lambda folder: collator()([{"input_ids": [1, 2], "loss_mask": [1]}])),
    ("seq_lengths", lambda folder: collator()([{"input_ids": [1, 2], "seq_lengths": [1]}])),
    ("length", lambda folder: collator(length=1)([{"input_ids": [1, 2]}])),
    ("length", lambda folder: collator(length=3, multiple_of=2)),
    ("num_packs", packs(num_packs=0)),
    ("loss_masks", packs(loss_masks=[[1, 1]])),
    ("response_lengths", packs(response_lengths=[9, 1])),
    ("max_tokens_per_gpu", packs(max_tokens_per_gpu=2)),
    ("k_partitions", lambda folder: slime.get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)),
    ("k_partitions", lambda folder: slime.get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)),
]


def command(*arguments: str) -> Mistake:
    """What `padfree` prints for it, as the message of an error."""

    def provoke(folder: Path) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            assert main([argument.replace("FOLDER", str(folder)) for argument in arguments]) == 1
        text = printed.getvalue()
        assert text.endswith("\n")
        raise ValueError(text.removesuffix("\n").removeprefix(f"padfree {arguments[0]}: "))

    return provoke


CASES["cli"] = [
    ("config", command("sft", "FOLDER/nowhere.toml")),
    ("loss.kind", command("sft", str(RECIPES / "rl.toml"))),
    ("loss.kind", command("rl", str(RECIPES / "sft.toml"))),
    ("model.path", command("sft", str(RECIPES / "sft.toml"), "model.path=FOLDER/nowhere", "run.folder=FOLDER/run")),
    ("optimizer.lr", command("rl", str(RECIPES / "rl.toml"), "optimizer.lr=none")),
    ("--resume", command("demo", "--folder", "FOLDER/none", "--resume")),
    ("--folder", lambda folder: command("demo", "--folder", str(written(folder, "a.txt").parent))(folder)),
    ("--data", command("plan")),
    ("--max-tokens", command("plan", "--lengths", "lengths.npy")),
    ("--ranks", command("plan", "--lengths", "lengths.npy", "--max-tokens", "8", "--ranks", "0")),
    ("--lengths", command("plan", "--lengths", "FOLDER/nowhere.npy", "--max-tokens", "8")),
    ("--suggest", command("plan", "--lengths", "lengths.npy", "--suggest")),
    ("--samples", command("check", "--model", "m", "--samples", "1")),
    ("--dtype", command("check", "--model", "m", "--dtype", "int8")),
    ("--layers", command("check", "--model", "m", "--layers", "2", "--full")),
    ("--layout", command("check", "--model", "m", "--layout", "dp=2,tp=2")),
    ("--layout", command("check", "--model", "m", "--layout", "dp=2,cp=2")),
    ("--json", command("check", "--model", "m", "--json", "FOLDER/no/such/report.json")),
    ("--output", command("report", "FOLDER", "--output", "report.pdf")),
    ("RUN", command("report", "FOLDER/nowhere")),
]

# The library: inputs of a wrong type, and models that were not proven.

FOUR_REWARDS, FOUR_GROUPS, FOUR_BOOLS = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), FOUR == 0


def stock_opt() -> PackedCollator:
    """OPT's own attention mixes the samples of a row."""
    return PackedCollator(build("opt"))


def unknown_attention() -> PackedCollator:
    model = build("qwen3")
    model.config._attn_implementation_internal = "my_attention"
    return PackedCollator(model)


def collator_of_another_attention() -> Any:
    model = build("qwen3")
    collator = PackedCollator(model)
    model.set_attn_implementation("eager")
    return collator([{"input_ids": [1, 2]}])


def reward_function(text: str, name: str = "score") -> Mistake:
    """A module of the current folder with this text."""

    def provoke(folder: Path) -> None:
        module = f"rewards_{abs(hash(text)) % 10**8}"
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
        with contextlib.chdir(folder):
            load_reward(f"{module}:{name}")

    return provoke


CASES["library"] = [
    ("rewards", lambda folder: losses.grpo_advantages([1, 0, 0, 1], FOUR_GROUPS, 2)),  # type: ignore[arg-type]
    ("rewards", lambda folder: losses.rloo_advantages(np.ones(4), FOUR_GROUPS, 2)),  # type: ignore[arg-type]
    ("rewards", lambda folder: losses.grpo_advantages(FOUR_REWARDS * 1j, FOUR_GROUPS, 2)),
    ("groups", lambda folder: losses.grpo_advantages(FOUR_REWARDS, FOUR_GROUPS.bool(), 2)),
    ("groups", lambda folder: losses.grpo_advantages(FOUR_REWARDS, FOUR_GROUPS.float(), 2)),
    ("groups", lambda folder: losses.grpo_advantages(FOUR_REWARDS, FOUR_GROUPS, 1)),
    ("groups", lambda folder: losses.grpo_advantages(FOUR_REWARDS, FOUR_GROUPS[:3], 2)),
    ("num_groups", lambda folder: losses.grpo_advantages(FOUR_REWARDS, FOUR_GROUPS, 2.0)),  # type: ignore[arg-type]
    ("eps", lambda folder: losses.grpo_advantages(FOUR_REWARDS, FOUR_GROUPS, 2, eps=-1)),
    ("mask", lambda folder: losses.whiten(FOUR_REWARDS, FOUR_GROUPS)),
    ("values", lambda folder: losses.whiten(FOUR_REWARDS[:3], FOUR_BOOLS)),
    ("gamma", lambda folder: losses.discounted_returns(FOUR_REWARDS, FOUR_BOOLS, FOUR_GROUPS, gamma=float("nan"))),
    ("sample_index", lambda folder: losses.segment_sum(FOUR_REWARDS, FOUR_GROUPS, 0)),
    ("sample_index", lambda folder: losses.spread(FOUR_REWARDS, FOUR_GROUPS - 1)),
    ("sample_index", lambda folder: losses.spread(FOUR_REWARDS, FOUR_REWARDS)),
    ("labels", lambda folder: losses.score_logits(torch.zeros(4, 7), torch.tensor([0, 1, 2, 7]))),
    ("labels", lambda folder: losses.score_logits(torch.zeros(4, 7), FOUR)),
    ("logprobs", policy({**SCORED, "logprobs": [0.0] * 4})),
    ("masks", lambda folder: losses.token_weights("token-mean", [np.full(3, 0.5)])),  # type: ignore[list-item]
    ("counts", lambda folder: losses.weight_divisor("token-mean", np.array([1.5]))),  # type: ignore[arg-type]
    ("divisor", lambda folder: losses.batch_weights("token-mean", LABELS, LABELS * 0, 1, divisor=0)),
    ("objective", lambda folder: losses.PolicySettings(objective="clip")),  # type: ignore[arg-type]
    ("inputs, settings", lambda folder: losses.compute_loss({}, losses.SFTSettings())),  # type: ignore[arg-type]
    ("lengths", lambda folder: Segments.from_lengths([1.5, 2.5])),  # type: ignore[list-item]
    ("pad_length", lambda folder: Segments.from_lengths([3], pad_length=-1)),
    ("reward of sample", lambda folder: sample(reward="1")),
    ("reward of sample 3", lambda folder: sample(reward=[1.0], uid=3)),
    ("logprobs of sample", lambda folder: sample(logprobs=["0", "1", "2", "3"])),
    ("samples", lambda folder: pack([[1, 2, 3]])),  # type: ignore[list-item]
    ("samples", lambda folder: pack(7)),  # type: ignore[arg-type]
    ("batches", lambda folder: unpack(7, [FOUR])),  # type: ignore[arg-type]
    ("values", lambda folder: batch().unpack([1, 2, 3, 4, 5])),  # type: ignore[arg-type]
    ("capacity", lambda folder: fill([1, 2], float("nan"))),  # type: ignore[arg-type]
    ("epochs", lambda folder: TokenBudgetBatcher([sample()], budget=8, epochs=float("nan"))),  # type: ignore[arg-type]
    ("sinks", lambda folder: padfree.attention.apply_sinks(torch.zeros(2, 1, 4), torch.zeros(2, 1), LABELS[:1])),
    ("batch", lambda folder: shard([1, 2])),  # type: ignore[arg-type]
    ("model", lambda folder: padfree.hidden_states(build("opt"), shard(batch()))),
    ("model", lambda folder: padfree.hidden_states(torch.nn.Linear(2, 2), shard(batch()))),  # type: ignore[arg-type]
    ("batch", lambda folder: padfree.hidden_states(build("qwen3"), batch())),  # type: ignore[arg-type]
    ("model", lambda folder: stock_opt()),
    ("model", lambda folder: unknown_attention()),
    ("model", lambda folder: PackedCollator(attach(build("qwen3")))),
    ("model", lambda folder: PackedCollator(torch.nn.Linear(2, 2))),
    ("model", lambda folder: collator_of_another_attention()),
    ("multiple_of", lambda folder: collator(multiple_of=0)),
    ("input_ids of feature 0", lambda folder: collator()([{"input_ids": [0.5]}])),
    ("completion_mask", lambda folder: collator()([{"input_ids": [1, 2], "completion_mask": [1, 3]}])),
    ("tokens of sequence 0", packs(tokens=[[1.0, 2.0, 3.0], [4, 5]])),
    ("loss_masks of sequence 1", packs(loss_masks=[[1, 1], [0.5]])),
    ("max_tokens_per_gpu", packs(max_tokens_per_gpu=2.5)),
    ("x", lambda folder: slime.sum_of_sample_mean([1.0, 2.0], [2], [FOUR[:2]])),  # type: ignore[arg-type]
    ("reward", lambda folder: load_reward("builtins:eval")),
    ("reward", lambda folder: load_reward("os:system")),
    ("reward", lambda folder: check_reward_name("subprocess:run")),
    ("reward", lambda folder: check_reward_name("no_such_module:score")),
    ("reward", lambda folder: check_reward_name("score")),
    ("reward", reward_function("score = eval\n")),
    ("reward", reward_function("from os import getenv as score\n")),
    ("reward", reward_function("class score:\n    pass\n")),
    ("reward", reward_function("async def score(response, row):\n    return 1.0\n")),
    ("reward", reward_function("def score(response):\n    return 1.0\n")),
    ("reward", reward_function("def other(response, row):\n    return 1.0\n")),
    ("reward", reward_function("1 / 0\n")),
]
