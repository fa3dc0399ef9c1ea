"""Mistakes a user can make, each provoked for real, for `test_errors`.

    CASES["config"]    ("optimizer.lr", changed("optimizer.lr=-1"), "optimizer.lr=1")
                        ^^^^^^^^^^^^    ^^^^^^^                      ^^^^^^^^^^^^^^^^
                        |               |                            what the message advises: words to add, or a
                        |               |                            function of a folder; needed where the message
                        |               |                            itself holds nothing that can be pasted
                        |               a function of a folder of its own, which raises a UserError
                        the message begins with this

Every part of padfree has its list.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import Tensor

import padfree
from padfree import losses
from padfree.attention import varlen_attention
from padfree.batch import LmHead, PackedBatch
from padfree.cli.main import main
from padfree.compat import slime
from padfree.compat.hf import PackedCollator
from padfree.config import config_from_dict, load_config
from padfree.config.rollout import UNSUPPORTED
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
from padfree.distributed.mesh import distributed
from padfree.errors import UserError
from padfree.head import fused_loss, score
from padfree.model import attach
from padfree.model.export import export_model
from padfree.model.load import load_model
from padfree.optim.schedule import learning_rate_factor
from padfree.packing import CostModel, FixedSizeBatcher, TokenBudgetBatcher, balance, fill, pack, plan_step, unpack
from padfree.rollout import SamplingRequest
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.sample import Sample
from padfree.segments import Segments
from padfree.tasks.batch_advantages import with_advantages
from padfree.testing.models import build, row, save_with_tokenizer
from padfree.testing.vision_folders import vision_folder
from padfree.tools.demo.demo_folder import Demo
from padfree.tools.demo.run_demo import SIZES
from padfree.tools.demo.stages import STAGES
from padfree.tools.page import Page
from tests.rollout.vllm.error_cases import CASES as SERVER_CASES
from tests.tools.doctor.error_cases import CASES as DOCTOR_CASES

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "src" / "padfree" / "recipes"
Mistake = Callable[[Path], Any]
Cure = str | tuple[str, ...] | Mistake
Case = tuple[str, Mistake] | tuple[str, Mistake, Cure]
CASES: dict[str, list[Case]] = {}
"""By part: (the beginning of the message, what provokes it in a folder of its own, and where needed its cure)."""


class CommandLine:
    """A mistake on a command line, which words can be added to or taken from."""

    def __init__(self, words: tuple[str, ...], run: Callable[[Path, tuple[str, ...]], Any]) -> None:
        self.words, self.run = words, run

    def __call__(self, folder: Path) -> Any:
        return self.run(folder, self.words)

    def with_words(self, *added: str) -> CommandLine:
        """The same with these words as well; `-name` takes a setting away."""
        gone = {word[1:] for word in added if re.match(r"-[a-z]", word)}
        kept = tuple(word for word in self.words if word.partition("=")[0] not in gone)
        new = tuple(word for word in added if not re.match(r"-[a-z]", word))
        settings = [word for word in new if re.match(r"\w+(\.\w+)+=", word)]
        flags = [word for word in new if word not in settings]
        return CommandLine((*kept, *settings, *flags), self.run)


def changed(*overrides: str, recipe: str = "sft") -> CommandLine:
    """A recipe with settings that cannot be."""
    return CommandLine(overrides, lambda folder, words: load_config(RECIPES / f"{recipe}.toml", words))


def written(folder: Path, name: str, *records: Any) -> Path:
    path = folder / name
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def one_by_one(*calls: Mistake) -> Mistake:
    """Each alternative of a cure, in a folder of its own."""

    def provoke(folder: Path) -> None:
        for number, call in enumerate(calls):
            (folder / str(number)).mkdir()
            call(folder / str(number))

    return provoke


DISTILL = ("loss.kind=distill", "teacher.path=m")
PLAYED = "rollout.environment=padfree.rollout.environment.calculator:episode"
JOB = ("slurm.nodes=2", "slurm.processes=8")
SERVED = 'rollout.launch.command=["vllm", "serve"]'

HELD_OUT = "eval.path=test.jsonl"
REFERENCE = ("reference.path=m", "loss.kl_coefficient=0.1")

CASES["config"] = [
    ("eval.every", changed(HELD_OUT, "eval.every=0"), "eval.every=10"),
    ("eval.every", changed("eval.every=5"), HELD_OUT),
    ("eval.path", changed(HELD_OUT, recipe="rl"), "rollout.reward=exact_match"),
    ("eval.samples_per_prompt", changed(HELD_OUT, "eval.samples_per_prompt=2", recipe="rl-local"), "eval.greedy=false"),
    ("eval.reward", changed(HELD_OUT, "eval.reward=exact_match"), "-eval.reward"),
    ("checkpoint.best", changed("checkpoint.best=eval/loss"), HELD_OUT),
    ("checkpoint.best", changed(HELD_OUT, "checkpoint.best=loss"), "checkpoint.best=eval/loss"),
    ("checkpoint.better", changed("checkpoint.better=lowest"), "-checkpoint.better"),
    ("batch.samples", changed("batch.samples=7", recipe="dpo"), "batch.samples=8"),
    ("data.loss_on", changed("data.loss_on=all", recipe="dpo"), "-data.loss_on"),
    ("reference.refresh", changed("reference.path=m", "reference.refresh=2", recipe="dpo"), "-reference.refresh"),
    ("reference.path", changed("reference.path=m", "loss.dpo.variant=simpo", recipe="dpo"), "-reference.path"),
    ("reference.precompute", changed("reference.precompute=true"), "-reference.precompute"),
    ("loss.dpo.gamma", changed("loss.dpo.gamma=1", recipe="dpo"), "-loss.dpo.gamma"),
    ("loss.dpo.label_smoothing", changed("loss.dpo.label_smoothing=0.6", recipe="dpo"), "loss.dpo.label_smoothing=0.1"),
    ("config", lambda folder: load_config(folder / "nowhere.toml"), lambda folder: load_config(RECIPES / "sft.toml")),
    (
        "config",
        lambda folder: load_config(written(folder, "bad.toml", "[model")),
        lambda folder: load_config(written(folder, "bad.toml", "[model]")),
    ),
    ("override", changed("lr"), lambda folder: load_config(RECIPES / "sft.toml", ["optimizer.lr=1e-5"])),
    ("override", changed("=3"), lambda folder: load_config(RECIPES / "sft.toml", ["optimizer.lr=1e-5"])),
    ("override", changed("model.path=m", "model.path.deeper=1"), "-model.path.deeper"),
    ("optimiser", changed("optimiser.lr=1"), ("-optimiser.lr", "optimizer.lr=1")),
    ("optimizer.rl", changed("optimizer.rl=1")),
    ("optimizer.lr", changed("optimizer.lr=fast")),
    ("optimizer.lr", changed("optimizer.lr=-1")),
    ("optimizer.betas", changed("optimizer.betas=[0.9]"), "optimizer.betas=[0.9, 0.95]"),
    ("optimizer.betas", changed("optimizer.betas=[0.9, 1.0]"), "optimizer.betas=[0.9, 0.95]"),
    ("optimizer.eps", changed("optimizer.eps=0"), "optimizer.eps=1e-8"),
    ("optimizer.eps", changed("optimizer.eps=1e-320"), "optimizer.eps=1e-8"),
    ("optimizer.state", changed("optimizer.state=int4"), "optimizer.state=int8"),
    ("optimizer.state", changed("optimizer.name=muon", "optimizer.state=int8"), "optimizer.state=float32"),
    ("optimizer.weight_decay", changed("optimizer.weight_decay=-0.1")),
    ("optimizer.max_grad_norm", changed("optimizer.max_grad_norm=0")),
    (
        "model",
        lambda folder: config_from_dict({"model": "Qwen/Qwen3-0.6B"}),
        lambda folder: config_from_dict({"model": {}}),
    ),
    ("model.path", lambda folder: config_from_dict({}), lambda folder: config_from_dict({"model": {"path": "m"}})),
    ("model.path", changed("model.path=''"), "model.path=m"),
    ("model.dtype", changed("model.dtype=float16")),
    ("data.path", changed("data.path=[]"), "data.path=train.jsonl"),
    ("data.max_length", changed("data.max_length=1")),
    ("data.epochs", changed("data.epochs=0")),
    ("data.epochs", changed("data.epochs=1_000_000")),
    ("data.overlong", changed("data.overlong=cut")),
    ("data.columns", changed("data.columns={ a = 1 }"), "data.columns={ a = 'prompt' }"),
    ("batch.samples", changed("batch.tokens=1000")),
    ("batch.samples", changed("batch.samples=0")),
    ("batch.max_tokens", changed("batch.max_tokens=0")),
    ("batch.samples", changed("batch.samples=none", "batch.tokens=100", recipe="rl")),
    ("lora.rank", changed("lora.rank=-1")),
    ("lora.alpha", changed("lora.alpha=0")),
    ("lora.dropout", changed("lora.dropout=1")),
    ("lora.targets", changed("lora.targets=[]"), "lora.targets=all-linear"),
    ("teacher.path", changed("teacher.path=''")),
    ("teacher.path", changed("teacher.path=m"), "loss.kind=distill"),
    ("teacher.path", changed("loss.advantage=teacher", recipe="rl"), "teacher.path=m"),
    ("teacher.path", changed("loss.kind=distill"), "teacher.path=m"),
    ("teacher.offload", changed("teacher.offload=true"), ("teacher.path=m", "loss.kind=distill")),
    ("loss.distill.divergence", changed(*DISTILL, "loss.distill.divergence=kl"), "loss.distill.divergence=jsd"),
    ("loss.distill.divergence", changed("loss.distill.divergence=jsd"), "loss.kind=distill"),
    (
        "loss.distill.beta",
        changed(*DISTILL, "loss.distill.divergence=jsd", "loss.distill.beta=1"),
        "loss.distill.beta=0.3",
    ),
    ("loss.distill.beta", changed(*DISTILL, "loss.distill.beta=0.3"), "loss.distill.divergence=jsd"),
    ("loss.distill.top_k", changed(*DISTILL, "loss.distill.top_k=0"), "loss.distill.top_k=1"),
    ("loss.advantage", changed(*DISTILL, "loss.advantage=rloo"), "loss.advantage=grpo"),
    ("batch.samples", changed("batch.samples=7", recipe="reward"), "batch.samples=8"),
    ("lora.export", changed("lora.rank=4", "lora.export=adapter", recipe="reward"), "lora.export=merged"),
    ("loss.reward.margin", changed("loss.reward.margin=-1", recipe="reward"), "loss.reward.margin=1"),
    ("loss.reward.margin", changed("loss.reward.margin=1")),
    ("loss.temperature", changed("loss.temperature=2", recipe="reward")),
    ("critic.path", changed("critic.path=''", "loss.advantage=gae", recipe="rl")),
    ("critic.lr", changed("critic.lr=0", "loss.advantage=gae", recipe="rl"), "critic.lr=1e-5"),
    ("critic.lr", changed("critic.lr=1e-5", recipe="rl")),
    ("critic.warmup", changed("critic.warmup=-1", "loss.advantage=gae", recipe="rl")),
    ("critic.warmup", changed("critic.warmup=5", "run.steps=5", "loss.advantage=gae", recipe="rl"), "critic.warmup=4"),
    ("critic.gamma", changed("critic.gamma=2", "loss.advantage=gae", recipe="rl")),
    ("critic.gae_lambda", changed("critic.gae_lambda=-1", "loss.advantage=gae", recipe="rl")),
    ("critic.clip", changed("critic.clip=0", "loss.advantage=gae", recipe="rl"), "critic.clip=0.1"),
    (
        "critic.max_grad_norm",
        changed("critic.max_grad_norm=0", "loss.advantage=gae", recipe="rl"),
        "critic.max_grad_norm=1",
    ),
    ("rollout.reward", changed("rollout.reward='model:'", recipe="rl-local"), "rollout.reward=model:judge"),
    ("eval.reward", changed("eval.path=t.jsonl", "eval.reward=model:judge", recipe="rl-local")),
    ("reference.path", changed("reference.path=''")),
    ("reference.path", changed("reference.path=m", recipe="rl")),
    ("reference.offload", changed("reference.offload=true", recipe="rl"), REFERENCE),
    ("reference.refresh", changed("reference.refresh=0", recipe="rl"), (*REFERENCE, "reference.refresh=1")),
    ("rollout.samples_per_prompt", changed("rollout.samples_per_prompt=0", recipe="rl")),
    ("rollout.max_new_tokens", changed("rollout.max_new_tokens=0", recipe="rl")),
    ("rollout.engine", changed("rollout.engine=sglang", recipe="rl"), "rollout.engine=in_process"),
    ("rollout.engine", changed("rollout.engine=in_proces", recipe="rl"), "rollout.engine=in_process"),
    ("rollout.kv_cache_memory", changed("rollout.kv_cache_memory=0", recipe="rl"), "rollout.kv_cache_memory=auto"),
    ("rollout.reward", changed("rollout.reward=exact_match")),
    ("rollout.environment", changed("rollout.environment=calculator", recipe="rl-local"), PLAYED),
    ("rollout.environment", changed("rollout.environment=a:b")),
    ("rollout.agent", changed("rollout.agent=a", "rollout.environment=a:b", recipe="rl-local")),
    ("rollout.agent", changed('rollout.agent=["a", ""]', recipe="rl-local"), "rollout.agent=a"),
    ("rollout.agent", changed("rollout.agent=a", recipe="rl")),
    ("rollout.episode_timeout", changed("rollout.episode_timeout=0", recipe="rl-local")),
    ("rollout.episode_timeout", changed(PLAYED, "rollout.episode_timeout=1200", recipe="rl-local")),
    ("rollout.reward_processes", changed("rollout.reward_processes=-1", recipe="rl-local")),
    ("rollout.reward_processes", changed("rollout.reward_processes=2", recipe="rl"), "rollout.reward=exact_match"),
    ("rollout.on_failure", changed("rollout.on_failure=ignore", recipe="rl-local")),
    (
        "rollout.reward_processes",
        changed("rollout.reward=model:judge", "rollout.reward_processes=2", recipe="rl-local"),
        "rollout.reward_processes=0",
    ),
    *(
        (
            "rollout.reward_processes",
            changed(*rewards, "rollout.reward_processes=2", recipe="rl-local"),
            "rollout.reward_processes=0",
        )
        for rewards in (
            ["rollout.reward=__main__:length"],
            ["rollout.reward=__mp_main__:length"],
            ["rollout.reward=exact_match", "eval.path=rows.jsonl", "eval.reward=__main__:length"],
        )
    ),
    ("rollout.min_new_tokens", changed("rollout.min_new_tokens=-1", recipe="rl-local"), "rollout.min_new_tokens=1"),
    ("rollout.top_p", changed("rollout.top_p=0", recipe="rl-local"), "rollout.top_p=0.9"),
    ("rollout.top_k", changed("rollout.top_k=0", recipe="rl-local"), "rollout.top_k=20"),
    ("rollout.min_p", changed("rollout.min_p=1.5", recipe="rl-local"), "rollout.min_p=0.1"),
    *((name, changed(f"{name}=1", recipe="rl-vllm"), (f"-{name}", "rollout.top_p=0.9")) for name in UNSUPPORTED),
    ("rollout.staleness", changed("rollout.staleness=-1", recipe="rl-vllm"), "rollout.staleness=2"),
    ("rollout.on_update", changed("rollout.on_update=wait", recipe="rl-vllm"), "rollout.on_update=finish"),
    (
        "rollout.routing",
        changed("rollout.routing=replay", "rollout.staleness=1", recipe="rl-vllm"),
        "rollout.on_update=restart",
    ),
    ("rollout.staleness", changed("rollout.staleness=1", recipe="rl-local"), "rollout.staleness=0"),
    ("rollout.filter", changed("rollout.filter=same", recipe="rl-local"), "rollout.filter=equal"),
    (
        "rollout.filter",
        changed("rollout.filter=equal", "rollout.samples_per_prompt=1", recipe="rl-local"),
        "rollout.samples_per_prompt=4",
    ),
    ("rollout.oversample", changed("rollout.oversample=1.5", recipe="rl-local"), "rollout.filter=equal"),
    ("rollout.oversample", changed("rollout.oversample=0.5", recipe="rl-local"), "rollout.oversample=1.0"),
    ("rollout.filter_bound", changed("rollout.filter_bound=0.5", recipe="rl-local"), "rollout.filter_bound=2.0"),
    (
        "rollout.overlong_buffer",
        changed("rollout.overlong_buffer=100000", recipe="rl-local"),
        "rollout.overlong_buffer=8",
    ),
    (
        "rollout.overlong_penalty",
        changed("rollout.overlong_penalty=0", recipe="rl-local"),
        "rollout.overlong_penalty=0.5",
    ),
    ("rollout.timeout", changed("rollout.timeout=0", recipe="rl-vllm")),
    ("rollout.timeout", changed("rollout.timeout=1200", recipe="rl-vllm")),
    ("rollout.canary", changed("rollout.canary=-1", recipe="rl-vllm")),
    ("rollout.transfer_folder", changed('rollout.transfer_folder=""', recipe="rl-vllm")),
    ("rollout.transfer", changed("rollout.transfer=file", recipe="rl-vllm")),
    ("rollout.staleness", changed("rollout.colocated=true", "rollout.staleness=1", recipe="rl-vllm")),
    ("rollout.transfer", changed("rollout.colocated=true", "rollout.transfer=group", recipe="rl-vllm")),
    ("rollout.colocated", changed("rollout.colocated=true", recipe="rl-local")),
    ("rollout.server_memory", changed("rollout.server_memory=0.5", recipe="rl-vllm"), "rollout.colocated=true"),
    (
        "rollout.server_memory",
        changed("rollout.colocated=true", "rollout.server_memory=60", recipe="rl-vllm"),
        "rollout.server_memory=0.6",
    ),
    (
        "rollout.sleeping_memory",
        changed("rollout.colocated=true", "rollout.sleeping_memory=-1", recipe="rl-vllm"),
        "rollout.sleeping_memory=1.5",
    ),
    ("rollout.launch.command", changed('rollout.launch.command=["vllm", ""]', recipe="rl-vllm"), SERVED),
    ("rollout.launch.command", changed("rollout.launch.command=vllm", recipe="rl-local")),
    ("rollout.launch.devices", changed("rollout.launch.devices=[]", recipe="rl-vllm"), "rollout.launch.devices=cpu"),
    ("rollout.servers", changed("rollout.servers=http://a:1", recipe="rl-local")),
    ("rollout.servers", changed("rollout.engine=vllm", recipe="rl-local"), "rollout.servers=http://a:1"),
    ("rollout.servers", changed("rollout.engine=vllm", recipe="rl-local"), "rollout.launch.command=vllm"),
    ("rollout.servers", changed("rollout.servers=http://a:1", recipe="rl-vllm"), "rollout.launch.command=[]"),
    *(
        ("rollout.servers", changed("rollout.launch.command=[]", f"rollout.servers={url}", recipe="rl-vllm"), right)
        for url, right in (
            ("localhost:8000", "rollout.servers=http://localhost:8000"),
            ("http://", "rollout.servers=http://127.0.0.1:8000"),
            ('["http://a:1", "http://a:1"]', "rollout.servers=http://a:1"),
        )
    ),
    ("batch.samples", changed("rollout.reward=exact_match", "batch.samples=12", recipe="rl")),
    ("slurm.processes", changed("slurm.nodes=2")),
    ("slurm.processes", changed("slurm.processes=8")),
    ("slurm.nodes", changed("slurm.nodes=0", "slurm.processes=8"), "slurm.nodes=1"),
    ("slurm.restarts", changed("slurm.restarts=-1", *JOB), "slurm.restarts=1"),
    ("slurm.sbatch", changed('slurm.sbatch={"--time" = "1"}', *JOB), 'slurm.sbatch={time = "1"}'),
    ("slurm.sbatch.time", changed('slurm.sbatch={time = "1\\n2"}', *JOB), 'slurm.sbatch={time = "1"}'),
    ("slurm.setup", changed('slurm.setup=["a\\nb"]', *JOB), 'slurm.setup=["a", "b"]'),
    ("slurm.python", changed("slurm.python=''", *JOB), "slurm.python=python3"),
    ("schedule.warmup", changed("schedule.warmup=-1")),
    ("schedule.warmup", changed("schedule.warmup=9", "run.steps=3")),
    ("schedule.final", changed("schedule.final=2"), "schedule.final=0.1"),
    ("run.steps", changed("schedule.kind=cosine")),
    ("run.steps", changed("data.epochs=none")),
    ("run.steps", changed("run.steps=0")),
    ("run.seed", changed("run.seed=-1")),
    ("run.timeout", changed("run.timeout=0")),
    ("run.folder", changed("run.folder=''"), "run.folder=runs/x"),
    ("parallel.context", changed("parallel.context=0")),
    ("parallel.method", changed("parallel.method=rings")),
    ("loss.temperature", changed("loss.temperature=0", recipe="rl"), "loss.temperature=1"),
    ("loss.load_balancing", changed("loss.load_balancing=-0.1"), "loss.load_balancing=0"),
    ("loss.router_bias", changed("loss.router_bias=-0.1"), "loss.router_bias=0"),
    ("loss.router_bias", changed("loss.router_bias=0.1", "lora.rank=4"), "loss.router_bias=0"),
    ("loss.epochs", changed("loss.epochs=2")),
    ("loss.low", changed("loss.low=0.2")),
    ("loss.dual", changed("loss.kind=gspo", "loss.dual=3", recipe="rl")),
    ("loss.icepop.high", changed("loss.icepop.high=3", recipe="rl")),
    ("loss.corrections", changed("loss.corrections=['tis']", recipe="rl"), "loss.corrections=['token_tis']"),
    ("checkpoint.every", changed("checkpoint.every=0")),
    ("checkpoint.keep", changed("checkpoint.keep=0")),
    ("track.wandb", changed("track.wandb=''"), "track.wandb=project"),
]


def sample(length: int = 4, **values: Any) -> Sample:
    return Sample(tokens=np.arange(length), **values)


def batch(*lengths: int) -> PackedBatch:
    return padfree.collate([sample(length) for length in lengths or (3, 2)])


CASES["batch"] = [
    (
        "tokens of sample 'a'",
        lambda folder: Sample(tokens=[[1, 2]], uid="a"),
        lambda folder: Sample(tokens=[1, 2], uid="a"),
    ),
    ("tokens of sample", lambda folder: Sample(tokens=[0.5]), lambda folder: Sample(tokens=[5])),
    ("tokens of sample", lambda folder: Sample(tokens=[3, -1]), lambda folder: Sample(tokens=[3, 1])),
    (
        "loss_mask of sample 7",
        lambda folder: sample(loss_mask=[1, 0], uid=7),
        lambda folder: sample(loss_mask=[0, 0, 1, 0], uid=7),
    ),
    (
        "loss_mask of sample",
        lambda folder: sample(loss_mask=[0, 1, 2, 1]),
        lambda folder: sample(loss_mask=[0, 1, 1, 1]),
    ),
    ("advantages of sample", lambda folder: sample(advantages=[0, 1]), lambda folder: sample(advantages=[0, 1, 1, 1])),
    (
        "logprobs of sample",
        lambda folder: sample(logprobs=[0, float("nan"), 0, 0]),
        lambda folder: sample(logprobs=[0, -1, 0, 0]),
    ),
    ("lengths", lambda folder: Segments.from_lengths([3, -1]), lambda folder: Segments.from_lengths([3, 1])),
    ("lengths", lambda folder: Segments.from_lengths([2**31]), lambda folder: Segments.from_lengths([2**30])),
    ("length", lambda folder: batch(3, 2).padded_to(4), lambda folder: batch(3, 2).padded_to(5)),
    ("multiple", lambda folder: batch().padded_to_multiple(0), lambda folder: batch().padded_to_multiple(1)),
    ("values", lambda folder: batch().unpack(torch.zeros(3)), lambda folder: batch().unpack(torch.zeros(5))),
    (
        "parents",
        lambda folder: Segments.from_lengths([2, 1], parents=np.array([0, 0])),
        lambda folder: Segments.from_lengths([2, 1], parents=np.array([-1, 0])),
    ),
    (
        "parents",
        lambda folder: Segments.from_lengths([2, 1], parents=np.array([-1])),
        lambda folder: Segments.from_lengths([2, 1], parents=np.array([-1, 0])),
    ),
    (
        "reward",
        lambda folder: with_advantages([sample(group=0), sample(group=0)], "grpo"),
        lambda folder: with_advantages([sample(group=0, reward=1.0), sample(group=0, reward=0.0)], "grpo"),
    ),
    (
        "group",
        lambda folder: with_advantages([sample(reward=1.0), sample(reward=0.0)], "rloo"),
        lambda folder: with_advantages([sample(group=0, reward=1.0), sample(group=0, reward=0.0)], "rloo"),
    ),
    (
        "advantages",
        lambda folder: with_advantages([sample()], "given"),
        lambda folder: with_advantages([sample(advantages=[0, 1, 1, 1])], "given"),
    ),
    (
        "logprobs",
        lambda folder: padfree.collate([sample(logprobs=[0, 0, 0, 0]), sample()]),
        lambda folder: padfree.collate([sample(logprobs=[0, 0, 0, 0]), sample(logprobs=[0, 0, 0, 0])]),
    ),
]
CASES["packing"] = [
    ("capacity", lambda folder: fill([1, 1], 0), lambda folder: fill([1, 1], 1)),
    ("lengths", lambda folder: fill([1, 9], 8), lambda folder: fill([1, 9], 9)),
    ("lengths", lambda folder: fill([1.5], 8), lambda folder: fill([1], 8)),
    ("lengths", lambda folder: fill([-1], 8), lambda folder: fill([0], 8)),
    ("k", lambda folder: balance([1, 2], 0), lambda folder: balance([1, 2], 1)),
    ("k", lambda folder: balance([1, 2], 3, equal_count=True), lambda folder: balance([1, 2], 2, equal_count=True)),
    ("costs", lambda folder: balance([1, float("inf")], 1), lambda folder: balance([1, 2], 1)),
    ("costs", lambda folder: balance([["a"]], 1), lambda folder: balance([1], 1)),
    (
        "lengths",
        lambda folder: balance([1, 2], 1, lengths=[1], cap=4),
        lambda folder: balance([1, 2], 1, lengths=[1, 2], cap=4),
    ),
    (
        "cap",
        lambda folder: balance([1, 2], 1, lengths=[5, 1], cap=4),
        lambda folder: balance([1, 2], 1, lengths=[5, 1], cap=6),
    ),
    (
        "cap",
        lambda folder: balance([1, 2], 1, lengths=[3, 3], cap=4),
        lambda folder: balance([1, 2], 1, lengths=[3, 3], cap=6),
    ),
    ("samples", lambda folder: padfree.collate([]), lambda folder: padfree.collate([sample()])),
    (
        "share_prefixes",
        lambda folder: padfree.collate([sample()], share_prefixes="always"),  # type: ignore[arg-type]
        lambda folder: padfree.collate([sample()], share_prefixes="auto"),
    ),
    ("multiple_of", lambda folder: pack([sample()], multiple_of=0), lambda folder: pack([sample()], multiple_of=1)),
    ("num_packs", lambda folder: pack([sample()], num_packs=0), lambda folder: pack([sample()], num_packs=1)),
    ("num_packs", lambda folder: pack([sample()], num_packs=2), lambda folder: pack([sample()], num_packs=1)),
    (
        "max_tokens",
        lambda folder: pack([sample()], max_tokens=6, multiple_of=4),
        lambda folder: pack([sample()], max_tokens=8, multiple_of=4),
    ),
    ("max_tokens", lambda folder: pack([sample(9)], max_tokens=8), lambda folder: pack([sample(9)], max_tokens=9)),
    ("uid", lambda folder: pack([sample(uid=1), sample(uid=1)]), lambda folder: pack([sample(uid=0), sample(uid=1)])),
    ("weights", lambda folder: pack([sample()], weights=[]), lambda folder: pack([sample()], weights=[np.ones(4)])),
    (
        "weights of sample",
        lambda folder: pack([sample()], weights=[np.ones(2)]),
        lambda folder: pack([sample()], weights=[np.ones(4)]),
    ),
    (
        "weights of sample",
        lambda folder: pack([sample()], weights=[np.full(4, np.nan)]),
        lambda folder: pack([sample()], weights=[np.full(4, 1.0)]),
    ),
    ("values", lambda folder: unpack([batch()], []), lambda folder: unpack([batch()], [torch.zeros(5)])),
    (
        "ranks",
        lambda folder: plan_step([1], ranks=0, max_tokens=8),
        lambda folder: plan_step([1], ranks=1, max_tokens=8),
    ),
    (
        "lengths",
        lambda folder: plan_step([], ranks=1, max_tokens=8),
        lambda folder: plan_step([1], ranks=1, max_tokens=8),
    ),
    (
        "max_tokens",
        lambda folder: plan_step([9], ranks=1, max_tokens=8),
        lambda folder: plan_step([9], ranks=1, max_tokens=8, overlong="alone"),
    ),
    (
        "overlong",
        lambda folder: plan_step([9], ranks=1, max_tokens=8, overlong="cut"),
        lambda folder: plan_step([9], ranks=1, max_tokens=8, overlong="truncate"),
    ),
    ("linear", lambda folder: CostModel(linear=-1), lambda folder: CostModel(linear=1)),
    ("seconds", lambda folder: CostModel.fit([10, 20], [1.0]), lambda folder: CostModel.fit([10, 20], [1.0, 2.0])),
    ("seconds", lambda folder: CostModel.fit([10, 20], [1.0, 0.0]), lambda folder: CostModel.fit([10, 20], [1.0, 2.0])),
    ("config", lambda folder: CostModel.from_config({}), lambda folder: CostModel.from_config(build("qwen3").config)),
    (
        "budget",
        lambda folder: TokenBudgetBatcher([sample()], budget=0),
        lambda folder: TokenBudgetBatcher([sample()], budget=1),
    ),
    (
        "budget",
        lambda folder: next(iter(TokenBudgetBatcher([sample(9)], budget=8))),
        lambda folder: next(iter(TokenBudgetBatcher([sample(9)], budget=8, overlong="alone"))),
    ),
    (
        "source",
        lambda folder: FixedSizeBatcher(iter([sample()]), batch_size=2, shuffle=True),
        lambda folder: FixedSizeBatcher([sample()], batch_size=2, shuffle=True),
    ),
    (
        "epochs",
        lambda folder: FixedSizeBatcher([sample()], batch_size=2, epochs=0),
        lambda folder: FixedSizeBatcher([sample()], batch_size=2, epochs=1),
    ),
    (
        "max_length",
        lambda folder: next(iter(FixedSizeBatcher([sample(9)], batch_size=1, max_length=8))),
        lambda folder: next(iter(FixedSizeBatcher([sample(9)], batch_size=1, max_length=8, overlong="truncate"))),
    ),
    (
        "length",
        lambda folder: next(iter(FixedSizeBatcher([{"ids": [1]}], batch_size=1))),
        lambda folder: next(iter(FixedSizeBatcher([{"ids": [1]}], batch_size=1, length=lambda row: len(row["ids"])))),
    ),
    (
        "state",
        lambda folder: FixedSizeBatcher([sample()], batch_size=1).load_state_dict({}),
        lambda folder: FixedSizeBatcher([sample()], batch_size=1).state_dict(),
    ),
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


NUMBERS = count()
RETURNS_ONE = "def score(response, row):\n    return 1.0\n"


def reward_function(text: str, name: str = "score", call: Callable[[str], Any] = load_reward) -> Mistake:
    """A reward from a new module of the current folder with this text."""

    def provoke(folder: Path) -> Any:
        module = f"rewards_{next(NUMBERS)}"
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
        with contextlib.chdir(folder):
            return call(f"{module}:{name}")

    return provoke


OWN_LOSS = "def score(tokens):\n    return -tokens.advantages * tokens.logprobs\n"


def own_loss(text: str) -> Mistake:
    """The loss of a row by a user's function with this text."""

    def provoke(folder: Path) -> Any:
        inputs = {**SCORED, "logprobs": torch.zeros(4, requires_grad=True)}
        path: list[str] = []
        reward_function(text, call=path.append)(folder)
        with contextlib.chdir(folder):
            settings = losses.PolicySettings(objective=losses.CustomObjective(path=path[0]))
            return losses.policy_loss(loss_inputs(inputs), settings)

    return provoke


def rewarded(text: str) -> Mistake:
    """The reward of a response, by such a function."""
    return lambda folder: reward_function(text)(folder)("x", {"answer": "x"}, uid="a")


PAIR = {"prompt": "1+1=", "response": "2"}
ROLLOUT = {"tokens": [1, 2, 3, 4, 5], "response_length": 2, "reward": 1.0}
TURNS = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
TEMPLATE = (
    "{% for message in messages %}{% generation %}{{ message['content'] }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)
CASES["data"] = [
    (
        "data",
        lambda folder: load_sft([], tokenizer(folder)),
        lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder)),
    ),
    (
        "data",
        lambda folder: load_sft(folder / "nowhere.jsonl", tokenizer(folder)),
        lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder)),
    ),
    (
        "data",
        lambda folder: load_sft(written(folder, "a.csv", "x"), tokenizer(folder)),
        lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder)),
    ),
    (
        "data",
        lambda folder: load_sft(empty(folder), tokenizer(folder)),
        lambda folder: load_sft(written(empty(folder), "a.jsonl", PAIR).parent, tokenizer(folder)),
    ),
    (
        "data",
        lambda folder: load_sft([written(folder, "a.jsonl", PAIR)] * 2, tokenizer(folder)),
        lambda folder: load_sft([written(folder, "a.jsonl", PAIR)] * 1, tokenizer(folder)),
    ),
    ("data", sft(), sft(PAIR)),
    ("data", sft("not JSON", on_bad_row="skip"), sft("not JSON", PAIR, on_bad_row="skip")),
    ("a.jsonl line 1", sft("not JSON"), sft("not JSON", PAIR, on_bad_row="skip")),
    (
        "a.jsonl line 2",
        sft(PAIR, {"prompt": "1", "response": None}),
        sft(PAIR, {"prompt": "1", "response": None}, on_bad_row="skip"),
    ),
    (
        "data.columns",
        sft({"asked": "1", "told": "2"}),
        sft({"asked": "1", "told": "2"}, columns={"asked": "prompt", "told": "response"}),
    ),
    (
        "data.columns",
        sft({**PAIR, "label": False}),
        sft({**PAIR, "label": False}, columns={"label": "unused"}),
    ),
    ("data.system", sft(PAIR, system="Add."), sft(PAIR, system="Add.", prompt_format="chat", chat_template=TEMPLATE)),
    ("data.prompt_template", sft(PAIR, prompt_template="{promt}"), sft(PAIR, prompt_template="{prompt} ")),
    (
        "data.prompt_template",
        lambda folder: SFTDataSettings(prompt_template="Answer."),
        lambda folder: SFTDataSettings(prompt_template="{prompt} Answer."),
    ),
    ("data.columns", sft({**PAIR, "text": "1"}), sft({**PAIR, "text": "1"}, columns={"prompt": "prompt"})),
    ("data.columns", sft(PAIR, columns={"prompt": "promt"}), sft(PAIR, columns={"prompt": "prompt"})),
    ("data.columns", sft(PAIR, columns={"query": "prompt"}), sft(PAIR, columns={"prompt": "prompt"})),
    (
        "data.columns",
        sft(PAIR, columns={"prompt": "response", "response": "response"}),
        sft(PAIR, columns={"response": "response"}),
    ),
    (
        "data.prompt_format",
        sft({"messages": [{"role": "user", "content": "1"}]}, prompt_format="plain"),
        sft(TURNS, prompt_format="chat", chat_template=TEMPLATE),
    ),
    ("data.chat_template", sft(PAIR, prompt_format="chat"), sft(PAIR, prompt_format="plain")),
    ("data.max_length", sft(PAIR, max_length=3), sft(PAIR, max_length=5, overlong="truncate")),
    ("max_length", lambda folder: SFTDataSettings(max_length=1), lambda folder: SFTDataSettings(max_length=2)),
    ("overlong", lambda folder: SFTDataSettings(overlong="cut"), lambda folder: SFTDataSettings(overlong="drop")),
    (
        "num_workers",
        lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder), num_workers=-1),
        lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder), num_workers=0),
    ),
    ("cache", lambda folder: TokenizedDataset(folder), lambda folder: TokenizedDataset(sft(PAIR)(folder).folder)),
    (
        "cache",
        lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder), cache=written(folder, "f")),
        lambda folder: load_sft(written(folder, "a.jsonl", PAIR), tokenizer(folder), cache=folder / "f"),
    ),
    ("data", rollouts(), rollouts(ROLLOUT)),
    ("model.tokenizer", rollouts({**PAIR, "reward": 1.0}), rollouts(ROLLOUT)),
    ("data.max_length", rollouts(ROLLOUT, max_length=4), rollouts(ROLLOUT, max_length=4, overlong="truncate")),
    ("r.jsonl line 1", rollouts({**ROLLOUT, "reward": "good"}), rollouts({**ROLLOUT, "reward": 1})),
    ("r.jsonl line 1", rollouts({**ROLLOUT, "logprobs": [0.1]}), rollouts({**ROLLOUT, "logprobs": [-0.1, -0.2]})),
    ("reward", lambda folder: load_reward("best"), lambda folder: load_reward("exact_match")),
    ("reward", lambda folder: load_reward("no_such_module:reward"), reward_function(RETURNS_ONE)),
    ("reward", lambda folder: load_reward("math:gcd"), reward_function(RETURNS_ONE)),
    (
        "reward",
        reward_function("score = 3.14\n\n\n" + RETURNS_ONE.replace("score", "other")),
        reward_function("score = 3.14\n\n\n" + RETURNS_ONE.replace("score", "other"), name="other"),
    ),
    (
        "reward",
        rewarded(RETURNS_ONE.replace("1.0", "row['target']")),
        rewarded(RETURNS_ONE.replace("1.0", "row['answer'] == 'x'")),
    ),
    ("reward", rewarded(RETURNS_ONE.replace("1.0", "'good'")), rewarded(RETURNS_ONE)),
    (
        "answer",
        lambda folder: number_after_hashes("#### 1", {"answer": "none"}),
        lambda folder: number_after_hashes("#### 1", {"answer": "1"}),
    ),
    ("answer", lambda folder: exact_match("1", {"answer": [1]}), lambda folder: exact_match("1", {"answer": 1})),
]


def heads(count: int = 2, tokens: int = 5, size: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(tokens, count, size, dtype=dtype)


FIVE, THREE = Segments.from_lengths([3, 2]), Segments.from_lengths([3])
CASES["attention"] = [
    (
        "q, k, v",
        lambda folder: varlen_attention(heads()[None], heads(), heads(), FIVE, FIVE),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE),
    ),
    (
        "q, k",
        lambda folder: varlen_attention(heads(3), heads(2), heads(2), FIVE, FIVE),
        lambda folder: varlen_attention(heads(4), heads(2), heads(2), FIVE, FIVE),
    ),
    (
        "q, k, v",
        lambda folder: varlen_attention(heads(), heads(dtype=torch.float64), heads(), FIVE, FIVE),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE),
    ),
    (
        "segments_q, segments_k",
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, THREE),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE),
    ),
    (
        "segments_q",
        lambda folder: varlen_attention(heads(tokens=4), heads(), heads(), FIVE, FIVE),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE),
    ),
    (
        "sinks",
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, sinks=torch.zeros(3)),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, sinks=torch.zeros(2)),
    ),
    (
        "window",
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, window=0),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, window=1),
    ),
    (
        "window",
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, window=2, causal=False),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, window=2, causal=True),
    ),
    (
        "softcap",
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, softcap=-1.0),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, softcap=1.0),
    ),
    (
        "backend",
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, backend="fastest"),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, backend="auto"),
    ),
    (
        "backend",
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, backend="torch"),
        lambda folder: varlen_attention(heads(), heads(), heads(), FIVE, FIVE, backend="cpu"),
    ),
]


def context(**values: Any) -> Any:
    return shard(batch(), **values).context


def joined(folder: Path) -> None:
    with distributed(device="cpu", timeout=60):
        pass


CASES["cp"] = [
    ("kind", lambda folder: make_layout(FIVE, 1, "zigzag"), lambda folder: make_layout(FIVE, 1, "balanced")),
    ("world", lambda folder: make_layout(FIVE, 0), lambda folder: make_layout(FIVE, 1)),
    ("segments", lambda folder: make_layout(FIVE, 2), lambda folder: make_layout(Segments.from_lengths([4, 2]), 2)),
    ("method", lambda folder: shard(batch(), method="rings"), lambda folder: shard(batch(), method="ring")),
    ("rank", lambda folder: shard(batch(), world=2, rank=2), lambda folder: shard(batch(2, 2), world=2, rank=1)),
    (
        "segments",
        lambda folder: shard(batch(3, 2), world=2, rank=0),
        lambda folder: shard(batch(3, 2).padded_to_multiple(2), world=2, rank=0),
    ),
    (
        "q",
        lambda folder: attend(heads(tokens=4), heads(), heads(), context()),
        lambda folder: attend(heads(), heads(), heads(), context()),
    ),
    (
        "window",
        lambda folder: attend(heads(), heads(), heads(), context(), window=0),
        lambda folder: attend(heads(), heads(), heads(), context(), window=1),
    ),
    (
        "values",
        lambda folder: gather_tokens(torch.zeros(4), context()),
        lambda folder: gather_tokens(torch.zeros(5), context()),
    ),
    (
        "group",
        lambda folder: gather_tokens(torch.zeros(2), shard(batch(2, 2), world=2, rank=0).context),
        lambda folder: gather_tokens(torch.zeros(4), shard(batch(2, 2)).context),
    ),
    ("device", lambda folder: distributed(device="tpu").__enter__(), joined),
    ("timeout", lambda folder: distributed(device="cpu", timeout=0).__enter__(), joined),
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


def broken_model(change: Callable[[Path], None], **settings: Any) -> Mistake:
    def provoke(folder: Path) -> Any:
        path = save_with_tokenizer(folder / "broken")
        change(path)
        return load_model(path, dtype=torch.float32, device=torch.device("cpu"), **settings)

    return provoke


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def renamed_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


CASES["model"] = [
    ("model", lambda folder: attach(torch.nn.Linear(2, 2)), lambda folder: attach(build("qwen3"))),
    (
        "backend",
        lambda folder: attach(build("qwen3"), backend="fastest"),
        lambda folder: attach(build("qwen3"), backend="auto"),
    ),
    ("attn_context", forward(attn_context=...), forward()),
    ("position_ids", forward(position_ids=None), forward()),
    ("attention_mask", forward(attention_mask=torch.ones(1, 5)), forward()),
    ("use_cache", forward(use_cache=True), forward(use_cache=False)),
    ("output_attentions", forward(output_attentions=True), forward(output_attentions=False)),
    (
        "attn_context",
        forward(input_ids=torch.zeros(1, 6, dtype=torch.int64), position_ids=torch.arange(6)[None]),
        forward(),
    ),
    (
        "input_ids",
        forward(input_ids=torch.zeros(2, 5, dtype=torch.int64), position_ids=torch.zeros(2, 5).long()),
        forward(),
    ),
    ("Qwen3ForCausalLM", lambda folder: attached()(torch.zeros(1, 5).long(), None, attn_context=context()), forward()),
    ("model", broken_model(lambda path: (path / "config.json").unlink()), broken_model(lambda path: None)),
    ("model", broken_model(lambda path: (path / "config.json").write_text("{")), broken_model(lambda path: None)),
    ("model", broken_model(with_config(hidden_size=64)), broken_model(with_config(hidden_size=32))),
    (
        "model",
        broken_model(with_config(tie_word_embeddings=False)),
        broken_model(with_config(tie_word_embeddings=True)),
    ),
    ("model", broken_model(with_config(quantization_config={"quant_method": "fp8"})), broken_model(with_config())),
    ("model", broken_model(with_config(model_type="bert")), broken_model(with_config(model_type="qwen3"))),
    (
        "model",
        broken_model(lambda path: (path / "model.safetensors").write_bytes(b"x")),
        broken_model(lambda path: None),
    ),
    ("model", broken_model(renamed_weights), broken_model(lambda path: None)),
    (
        "model",
        lambda folder: load_model(folder / "nowhere", dtype=torch.float32, device=torch.device("cpu")),
        lambda folder: load_model(
            save_with_tokenizer(folder / "here"), dtype=torch.float32, device=torch.device("cpu")
        ),
    ),
]
HIDDEN, WEIGHT, LABELS = torch.randn(5, 8), torch.randn(7, 8), torch.tensor([1, 2, -100, 6, 0])
TRAINED = HIDDEN.clone().requires_grad_()


def decoded(cache_bytes: int | None) -> Any:
    policy = PolicyModel(model := build("qwen3"), torch.float32, torch.device("cpu"))
    policy.update(model)
    decoder = Decoder(CachedModel(policy.model), num_slots=1, temperature=1.0, stops=[0], cache_bytes=cache_bytes)
    return decoder.sample([SamplingRequest(tokens=np.arange(3), max_new_tokens=4, key=1)])


CASES["rollout"] = [
    ("rollout.kv_cache_memory", lambda folder: decoded(1000), lambda folder: decoded(None)),
]

CASES["head"] = [
    (
        "hidden",
        lambda folder: score(HIDDEN.half(), WEIGHT.half(), LABELS),
        lambda folder: score(HIDDEN.bfloat16(), WEIGHT.bfloat16(), LABELS),
    ),
    (
        "hidden, weight",
        lambda folder: score(HIDDEN[:, :4], WEIGHT, LABELS),
        lambda folder: score(HIDDEN, WEIGHT, LABELS),
    ),
    ("weight", lambda folder: score(HIDDEN, WEIGHT.double(), LABELS), lambda folder: score(HIDDEN, WEIGHT, LABELS)),
    ("labels", lambda folder: score(HIDDEN, WEIGHT, LABELS[:3]), lambda folder: score(HIDDEN, WEIGHT, LABELS)),
    ("labels", lambda folder: score(HIDDEN, WEIGHT, LABELS.float()), lambda folder: score(HIDDEN, WEIGHT, LABELS)),
    ("labels", lambda folder: score(HIDDEN, WEIGHT, LABELS + 1), lambda folder: score(HIDDEN, WEIGHT, LABELS)),
    (
        "bias",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, bias=torch.zeros(3)),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, bias=torch.zeros(7)),
    ),
    (
        "softcap",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, softcap=0.0),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, softcap=1.0),
    ),
    (
        "temperature",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=0.0),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=1.0),
    ),
    (
        "temperature",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=torch.ones(3)),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=torch.ones(5)),
    ),
    (
        "temperature",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=torch.zeros(5)),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, temperature=torch.ones(5)),
    ),
    (
        "num_labels",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, num_labels=9),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, num_labels=4),
    ),
    (
        "memory",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, memory="small"),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, memory="low"),
    ),
    (
        "memory",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, memory=0),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, memory=1 << 20),
    ),
    (
        "backend",
        lambda folder: score(HIDDEN, WEIGHT, LABELS, backend="fast"),
        lambda folder: score(HIDDEN, WEIGHT, LABELS, backend="auto"),
    ),
    (
        "backend",
        lambda folder: score(HIDDEN.double(), WEIGHT.double(), LABELS, backend="triton"),
        lambda folder: score(HIDDEN.double(), WEIGHT.double(), LABELS, backend="auto"),
    ),
    (
        "token_loss",
        lambda folder: fused_loss(HIDDEN, WEIGHT, LABELS, lambda logprobs, *_: logprobs[:1]),
        lambda folder: fused_loss(HIDDEN, WEIGHT, LABELS, lambda logprobs, *_: logprobs),
    ),
    (
        "token_loss",
        lambda folder: fused_loss(HIDDEN, WEIGHT, LABELS, lambda logprobs, *_: (logprobs, {})),
        lambda folder: fused_loss(HIDDEN, WEIGHT, LABELS, lambda logprobs, *_: logprobs),
    ),
    (
        "softcap",
        lambda folder: score(HIDDEN, LmHead(weight=WEIGHT), LABELS, softcap=1.0),
        lambda folder: score(HIDDEN, LmHead(weight=WEIGHT), LABELS),
    ),
    (
        "token_loss",
        lambda folder: fused_loss(TRAINED, WEIGHT, LABELS, lambda logprobs, *_: logprobs.detach()),
        lambda folder: fused_loss(TRAINED, WEIGHT, LABELS, lambda logprobs, *_: logprobs),
    ),
]
MASKS = [np.array([False, True, True]), np.array([False, True])]


def loss_inputs(inputs: dict[str, Any]) -> losses.LossInputs:
    """Of one sample of four tokens."""
    return losses.LossInputs(
        mask=torch.ones(4, dtype=torch.bool),
        weights=torch.ones(4),
        sample_index=torch.zeros(4, dtype=torch.int32),
        num_samples=1,
        **inputs,
    )


def policy(inputs: dict[str, Any], **settings: Any) -> Mistake:
    return lambda folder: losses.policy_loss(loss_inputs(inputs), losses.PolicySettings(**settings))


FOUR = torch.zeros(4)
SCORED = {"logprobs": FOUR, "advantages": FOUR, "old_logprobs": FOUR}
CASES["losses"] = [
    (
        "weights",
        lambda folder: losses.token_weights("mean", MASKS),
        lambda folder: losses.token_weights("token-mean", MASKS),
    ),
    (
        "constant",
        lambda folder: losses.token_weights("constant", MASKS),
        lambda folder: losses.token_weights("constant", MASKS, constant=3),
    ),
    (
        "constant",
        lambda folder: losses.token_weights("token-mean", MASKS, constant=3),
        lambda folder: losses.token_weights("token-mean", MASKS),
    ),
    (
        "groups",
        lambda folder: losses.token_weights("group-mean", MASKS),
        lambda folder: losses.token_weights("group-mean", MASKS, groups=["a", "a"]),
    ),
    (
        "groups",
        lambda folder: losses.token_weights("group-mean", MASKS, groups=["a", None]),
        lambda folder: losses.token_weights("group-mean", MASKS, groups=["a", "b"]),
    ),
    ("loss.clip.low", lambda folder: losses.ClipSettings(low=2), lambda folder: losses.ClipSettings(low=1)),
    ("loss.clip.dual", lambda folder: losses.ClipSettings(dual=1), lambda folder: losses.ClipSettings(dual=2)),
    ("loss.gspo.high", lambda folder: losses.GSPOSettings(high=-1), lambda folder: losses.GSPOSettings(high=0)),
    ("loss.cispo.low", lambda folder: losses.CISPOSettings(low=3), lambda folder: losses.CISPOSettings(low=None)),
    (
        "loss.token_tis",
        lambda folder: losses.TokenTISSettings(low=2, high=3),
        lambda folder: losses.TokenTISSettings(low=1, high=3),
    ),
    (
        "loss.sequence_mask.statistic",
        lambda folder: losses.SequenceMaskSettings(statistic="max"),
        lambda folder: losses.SequenceMaskSettings(statistic="mean"),
    ),
    ("loss.opsm.delta", lambda folder: losses.OPSMSettings(delta=-1), lambda folder: losses.OPSMSettings(delta=0)),
    (
        "loss.old_policy",
        lambda folder: losses.PolicySettings(old_policy="other"),
        lambda folder: losses.PolicySettings(old_policy="trainer"),
    ),
    (
        "loss.kl_estimator",
        lambda folder: losses.PolicySettings(kl_estimator="k4"),
        lambda folder: losses.PolicySettings(kl_estimator="k3"),
    ),
    (
        "loss.kl_coefficient",
        lambda folder: losses.PolicySettings(kl_coefficient=-1),
        lambda folder: losses.PolicySettings(kl_coefficient=0),
    ),
    (
        "loss.entropy_coefficient",
        lambda folder: losses.PolicySettings(entropy_coefficient=float("nan")),
        lambda folder: losses.PolicySettings(entropy_coefficient=0.1),
    ),
    (
        "loss.corrections",
        lambda folder: losses.PolicySettings(corrections=(losses.OPSMSettings(),) * 2),
        lambda folder: losses.PolicySettings(corrections=(losses.OPSMSettings(),) * 1),
    ),
    (
        "loss.corrections",
        lambda folder: losses.PolicySettings(corrections=(losses.TokenTISSettings(),), old_policy="sampler"),
        lambda folder: losses.PolicySettings(corrections=(losses.TokenTISSettings(),), old_policy="trainer"),
    ),
    (
        "loss.corrections",
        lambda folder: losses.PolicySettings(corrections=(losses.OPSMSettings(),), old_policy="current"),
        lambda folder: losses.PolicySettings(corrections=(losses.OPSMSettings(),), old_policy="sampler"),
    ),
    ("loss.kind", own_loss("score = 3\n"), own_loss(OWN_LOSS)),
    ("loss.kind", own_loss("import no_such_module\n"), own_loss(OWN_LOSS)),
    ("loss.kind", own_loss("def score():\n    return 1\n"), own_loss(OWN_LOSS)),
    ("loss.kind", own_loss("def score(tokens):\n    return 1 / 0\n"), own_loss(OWN_LOSS)),
    ("loss.kind", own_loss("def score(tokens):\n    return 1.0\n"), own_loss(OWN_LOSS)),
    ("loss.kind", own_loss("def score(tokens):\n    return tokens.logprobs[1:]\n"), own_loss(OWN_LOSS)),
    ("loss.kind", own_loss("def score(tokens):\n    return tokens.logprobs.double()\n"), own_loss(OWN_LOSS)),
    ("loss.kind", own_loss("def score(tokens):\n    return tokens.advantages\n"), own_loss(OWN_LOSS)),
    ("loss.kind", lambda folder: losses.load_objective("no_such_module:loss"), own_loss(OWN_LOSS)),
    ("loss.kind", lambda folder: losses.load_objective("os:system"), own_loss(OWN_LOSS)),
    ("value clip", lambda folder: losses.ValueSettings(clip=-1), lambda folder: losses.ValueSettings(clip=None)),
    ("loss.dpo.beta", lambda folder: losses.DPOSettings(beta=0), lambda folder: losses.DPOSettings(beta=1)),
    (
        "loss.dpo.label_smoothing",
        lambda folder: losses.DPOSettings(label_smoothing=0.5),
        lambda folder: losses.DPOSettings(label_smoothing=0.4),
    ),
    (
        "loss.reward.margin",
        lambda folder: losses.RewardModelSettings(margin=-1),
        lambda folder: losses.RewardModelSettings(margin=0),
    ),
    ("logprobs", policy({}), policy(SCORED)),
    ("old_logprobs", policy({"logprobs": FOUR, "advantages": FOUR}), policy(SCORED)),
    ("advantages", policy({"logprobs": FOUR, "old_logprobs": FOUR}), policy(SCORED)),
    ("advantages", policy({**SCORED, "advantages": torch.zeros(3)}), policy({**SCORED, "advantages": torch.zeros(4)})),
    ("ref_logprobs", policy(SCORED, kl_coefficient=0.1), policy({**SCORED, "ref_logprobs": FOUR}, kl_coefficient=0.1)),
    ("entropy", policy(SCORED, entropy_coefficient=0.1), policy({**SCORED, "entropy": FOUR}, entropy_coefficient=0.1)),
    (
        "rollout_logprobs",
        policy(SCORED, corrections=(losses.TokenTISSettings(),)),
        policy({**SCORED, "rollout_logprobs": FOUR}, corrections=(losses.TokenTISSettings(),)),
    ),
    (
        "kl_estimator",
        lambda folder: losses.kl_divergence(FOUR, FOUR, "k4"),
        lambda folder: losses.kl_divergence(FOUR, FOUR, "k3"),
    ),
    (
        "labels",
        lambda folder: losses.score_logits(torch.zeros(4, 7), LABELS),
        lambda folder: losses.score_logits(torch.zeros(2, 7), LABELS[:2]),
    ),
    (
        "group",
        lambda folder: losses.preference_pairs(batch().samples),
        lambda folder: losses.preference_pairs(
            padfree.collate([sample(group=0, reward=1.0), sample(group=0, reward=0.0)]).samples
        ),
    ),
    (
        "steps",
        lambda folder: learning_rate_factor(3, kind="cosine", warmup=0, steps=None, final=0.0),
        lambda folder: learning_rate_factor(3, kind="cosine", warmup=0, steps=4, final=0.0),
    ),
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
    ("features", lambda folder: collator()([]), lambda folder: collator()([{"input_ids": [1, 2]}])),
    (
        "features",
        lambda folder: collator()([{"text": "x"}]),
        lambda folder: collator()([{"input_ids": [1, 2]}]),
    ),
    (
        "attention_mask",
        lambda folder: collator()([{"input_ids": [1, 2], "attention_mask": [1, 0]}]),
        lambda folder: collator()([{"input_ids": [1, 2], "attention_mask": [1, 1]}]),
    ),
    (
        "labels",
        lambda folder: collator()([{"input_ids": [1, 2], "labels": [2, -100]}]),
        lambda folder: collator()([{"input_ids": [1, 2], "labels": [1, 2]}]),
    ),
    (
        "loss_mask",
        lambda folder: collator()([{"input_ids": [1, 2], "loss_mask": [1]}]),
        lambda folder: collator()([{"input_ids": [1, 2], "loss_mask": [0, 1]}]),
    ),
    (
        "seq_lengths",
        lambda folder: collator()([{"input_ids": [1, 2], "seq_lengths": [1]}]),
        lambda folder: collator()([{"input_ids": [1, 2], "seq_lengths": [2]}]),
    ),
    (
        "length",
        lambda folder: collator(length=1)([{"input_ids": [1, 2]}]),
        lambda folder: collator(length=2)([{"input_ids": [1, 2]}]),
    ),
    (
        "length",
        lambda folder: collator(length=3, multiple_of=2)([{"input_ids": [1, 2]}]),
        lambda folder: collator(length=4, multiple_of=2)([{"input_ids": [1, 2]}]),
    ),
    ("num_packs", packs(num_packs=0), packs(num_packs=1)),
    ("loss_masks", packs(loss_masks=[[1, 1]]), packs(loss_masks=[[1, 1], [1]])),
    ("response_lengths", packs(response_lengths=[9, 1]), packs(response_lengths=[2, 1])),
    ("max_tokens_per_gpu", packs(max_tokens_per_gpu=2), packs(max_tokens_per_gpu=8)),
    (
        "k_partitions",
        lambda folder: slime.get_seqlen_balanced_partitions([1, 2], 3, equal_size=False),
        lambda folder: slime.get_seqlen_balanced_partitions([1, 2], 2, equal_size=False),
    ),
    (
        "k_partitions",
        lambda folder: slime.get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True),
        lambda folder: slime.get_seqlen_balanced_partitions([1, 2, 3], 3, equal_size=True),
    ),
]


def _placed(word: str, folder: Path) -> str:
    """FOLDER is the case's own, MODEL-qwen3 and its like are small models."""
    return re.sub(r"MODEL-(\w+)", lambda match: model_folder(match[1]), word).replace("FOLDER", str(folder))


def command(*arguments: str, files: Callable[[Path], Any] = lambda folder: None) -> CommandLine:
    """What `padfree` prints for it, as the message of an error; `files` are written to the folder first."""

    def provoke(folder: Path, words: tuple[str, ...]) -> None:
        files(folder)
        placed = [_placed(word, folder) for word in words]
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            code = main(placed)
        if code == 0:
            return
        text = printed.getvalue()
        assert text.endswith("\n")
        raise UserError.of(text.removesuffix("\n").removeprefix(f"padfree {arguments[0]}: "))

    return CommandLine(arguments, provoke)


@cache
def model_folder(kind: str) -> str:
    """A small model that lasts as long as the tests; all have a tokenizer of 45 letters."""
    place = Path(mkdtemp(prefix=f"padfree-{kind}-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    if kind == "vision":
        return str(vision_folder(place / "model", "qwen3_vl"))
    folder = save_with_tokenizer(place / "model")
    if kind != "qwen3":
        (folder / "model.safetensors").unlink()
        name, changes = {
            "gpt2": ("gpt2", {"n_positions": 16, "max_position_embeddings": 16}),
            "jamba": ("jamba", {}),
            "small": ("qwen3", {"vocab_size": 10}),
        }[kind]
        build(name, hidden_size=32, **changes).save_pretrained(folder)
    return str(folder)


LENGTHS = "3 5 2"
SFT = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(4)]
TASKS = [{"prompt": f"{number}+1=", "answer": f"#### {number + 1}"} for number in range(4)]
GROUPED = [{**ROLLOUT, "reward": float(index % 2), "group": index // 4} for index in range(8)]
ENDLESS = ("data.epochs=none", "run.steps=1")
SMALL = {"sft": ("batch.samples=2",), "rl": ("batch.samples=8",), "rl-local": ("batch.samples=8", "data.columns={}")}


def dry_run(recipe: str, rows: list[Any], *changes: str, model: str = "qwen3") -> CommandLine:
    """A recipe on rows of a file of its own, up to its first step."""

    def provoke(folder: Path, words: tuple[str, ...]) -> Any:
        settings = [f"model.path={model_folder(model)}", "model.dtype=float32", "run.device=cpu", *SMALL[recipe]]
        path = written(folder, "d.jsonl", *rows)
        start = [recipe.partition("-")[0], str(RECIPES / f"{recipe}.toml"), *settings]
        start += [f"data.path={path}", f"run.folder={folder / 'run'}", "rollout.max_new_tokens=4"]
        return command(*start, *words, "--dry-run")(folder)

    return CommandLine(changes, provoke)


def plan(*words: str) -> CommandLine:
    return command("plan", *words, files=lambda folder: written(folder, "lengths.txt", LENGTHS))


def scaling(*words: str) -> CommandLine:
    model = ("--model", "MODEL-qwen3", "--gpu", "H100", "--ranks", "16")
    return plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "64", *model, *words)


def check(*words: str, files: Callable[[Path], Any] = lambda folder: None) -> CommandLine:
    return command("check", "--model", "MODEL-qwen3", "--samples", "2", "--device", "cpu", *words, files=files)


def check_vision(*words: str) -> CommandLine:
    """Rows without an image."""
    files = lambda folder: written(folder, "d.jsonl", *SFT)  # noqa: E731
    given = ("--model", "MODEL-vision", "--data", "FOLDER/d.jsonl", "model.vision=true")
    return check(*given, *words, files=files)


def report(*words: str) -> CommandLine:
    return command("report", *words, files=lambda folder: written(folder, "metrics.jsonl", {"step": 0, "loss": 1.0}))


def others_files(folder: Path) -> None:
    (folder / "mine").mkdir()
    written(folder / "mine", "a.txt", "x")


def begun(folder: Path, *, resume: bool = False) -> Demo:
    """A demo before its first stage; all that its command line can get wrong has been refused by then."""
    from rich.console import Console

    return Demo(folder, Console(file=io.StringIO()), SIZES, known=STAGES, resume=resume)


def begun_and_resumed(folder: Path) -> None:
    begun(folder / "none").keep("data", {"rows": 4})
    assert begun(folder / "none", resume=True).found == {"data": {"rows": 4}}


def begun_in_new_and_empty_folders(folder: Path) -> None:
    others_files(folder)
    for place in (folder / "new", empty(folder)):
        assert begun(place).found == {}
        assert (place / "demo.json").exists()


RL, LONG = str(RECIPES / "rl.toml"), {"prompt": "1+1=", "response": "2" * 30}
NOTHING_LEFT = "FOLDER/no/such/report.json"
CASES["cli"] = [
    ("config", command("sft", "FOLDER/nowhere.toml"), lambda folder: load_config(RECIPES / "sft.toml")),
    ("loss.kind", command("sft", RL), command("rl", RL, "model.path=FOLDER/none", "--dry-run")),
    (
        "loss.kind",
        command("rl", str(RECIPES / "sft.toml")),
        command("sft", str(RECIPES / "sft.toml"), "model.path=FOLDER/none", "--dry-run"),
    ),
    ("model.path", dry_run("sft", SFT, "model.path=FOLDER/nowhere"), "-model.path"),
    ("model.path", dry_run("sft", SFT, "model.path=no/where"), "-model.path"),
    ("model.tokenizer", dry_run("sft", SFT, "model.tokenizer=no/where"), "-model.tokenizer"),
    ("optimizer.lr", command("rl", RL, "optimizer.lr=none")),
    ("--resume", command("demo", "--folder", "FOLDER/none", "--resume"), begun_and_resumed),
    ("--folder", command("demo", "--folder", "FOLDER/mine", files=others_files), begun_in_new_and_empty_folders),
    ("--data", command("plan"), plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8")),
    ("--model", command("plan", "--data", "FOLDER/d.jsonl"), ("--model", "no/where")),
    ("--max-tokens", plan("--lengths", "FOLDER/lengths.txt"), ("--max-tokens", "8")),
    ("--ranks", plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--ranks", "0")),
    ("--cp", plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--cp", "3"), ("--ranks", "3")),
    (
        "parallel.context",
        plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "parallel.context=auto"),
        "parallel.context=1",
    ),
    ("--hosts", scaling("--hosts", "0")),
    ("--hosts", scaling("--hosts", "3"), ("--hosts", "2")),
    ("--link-inside", scaling("--hosts", "2", "--link-inside", "thread"), ("--link-inside", "nvlink4")),
    ("--link-between", scaling("--hosts", "2", "--link-between", "-1"), ("--link-between", "ndr")),
    ("--memory", plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--memory", "0")),
    (
        "--tokens",
        plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--tokens", "8", "--samples", "2"),
        one_by_one(
            plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--tokens", "8"),
            plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--samples", "2"),
        ),
    ),
    ("--lengths", plan("--lengths", "FOLDER/nowhere.npy", "--max-tokens", "8"), ("--lengths", "FOLDER/lengths.txt")),
    ("--exact-steps", plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--exact-steps", "0")),
    (
        "--html",
        plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--html", "FOLDER"),
        ("--html", "FOLDER/p.html"),
    ),
    (
        "--html",
        plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--html", "FOLDER/lengths.txt/p.html"),
        ("--html", "FOLDER/p.html"),
    ),
    ("--suggest", plan("--lengths", "FOLDER/lengths.txt", "--suggest"), ("--model", "MODEL-qwen3")),
    ("--samples", command("check", "--model", "m", "--samples", "1")),
    ("--max-length", command("check", "--model", "m", "--max-length", "1")),
    ("--dtype", command("check", "--model", "m", "--dtype", "int8"), ("--dtype", "bfloat16")),
    (
        "--layers",
        command("check", "--model", "m", "--layers", "2", "--full"),
        command("check", "--model", "m", "--full"),
    ),
    ("--layers", command("check", "--model", "m", "--layers", "0")),
    ("--layout", command("check", "--model", "m", "--layout", "dp=2,tp=2"), ("--layout", "dp=1,cp=1")),
    ("--layout", command("check", "--model", "m", "--layout", "dp=2,cp=2"), ("--layout", "dp=1,cp=1")),
    ("--json", command("check", "--model", "m", "--json", NOTHING_LEFT), ("--json", "FOLDER/report.json")),
    ("--json", command("check", "--model", "m", "--json", "FOLDER"), ("--json", "FOLDER/report.json")),
    ("--model", check("--model", "FOLDER/nowhere"), ("--model", "MODEL-qwen3")),
    ("--data", command("check", "--model", "m", "data.split=dev"), ("--data", "FOLDER/d.jsonl")),
    ("override", command("check", "--model", "m", "--data", "d.jsonl", "batch.samples=2"), "-batch.samples"),
    ("data.columns", command("check", "--model", "m", "--data", "d.jsonl", "data.columns=3"), "-data.columns"),
    ("samples", check_vision(), ("model.vision=false",)),
    ("--sampler", check_vision("--sampler"), check_vision()),
    ("--layers", check_vision("--layers", "1"), check_vision()),
    ("--tokenizer", check_vision("--tokenizer", "MODEL-qwen3"), check_vision()),
    ("--output", report("FOLDER", "--output", "report.pdf"), ("--output", "FOLDER/report.html")),
    ("--output", report("FOLDER", "--output", "FOLDER/metrics.jsonl/r.html"), ("--output", "FOLDER/report.html")),
    ("--names", report("FOLDER", "--names", "a,b"), ("--names", "a", "--output", "FOLDER/report.html")),
    ("RUN", report("FOLDER/nowhere"), report("FOLDER", "--output", "FOLDER/report.html")),
]


def launched(*options: str, words: tuple[str, ...] = ("sft", str(RECIPES / "sft.toml"))) -> CommandLine:
    """No host is reached: what is in the place of ssh ends at once, without an answer."""
    given = {
        "--hosts": "a,b",
        "--processes": "1",
        "--ssh": "true",
        **dict(zip(options[::2], options[1::2], strict=True)),
    }
    return command("launch", *(word for pair in given.items() for word in pair), "--", *words)


CASES["launch"] = [
    ("COMMAND", launched(words=()), launched()),
    ("COMMAND", launched(words=("plan", "recipes/sft.toml")), launched()),
    ("--hosts", launched("--hosts", "a,,b"), launched("--ssh", "FOLDER/none")),
    ("--hosts", launched("--hosts", "a,b,a"), launched("--ssh", "FOLDER/none")),
    ("--hosts", launched(), launched("--ssh", "FOLDER/none")),
    ("--processes", launched("--processes", "0"), launched()),
    ("--restarts", launched("--restarts", "-1"), launched("--restarts", "0")),
    ("--address", launched("--address", "a:b"), launched("--address", "a:29500")),
    ("--ssh", launched("--ssh", "FOLDER/none"), launched()),
]
RENAMED = {"input_ids": [1, 2, 3], "response_length": 1, "group": 0}
KL, REPORTED = ("loss.kl_coefficient=0.1",), [{**row, "logprobs": [-0.5, -0.5]} for row in GROUPED]
CASES["preflight"] = [
    ("batch.max_tokens", dry_run("sft", [*SFT, LONG], "batch.max_tokens=16")),
    ("batch.max_tokens", dry_run("sft", [*SFT, LONG], "batch.max_tokens=16", "data.epochs=none", "run.steps=1")),
    ("batch.tokens", dry_run("sft", [*SFT, LONG], "batch.samples=none", "batch.tokens=20")),
    ("batch.max_tokens", dry_run("rl", [*GROUPED, {**GROUPED[0], "tokens": [1] * 40}], "batch.max_tokens=16")),
    ("batch.max_tokens", dry_run("rl-local", TASKS, "batch.max_tokens=6")),
    ("data.max_length", dry_run("sft", [*SFT, LONG], "data.max_length=10")),
    ("data.max_length", dry_run("rl", GROUPED, "data.max_length=4")),
    ("data.max_length", dry_run("rl-local", TASKS, "data.max_length=6")),
    ("data.path", dry_run("sft", [*SFT, LONG], model="gpt2")),
    ("data.path", dry_run("rl-local", TASKS, "rollout.max_new_tokens=20", model="gpt2")),
    ("data.path", dry_run("sft", SFT, model="small"), "model.path=MODEL-qwen3"),
    ("data.path", dry_run("rl", [{**row, "tokens": [1, 2, 3, 4, 99]} for row in GROUPED]), dry_run("rl", GROUPED)),
    ("data.path", dry_run("rl", [{**GROUPED[0], "logprobs": [-1, -1]}, *GROUPED[1:]]), dry_run("rl", GROUPED)),
    ("loss.kl_coefficient", dry_run("rl", GROUPED, *KL)),
    ("reference.path", dry_run("rl-local", TASKS, *KL), "reference.path=MODEL-qwen3"),
    ("reference.path", dry_run("rl", GROUPED, *KL, "reference.path=no/where"), "-reference.path"),
    (
        "reference.refresh",
        dry_run("rl", GROUPED, *KL, "reference.path=MODEL-small", "reference.refresh=1"),
    ),
    ("loss.old_policy", dry_run("rl", GROUPED, "loss.old_policy=sampler")),
    ("loss.corrections", dry_run("rl", GROUPED, "loss.corrections=['token_tis']")),
    ("loss.advantage", dry_run("rl", GROUPED, "loss.advantage=given")),
    ("loss.advantage", dry_run("rl-local", TASKS, "loss.advantage=given"), "loss.advantage=rloo"),
    ("rollout.samples_per_prompt", dry_run("rl-local", TASKS, "rollout.samples_per_prompt=1")),
    ("loss.constant", dry_run("rl", GROUPED, "loss.aggregation=constant")),
    ("loss.constant", dry_run("rl", GROUPED, "loss.constant=3")),
    ("loss.low", dry_run("rl", GROUPED, "loss.low=5")),
    ("loss.clip.low", dry_run("rl", GROUPED, "loss.clip.low=5")),
    ("loss.gspo.high", dry_run("rl", GROUPED, "loss.gspo.high=-1")),
    ("loss.low", dry_run("rl", GROUPED, "loss.kind=reinforce", "loss.low=0.2")),
    ("loss.kind", dry_run("rl", GROUPED, "loss.kind=no_such_module:loss"), "loss.kind=clip"),
    ("loss.kind", dry_run("rl", GROUPED, "loss.kind=clop")),
    ("loss.corrections", dry_run("rl", REPORTED, "loss.corrections=['icepop']", "loss.old_policy=sampler")),
    ("data.loss_on", dry_run("rl", GROUPED, "data.loss_on=last")),
    ("data.loss_on", dry_run("sft", [{"text": "1+1=2"}] * 2, "data.loss_on=last")),
    ("loss.entropy_coefficient", dry_run("sft", SFT, "loss.entropy_coefficient=0.1")),
    ("loss.aggregation", dry_run("sft", SFT, "loss.aggregation=group-mean")),
    ("model.attention", dry_run("sft", SFT, "model.attention=fast"), "model.attention=auto"),
    ("model.attention", dry_run("sft", SFT, "model.attention=fa4"), "model.attention=cpu"),
    ("parallel.offload", dry_run("sft", SFT, "parallel.offload=true")),
    ("parallel.context", dry_run("sft", SFT, "parallel.context=2"), "parallel.context=1"),
    ("lora.targets", dry_run("sft", SFT, "lora.rank=2", "lora.targets=no_proj"), "lora.targets=q_proj"),
    (
        "lora.targets",
        dry_run("sft", SFT, "lora.rank=2", "lora.targets=['in_proj', 'dt_proj']", model="jamba"),
        "lora.targets=['in_proj']",
    ),
    ("run.folder", dry_run("sft", SFT, "run.folder=FOLDER/d.jsonl/run"), "run.folder=FOLDER/run"),
    ("batch.cost", dry_run("sft", SFT, "batch.cost=FOLDER/nowhere.json"), "batch.cost=none"),
    ("batch.samples", dry_run("rl", GROUPED, "batch.samples=2"), "batch.samples=4"),
    ("batch.samples", dry_run("sft", SFT, "batch.samples=4294967296000", *ENDLESS), "batch.samples=2"),
    ("batch.samples", dry_run("rl-local", TASKS, "batch.samples=4294967296000", *ENDLESS), "batch.samples=8"),
    (
        "batch.tokens",
        dry_run("sft", SFT, "batch.samples=none", "batch.tokens=4294967296000", *ENDLESS),
        "batch.tokens=99",
    ),
    ("data.columns", dry_run("sft", [{"asked": "1+1=", "told": "2"}] * 2)),
    ("data.columns", dry_run("sft", [{"problem": "1+1=", "solution": "2", "answer": "2"}] * 2)),
    ("data.columns", dry_run("sft", [{"instruction": "1", "input": "2", "output": "2", "text": "1"}] * 2)),
    ("data.columns", dry_run("sft", [{**PAIR, "label": False}] * 2)),
    ("data.columns", dry_run("sft", [{"question": "1", "context": "2", "answer": "2"}] * 2)),
    ("data.columns", dry_run("sft", SFT, "data.columns={prompt=prompt}")),
    ("data.columns", dry_run("sft", SFT, "data.columns=response=response")),
    ("data.columns", dry_run("sft", [{"my text": "it's", "b": "2"}] * 2)),
    ("data.columns", dry_run("sft", [{"document": "1+1=2"}] * 2)),
    ("data.columns", dry_run("sft", [{"x": "1+1=2"}] * 2)),
    ("data.columns", dry_run("sft", [{**PAIR, "text": "1"}] * 2)),
    ("data.columns", dry_run("rl", [{**RENAMED, "reward": float(number % 2)} for number in range(8)])),
    ("data.columns", dry_run("rl-local", [{"question": "1+1=", "query": "1", "answer": "2"}] * 2)),
    ("data.columns", dry_run("rl-local", [{"task": "1+1=", "answer": "2"}] * 2)),
    ("data.columns", dry_run("sft", SFT, "data.columns={prompt='promt'}"), "data.columns={prompt='prompt'}"),
    ("data.columns", dry_run("sft", SFT, "data.columns={query='prompt'}"), "data.columns={}"),
    ("data.columns", dry_run("sft", SFT, "data.columns={prompt='response',response='response'}"), "data.columns={}"),
    ("data.chat_template", dry_run("sft", SFT, "data.chat_template=FOLDER/none.jinja"), "data.chat_template=none"),
    ("data.chat_template", dry_run("sft", SFT, "data.prompt_format=chat")),
    ("data", dry_run("sft", SFT, "data.path=no/where"), "-data.path"),
    ("data", dry_run("sft", SFT, "data.path=FOLDER/nowhere.jsonl"), "-data.path"),
    ("d.jsonl line 5", dry_run("sft", [*SFT, "not JSON"])),
    ("d.jsonl line 5", dry_run("sft", [*SFT, {"prompt": "1"}])),
    ("d.jsonl line 9", dry_run("rl", [*GROUPED, {**ROLLOUT, "reward": None}])),
    ("d.jsonl line 5", dry_run("rl-local", [*TASKS, {"prompt": None}])),
    ("reward", dry_run("rl-local", TASKS, "rollout.reward=best"), "rollout.reward=exact_match"),
    ("rollout.environment", dry_run("rl-local", TASKS, "rollout.environment=os:system"), PLAYED),
    ("rollout.environment", dry_run("rl-local", TASKS, "rollout.environment=no_such_module:episode"), PLAYED),
    ("rollout.agent", dry_run("rl-local", TASKS, "rollout.agent=no-such-program"), "rollout.agent=cat"),
    ("reward", dry_run("rl-local", [*TASKS, {"prompt": "1", "answer": "x"}]), "rollout.reward=exact_match"),
]

# The library: inputs of a wrong type, and models that were not proven.

FOUR_REWARDS, FOUR_GROUPS, FOUR_BOOLS = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), FOUR == 0


def registered_attention() -> Any:
    """A model with an attention function of the user's own."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("my_attention", sdpa_attention_forward)
    AttentionMaskInterface.register("my_attention", sdpa_mask)
    model = build("qwen3")
    model.set_attn_implementation("my_attention")
    return model


def trained_padded(model: Callable[[], Any]) -> Mistake:
    """A step of transformers.Trainer on padded rows."""

    def provoke(folder: Path) -> None:
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

        letters = tokenizer(folder)
        letters.pad_token = letters.eos_token
        rows: Any = [{"input_ids": tokens, "labels": tokens} for tokens in ([5, 6, 7], [3, 4])]
        arguments = TrainingArguments(
            output_dir=str(folder / "out"), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        collator = DataCollatorForSeq2Seq(letters)
        with contextlib.redirect_stdout(io.StringIO()):
            Trainer(model=model(), args=arguments, train_dataset=rows, data_collator=collator).train()

    return provoke


def detached() -> Any:
    model = attach(build("qwen3"))
    model.set_attn_implementation("sdpa")
    return model


def after_another_attention(made_again: bool) -> Mistake:
    """A collator's model gets another attention function, and perhaps another collator."""

    def provoke(folder: Path) -> Any:
        model = build("qwen3")
        collator = PackedCollator(model)
        model.set_attn_implementation("eager")
        return (PackedCollator(model) if made_again else collator)([{"input_ids": [1, 2]}])

    return provoke


def unpacked(folder: Path) -> None:
    packed = pack([sample()])
    unpack(packed, [torch.zeros(row.input_ids.shape) for row in packed])


def grpo(rewards: Any = FOUR_REWARDS, groups: Any = FOUR_GROUPS, num_groups: Any = 2, **settings: Any) -> Mistake:
    return lambda folder: losses.grpo_advantages(rewards, groups, num_groups, **settings)


CASES["library"] = [
    ("rewards", grpo([1, 0, 0, 1]), grpo(torch.as_tensor([1, 0, 0, 1]))),
    (
        "rewards",
        lambda folder: losses.rloo_advantages(np.ones(4), FOUR_GROUPS, 2),
        lambda folder: losses.rloo_advantages(torch.as_tensor(np.ones(4)), FOUR_GROUPS, 2),
    ),
    ("rewards", grpo(FOUR_REWARDS * 1j), grpo((FOUR_REWARDS * 1j).real)),
    ("groups", grpo(groups=FOUR_GROUPS.bool()), grpo(groups=FOUR_GROUPS.bool().long())),
    ("groups", grpo(groups=FOUR_GROUPS.float()), grpo(groups=FOUR_GROUPS.float().long())),
    ("groups", grpo(num_groups=1), grpo(groups=FOUR_GROUPS * 0, num_groups=1)),
    ("groups", grpo(groups=FOUR_GROUPS[:3]), grpo(groups=FOUR_GROUPS)),
    ("num_groups", grpo(num_groups=2.0), grpo(num_groups=2)),
    ("eps", grpo(eps=-1), one_by_one(grpo(eps=0), grpo(eps=1e-6))),
    (
        "mask",
        lambda folder: losses.whiten(FOUR_REWARDS, FOUR_GROUPS),
        lambda folder: losses.whiten(FOUR_REWARDS, FOUR_GROUPS.bool()),
    ),
    (
        "values",
        lambda folder: losses.whiten(FOUR_REWARDS[:3], FOUR_BOOLS),
        lambda folder: losses.whiten(FOUR_REWARDS, FOUR_BOOLS),
    ),
    (
        "gamma",
        lambda folder: losses.discounted_returns(FOUR_REWARDS, FOUR_BOOLS, FOUR_GROUPS, gamma=float("nan")),
        lambda folder: losses.discounted_returns(FOUR_REWARDS, FOUR_BOOLS, FOUR_GROUPS, gamma=0.9),
    ),
    (
        "sample_index",
        lambda folder: losses.segment_sum(FOUR_REWARDS, FOUR_GROUPS, 0),
        lambda folder: losses.segment_sum(FOUR_REWARDS, FOUR_GROUPS * 0, 0),
    ),
    (
        "sample_index",
        lambda folder: losses.spread(FOUR_REWARDS, FOUR_GROUPS - 1),
        lambda folder: losses.spread(FOUR_REWARDS, torch.tensor([0, 1, 3, 4])),
    ),
    (
        "sample_index",
        lambda folder: losses.spread(FOUR_REWARDS, FOUR_REWARDS),
        lambda folder: losses.spread(FOUR_REWARDS, FOUR_REWARDS.long()),
    ),
    (
        "labels",
        lambda folder: losses.score_logits(torch.zeros(4, 7), torch.tensor([0, 1, 2, 7])),
        lambda folder: losses.score_logits(torch.zeros(4, 7), torch.tensor([0, 1, 2, 6])),
    ),
    (
        "labels",
        lambda folder: losses.score_logits(torch.zeros(4, 7), FOUR),
        lambda folder: losses.score_logits(torch.zeros(4, 7), FOUR.long()),
    ),
    (
        "logprobs",
        policy({**SCORED, "logprobs": [0.0] * 4}),
        policy({**SCORED, "logprobs": torch.as_tensor([0.0] * 4)}),
    ),
    (
        "masks",
        lambda folder: losses.token_weights("token-mean", [np.full(3, 0.5)]),
        one_by_one(
            lambda folder: losses.token_weights("token-mean", [np.full(3, True)]),
            lambda folder: losses.token_weights("token-mean", [np.array([0, 1, 1])]),
        ),
    ),
    (
        "counts",
        lambda folder: losses.weight_divisor("token-mean", np.array([1.5])),
        lambda folder: losses.weight_divisor("token-mean", np.array([1])),
    ),
    (
        "divisor",
        lambda folder: losses.batch_weights("token-mean", LABELS, LABELS * 0, 1, divisor=0),
        lambda folder: losses.batch_weights(
            "token-mean", LABELS, LABELS * 0, 1, divisor=losses.weight_divisor("token-mean", np.array([4]))
        ),
    ),
    (
        "objective",
        lambda folder: losses.PolicySettings(objective="clip"),
        one_by_one(
            lambda folder: losses.PolicySettings(objective=losses.ClipSettings()),
            lambda folder: losses.PolicySettings(objective=losses.GSPOSettings()),
        ),
    ),
    (
        "inputs, settings",
        lambda folder: losses.compute_loss(SCORED, losses.SFTSettings()),
        one_by_one(
            lambda folder: losses.compute_loss(loss_inputs(SCORED), losses.SFTSettings()),
            lambda folder: losses.compute_loss(loss_inputs(SCORED), losses.PolicySettings()),
        ),
    ),
    ("lengths", lambda folder: Segments.from_lengths([1.5, 2.5]), lambda folder: Segments.from_lengths([1, 2])),
    (
        "pad_length",
        lambda folder: Segments.from_lengths([3], pad_length=-1),
        lambda folder: Segments.from_lengths([3], pad_length=0),
    ),
    ("reward of sample", lambda folder: sample(reward="1"), lambda folder: sample(reward=1)),
    ("reward of sample 3", lambda folder: sample(reward=[1.0], uid=3), lambda folder: sample(reward=1.0, uid=3)),
    (
        "logprobs of sample",
        lambda folder: sample(logprobs=["0", "1", "2", "3"]),
        lambda folder: sample(logprobs=[0, -1, -2, -3]),
    ),
    ("samples", lambda folder: pack([[1, 2, 3]]), lambda folder: pack([padfree.Sample(tokens=[1, 2, 3])])),
    ("samples", lambda folder: pack(7), lambda folder: pack([sample(7)])),
    ("batches", lambda folder: unpack(7, [FOUR]), unpacked),
    (
        "batches",
        lambda folder: unpack([batch(), batch()], [torch.zeros(5)] * 2),
        lambda folder: [each.unpack(torch.zeros(5)) for each in (batch(), batch())],
    ),
    (
        "values",
        lambda folder: batch().unpack([1, 2, 3, 4, 5]),
        lambda folder: batch().unpack(torch.as_tensor([1, 2, 3, 4, 5])),
    ),
    ("capacity", lambda folder: fill([1, 1], float("nan")), lambda folder: fill([1, 1], 1)),
    (
        "epochs",
        lambda folder: TokenBudgetBatcher([sample()], budget=8, epochs=float("nan")),
        one_by_one(
            lambda folder: TokenBudgetBatcher([sample()], budget=8, epochs=1),
            lambda folder: TokenBudgetBatcher([sample()], budget=8, epochs=None),
        ),
    ),
    (
        "sinks",
        lambda folder: padfree.attention.apply_sinks(torch.zeros(2, 1, 4), torch.zeros(2, 1), LABELS[:1]),
        lambda folder: padfree.attention.apply_sinks(torch.zeros(2, 1, 4), torch.zeros(2, 1), LABELS[:1].float()),
    ),
    ("batch", lambda folder: shard([1, 2]), lambda folder: shard(pack([sample()])[0])),
    (
        "model",
        lambda folder: padfree.hidden_states(build("opt"), shard(batch())),
        lambda folder: padfree.hidden_states(padfree.attach(build("opt")), shard(batch())),
    ),
    (
        "model",
        lambda folder: padfree.hidden_states(torch.nn.Linear(2, 2), shard(batch())),
        lambda folder: padfree.hidden_states(attached(), shard(batch())),
    ),
    (
        "batch",
        lambda folder: padfree.hidden_states(attached(), batch()),
        lambda folder: padfree.hidden_states(attached(), padfree.shard(batch())),
    ),
    ("model", lambda folder: PackedCollator(build("opt")), trained_padded(lambda: build("opt"))),
    ("model", lambda folder: PackedCollator(registered_attention()), trained_padded(registered_attention)),
    ("model", lambda folder: PackedCollator(attach(build("qwen3"))), lambda folder: PackedCollator(detached())),
    ("model", lambda folder: PackedCollator(torch.nn.Linear(2, 2)), lambda folder: PackedCollator(build("qwen3"))),
    ("model", after_another_attention(made_again=False), after_another_attention(made_again=True)),
    ("multiple_of", lambda folder: collator(multiple_of=0), lambda folder: collator(multiple_of=1)),
    (
        "input_ids of example 0",
        lambda folder: collator()([{"input_ids": [0.5]}]),
        lambda folder: collator()([{"input_ids": [5]}]),
    ),
    (
        "completion_mask",
        lambda folder: collator()([{"input_ids": [1, 2], "completion_mask": [1, 3]}]),
        lambda folder: collator()([{"input_ids": [1, 2], "completion_mask": [0, 1]}]),
    ),
    (
        "tokens of sequence 0",
        packs(tokens=[[1.0, 2.0, 3.0], [4, 5]]),
        packs(tokens=[[1, 2, 3], [4, 5]]),
    ),
    (
        "loss_masks of sequence 1",
        packs(loss_masks=[[1, 1], [0.5]]),
        packs(loss_masks=[[1, 1], [1]], advantages=[torch.zeros(2), torch.full((1,), 0.5)]),
    ),
    ("max_tokens_per_gpu", packs(max_tokens_per_gpu=2.5), packs(max_tokens_per_gpu=8)),
    (
        "x",
        lambda folder: slime.sum_of_sample_mean([1.0, 2.0], [2], [FOUR[:2]]),
        lambda folder: slime.sum_of_sample_mean(torch.as_tensor([1.0, 2.0]), [2], [FOUR[:2]]),
    ),
    ("reward", lambda folder: load_reward("builtins:eval"), reward_function(RETURNS_ONE)),
    ("reward", lambda folder: load_reward("os:system"), reward_function(RETURNS_ONE)),
    (
        "reward",
        lambda folder: check_reward_name("subprocess:run"),
        reward_function(RETURNS_ONE, call=check_reward_name),
    ),
    (
        "reward",
        lambda folder: check_reward_name("no_such_module:score"),
        reward_function(RETURNS_ONE, call=check_reward_name),
    ),
    (
        "reward",
        lambda folder: check_reward_name("score"),
        one_by_one(
            lambda folder: check_reward_name("exact_match"),
            lambda folder: check_reward_name("number_after_hashes"),
            reward_function(RETURNS_ONE, call=check_reward_name),
        ),
    ),
    ("reward", reward_function("score = eval\n"), reward_function(RETURNS_ONE)),
    ("reward", reward_function("from os import getenv as score\n"), reward_function(RETURNS_ONE)),
    ("reward", reward_function("class score:\n    pass\n"), reward_function(RETURNS_ONE)),
    ("reward", reward_function(f"async {RETURNS_ONE}"), reward_function(RETURNS_ONE)),
    ("reward", reward_function("def score(response):\n    return 1.0\n"), reward_function(RETURNS_ONE)),
    (
        "reward",
        reward_function("def other(response, row):\n    return 1.0\n"),
        reward_function("def other(response, row):\n    return 1.0\n", name="other"),
    ),
    ("reward", reward_function(f"1 / 0\n{RETURNS_ONE}"), reward_function(f"1 / 1\n{RETURNS_ONE}")),
    ("reward", reward_function(f"import no_such_module\n{RETURNS_ONE}"), reward_function(RETURNS_ONE)),
]


def a_run(
    change: Callable[[Path], Any] = lambda folder: None, *overrides: str, recipe: str = "sft", cache: str = "cache"
) -> CommandLine:
    """A whole run from the command line, in a folder that was changed before it."""

    def provoke(folder: Path, words: tuple[str, ...]) -> None:
        shutil.copytree(model_folder("qwen3"), folder / "model")
        written(folder, "sft.jsonl", *({"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(4)))
        written(folder, "rl.jsonl", *({**ROLLOUT, "reward": float(a), "group": 0} for a in range(4)))
        small = ["model.path=FOLDER/model", "model.dtype=float32", "batch.samples=4", "batch.max_tokens=64"]
        places = [f'data.path=["FOLDER/{recipe}.jsonl"]', "run.folder=FOLDER/run", "run.device=cpu", "run.steps=1"]
        line = [recipe, str(RECIPES / f"{recipe}.toml"), *small, *places]
        before = os.environ.get("PADFREE_CACHE")
        os.environ["PADFREE_CACHE"] = str(folder / cache)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                if change is resumed:
                    assert main([word.replace("FOLDER", str(folder)) for word in line]) == 0
                change(folder)
                # flags last: a setting behind one would not be read as a setting
                command(*line, *sorted(words, key=lambda word: word.startswith("--")))(folder)
        finally:
            if before is None:
                del os.environ["PADFREE_CACHE"]
            else:
                os.environ["PADFREE_CACHE"] = before

    return CommandLine(overrides, provoke)


def resumed(folder: Path) -> None:
    """The run has been there already."""


def without_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def reference_without_weights(folder: Path) -> None:
    save_with_tokenizer(folder / "reference")
    (folder / "reference" / "model.safetensors").unlink()


def in_use(folder: Path) -> None:
    from filelock import FileLock

    (folder / "run").mkdir()
    lock = FileLock(folder / "run" / "run.lock")
    lock.acquire()
    HELD.append(lock)  # until the interpreter ends, as another process would


HELD: list[Any] = []


def damaged_index(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    written(folder / "model", "model.safetensors.index.json", {"weight_map": {"norm.weight": "model.safetensors"}})


def data_folder(folder: Path) -> None:
    (folder / "data").mkdir()
    shutil.copy(folder / "sft.jsonl", folder / "data")


def a_file_in_empty(name: str, *records: Any) -> Callable[[Path], Any]:
    return lambda folder: written(empty(folder), name, *records)


REFERRED = ("reference.path=FOLDER/reference", "loss.kl_coefficient=0.1")
EQUAL, TWO = [{**ROLLOUT, "group": 0}] * 2, [{**ROLLOUT, "reward": float(a), "group": 0} for a in range(2)]
CASES["runs"] = [
    ("model.path", a_run(without_weights)),
    ("model.path", a_run(without_weights), a_run()),
    ("model.path", a_run(without_weights, "--dry-run")),
    (
        "model",
        broken_model(lambda path: (path / "model.safetensors").unlink()),
        broken_model(lambda path: (path / "model.safetensors").unlink(), init="random"),
    ),
    ("model.path", a_run(damaged_index), a_run()),
    (
        "reference.path",
        a_run(reference_without_weights, *REFERRED, recipe="rl"),
        a_run(lambda folder: save_with_tokenizer(folder / "reference"), *REFERRED, recipe="rl"),
    ),
    (
        "reference.path",
        a_run(reference_without_weights, *REFERRED, "--dry-run", recipe="rl"),
        a_run(lambda folder: save_with_tokenizer(folder / "reference"), *REFERRED, "--dry-run", recipe="rl"),
    ),
    ("model.init", changed("model.init=zeros")),
    ("checkpoint.export_dtype", changed("checkpoint.export_dtype=int8")),
    ("run.folder", a_run(lambda folder: None, "run.folder=FOLDER/model"), "run.folder=FOLDER/new"),
    ("run.folder", a_run(lambda folder: None, "run.folder=FOLDER"), "run.folder=FOLDER/new"),
    ("run.folder", a_run(lambda folder: written(folder, "run", "a file")), "run.folder=FOLDER/new"),
    (
        "run.folder",
        a_run(a_file_in_empty("metrics.jsonl", {}), "run.folder=FOLDER/empty"),
        a_run(empty, "run.folder=FOLDER/empty"),
    ),
    ("run.folder", a_run(a_file_in_empty("run.json", {}), "run.folder=FOLDER/empty"), "run.folder=FOLDER/new"),
    (
        "run.folder",
        a_run(a_file_in_empty("notes.txt"), "run.folder=FOLDER/empty", "--dry-run"),
        "run.folder=FOLDER/new",
    ),
    (
        "run.folder",
        a_run(data_folder, 'data.path=["FOLDER/data"]', "run.folder=FOLDER/data/run"),
        "run.folder=FOLDER/run",
    ),
    ("run.folder", a_run(lambda folder: None, "run.folder=/proc/padfree"), "run.folder=FOLDER/new"),
    ("run.folder", a_run(in_use), "run.folder=FOLDER/new"),
    ("run.seed", a_run(resumed, "run.seed=1")),
    ("run.seed", a_run(resumed, "run.seed=1"), "run.seed=0"),
    ("run.seed", a_run(resumed, "run.seed=1"), "run.folder=FOLDER/new"),
    ("run.seed", a_run(resumed, "run.seed=1", "--dry-run")),
    ("batch.samples", a_run(resumed, "batch.samples=2", "run.steps=3")),
    ("data.shuffle", a_run(resumed, "data.shuffle=false")),
    ("data.loss_on", a_run(resumed, "data.loss_on=all")),
    ("loss.advantage", a_run(resumed, "loss.advantage=rloo", recipe="rl")),
    ("rollout.samples_per_prompt", a_run(resumed, "rollout.samples_per_prompt=2", recipe="rl")),
    (
        "data.path",
        a_run(lambda folder: written(folder, "rl.jsonl", *EQUAL), "batch.samples=2", recipe="rl"),
        a_run(lambda folder: written(folder, "rl.jsonl", *TWO), "batch.samples=2", recipe="rl"),
    ),
    (
        "rl.jsonl line 3",
        a_run(lambda folder: written(folder, "rl.jsonl", *TWO, ROLLOUT), "batch.samples=2", recipe="rl"),
    ),
    ("loss.advantage", a_run(lambda folder: None, "loss.advantage=given", recipe="rl")),
    (
        "cache",
        a_run(lambda folder: written(folder, "cache", "a file")),
        a_run(lambda folder: written(folder, "cache", "a file"), cache="another"),
    ),
    (
        "output",
        lambda folder: Page("title").write(written(folder, "index.html", "<html>")),
        lambda folder: Page("title").write(folder / "another.html"),
    ),
    (
        "--html",
        plan("--lengths", "FOLDER/lengths.txt", "--max-tokens", "8", "--html", "FOLDER/lengths.txt"),
        ("--html", "FOLDER/p.html"),
    ),
    (
        "--json",
        check("--json", "FOLDER/a.json", files=lambda folder: written(folder, "a.json", {})),
        ("--json", "FOLDER/b.json"),
    ),
    (
        "export",
        lambda folder: export_model(build("qwen3"), written(folder, "config.json", {}).parent),
        one_by_one(
            lambda folder: export_model(build("qwen3"), folder / "new"),
            lambda folder: export_model(build("qwen3"), empty(folder)),
        ),
    ),
]

CASES["vllm"] = [*SERVER_CASES]
CASES["doctor"] = [*DOCTOR_CASES]
