"""The ways to compute the gradients of a batch that `bench/step.py` compares.

A `Way` builds a model with random weights and returns a function that computes all gradients and returns the loss.
Other libraries are used as their documentation says, with all of their options that make them faster.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from padfree.distributed import Mesh
from padfree.head.budget import Memory
from padfree.losses import ClipSettings, PolicySettings, SFTSettings
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.packing import collate
from padfree.sample import Sample, with_arrays
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tools.check.padded import padded_rows
from padfree.train.engine import Engine, LossSettings
from padfree.train.scorer import Scorer

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024},
    "0.6b": {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "1.7b": {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "4b": {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}  # fmt: skip
SEED = 8  # gives 14,918 tokens in 20 samples with a median of 490
HEAD_MEMORY: dict[str, Memory] = {
    "none": 6 << 30,  # activations take far more; all logits fit, so that none is recomputed
    "host": int(1.6 * 2**30),  # memory left free by the first layers; no logits are recomputed
}
PADDED_TOKENS = 8_192  # tokens in a small padded micro-batch

Gradients = Callable[[], Tensor]
POLICY = PolicySettings(objective=ClipSettings(low=0.2, high=0.28), entropy_coefficient=1e-3)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The inputs that all ways have in common."""

    shape: str
    device: torch.device
    dtype: torch.dtype
    samples: Sequence[Sample]
    old_logprobs: Sequence[Any]
    mesh: Mesh

    def samples_for(self, loss: str) -> list[Sample]:
        """Return the samples, with old log-probabilities if the loss is a policy loss."""
        return with_arrays(self.samples, **({"old_logprobs": self.old_logprobs} if loss == "rl" else {}))


@dataclass(frozen=True, kw_only=True)
class Way:
    name: str
    kind: str  # hf, public or padfree
    build: Callable[[Setting], Gradients]
    checkpointing: bool = False
    loss: str = "sft"


def make_model(setting: Setting, attention: str) -> Any:
    torch.manual_seed(0)
    make_config, make = cast(Any, Qwen3Config), cast(Any, Qwen3ForCausalLM)
    config = make_config(
        **SHAPES[setting.shape], tie_word_embeddings=True, max_position_embeddings=8192, attn_implementation=attention
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with setting.device:
            model = make(config)
    finally:
        torch.set_default_dtype(default)
    model.config.use_cache = False
    return model.train()


@contextmanager
def fresh() -> Any:
    """Context manager around one way. At its end it undoes the patches of other libraries and frees the memory."""
    kept = dict(vars(modeling_qwen3))
    try:
        yield
    finally:
        vars(modeling_qwen3).update(kept)
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# Plain transformers


def hf_padded(setting: Setting, *, small: bool) -> Gradients:
    """Compute padded samples, in small micro-batches or in the largest that fit."""
    model = make_model(setting, "sdpa")
    longest = max(len(sample) for sample in setting.samples)
    rows = max(1, PADDED_TOKENS // longest) if small else len(setting.samples)
    while not small and not fits(_padded_rows_by_hf(model, setting, rows, longest)):
        rows = -(-rows // 2)
    model.zero_grad(set_to_none=True)
    print(f"padded micro-batches of {rows} samples with {longest:,} tokens each", flush=True)
    return _padded_rows_by_hf(model, setting, rows, longest)


def fits(gradients: Gradients) -> bool:
    try:
        gradients()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def _padded_rows_by_hf(model: Any, setting: Setting, rows: int, longest: int) -> Gradients:
    samples = setting.samples
    count = sum(sample.num_labels for sample in samples)
    starts = range(0, len(samples), rows)
    batches = [padded_rows(samples[i : i + rows], setting.device, length=longest) for i in starts]

    def gradients() -> Tensor:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=setting.device)
        for batch in batches:
            loss = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels, use_cache=False,
                num_items_in_batch=count,
            ).loss  # fmt: skip
            loss.backward()
            total += loss.detach()
        return total

    return gradients


def hf_packed(setting: Setting, attention: str) -> Gradients:
    """Compute one pack whose samples are separated by restarting position ids, with transformers' own loss."""
    more = {"attention_mask": _block_mask(setting)} if attention == "flex_attention" else {}
    return packed_by_hf(make_model(setting, attention), setting, **more)


def _block_mask(setting: Setting) -> BlockMask:
    """Return the mask, made once. transformers would make it in every step, with a kernel that compiles for minutes."""
    sample = collate(setting.samples).to(setting.device).sample_index
    return create_block_mask(
        lambda _batch, _head, query, key: (sample[query] == sample[key]) & (query >= key),
        B=None, H=None, Q_LEN=len(sample), KV_LEN=len(sample), device=str(setting.device),
    )  # fmt: skip


def packed_by_hf(model: Any, setting: Setting, **more: Any) -> Gradients:
    batch = collate(setting.samples).to(setting.device)
    labels = batch.labels[None]
    inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None], **more}

    def gradients() -> Tensor:
        model.zero_grad(set_to_none=True)
        # The labels are already shifted per sample; `shift_labels` tells transformers not to shift again.
        loss: Tensor = model(**inputs, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return gradients


# The best combination of public libraries


def public(setting: Setting, *, attention: str, compile: bool, checkpointing: bool) -> Gradients:
    """Compute a pack by HF with Liger's kernels, variable-length attention and compiled layers."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    batch = collate(setting.samples).to(setting.device)
    cu, longest = batch.segments.cu_seqlens, batch.segments.max_seqlen
    call = torch._dynamo.disable(  # type: ignore[no-untyped-call]
        _fa4 if attention == "fa4" else built_in
    )
    name = f"public_{attention}"
    AttentionInterface.register(name, partial(public_attention, call))
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    model = make_model(setting, name)
    apply_liger_kernel_to_qwen3(
        rope=not compile, rms_norm=not compile, swiglu=not compile, cross_entropy=False,
        fused_linear_cross_entropy=True, model=model,
    )  # fmt: skip
    if compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return packed_by_hf(model, setting, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest, max_length_k=longest)


def public_attention(
    call: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    parts = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    return call(*parts, kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("scaling"))[None], None


def _fa4(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    out: Any = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
        softmax_scale=scale,
    )  # fmt: skip
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def built_in(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float) -> Tensor:
    from torch.nn.attention import varlen

    attention: Any = varlen.varlen_attn
    known = inspect.signature(attention).parameters
    causal = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    grouped = {"enable_gqa": True} if "enable_gqa" in known else {}  # other versions accept grouped heads directly
    out: Tensor = attention(q, k, v, cu, cu, longest, longest, **causal, **grouped)
    return out


# padfree


def padfree_gradients(
    setting: Setting, *, loss: str, compile: str = "none", checkpointing: str = "none", attention: str = "auto"
) -> Gradients:
    """Compute gradients with padfree, with weights in the compute dtype and no optimizer, as in the other ways."""
    model = make_model(setting, "sdpa")
    steps = transformations(setting.mesh, attention=attention, compile=compile, checkpointing=checkpointing)
    parallelize(model, steps)
    engine = make_engine(model, setting, loss, memory=HEAD_MEMORY.get(checkpointing, "low"))
    prepared = engine.prepare(setting.samples_for(loss))
    for fewer in (1, 2):  # run other lengths first, so that layers are compiled for any length, as in a run
        engine.gradients(engine.prepare(setting.samples_for(loss)[fewer:]))
    engine.optimizer.zero_grad(set_to_none=True)
    return lambda: engine.gradients(prepared).loss


def update_engine(setting: Setting, *, loss: str, compile: str = "none", checkpointing: str = "none") -> Engine:
    """Return an engine for whole updates with float32 master weights, clipping and AdamW."""
    model = make_model(setting, "sdpa").float()
    steps = transformations(
        setting.mesh, compile=compile, checkpointing=checkpointing, dtype=setting.dtype, reshard=False
    )
    parallelize(model, steps)
    return make_engine(model, setting, loss)


def make_engine(model: Any, setting: Setting, loss: str, memory: Memory = "speed") -> Engine:
    longest = sum(len(sample) for sample in setting.samples)
    scorer = Scorer(model, setting.mesh, max_tokens=longest)
    settings = LossSettings(loss=SFTSettings() if loss == "sft" else POLICY, head_memory=memory)
    return Engine(scorer, make_optimizer(model, OptimizerConfig(lr=1e-6)), settings)


# Samples


def log_normal_samples(
    count: int, median: int, longest: int, vocabulary: int, prompt_share: float = 0.0
) -> list[Sample]:
    """Return samples of log-normal lengths, sigma 1. The first `prompt_share` of each sample is not trained."""
    rng = np.random.default_rng(SEED)
    lengths = np.clip(rng.lognormal(np.log(median), 1.0, count), 16, longest).astype(np.int64)
    return [
        Sample(
            tokens=rng.integers(0, vocabulary, n),
            loss_mask=np.arange(n) >= prompt_share * n,
            advantages=np.full(n, rng.normal()),
            uid=index,
        )
        for index, n in enumerate(lengths)
    ]


def near_uniform_logprobs(samples: Sequence[Sample], vocabulary: int) -> list[Any]:
    """Return old log-probabilities as of an untrained model, so that ratios are near 1."""
    return [np.full(len(sample), -np.log(vocabulary), dtype=np.float32) for sample in samples]
