"""padfree: padding-free training of Hugging Face language models.

    import padfree

    packs = padfree.pack(samples, max_tokens=8192)        # samples end to end, no padding
    model = padfree.attach(model)                         # attention only inside each sample
    local = padfree.shard(packs[0])                       # the pack, or this context rank's part of it
    hidden = padfree.hidden_states(model, local)          # [T, D]: T tokens, hidden size D

    run = padfree.sft(model="my-model", data="train.jsonl", run="runs/first")     # a whole run in one call

Names are imported on first use, so that `padfree --help` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from padfree.lazy import load_when_used
from padfree.version import __version__ as __version__

if TYPE_CHECKING:
    from padfree.api import TrainedRun, distill, dpo, evaluate, kto, reward, rl, sft
    from padfree.attention import varlen_attention
    from padfree.batch import AttnContext, Layout, LocalBatch, PackedBatch, Rollout, SampleInfo
    from padfree.cp import attend, gather_tokens, make_layout, shard
    from padfree.errors import UserError
    from padfree.head import Scores, fused_loss, score
    from padfree.images import Image
    from padfree.losses import token_weights
    from padfree.model import attach, hidden_states
    from padfree.packing import (
        CostModel,
        FixedSizeBatcher,
        StepPlan,
        TokenBudgetBatcher,
        balance,
        collate,
        fill,
        pack,
        plan_step,
        unpack,
    )
    from padfree.sample import Sample
    from padfree.segments import Segments

_LAZY = {
    "TrainedRun": "padfree.api",
    "distill": "padfree.api",
    "dpo": "padfree.api",
    "evaluate": "padfree.api",
    "kto": "padfree.api",
    "reward": "padfree.api",
    "rl": "padfree.api",
    "sft": "padfree.api",
    "AttnContext": "padfree.batch",
    "Layout": "padfree.batch",
    "LocalBatch": "padfree.batch",
    "PackedBatch": "padfree.batch",
    "Rollout": "padfree.batch",
    "Sample": "padfree.sample",
    "Image": "padfree.images",
    "SampleInfo": "padfree.batch",
    "Segments": "padfree.segments",
    "CostModel": "padfree.packing",
    "FixedSizeBatcher": "padfree.packing",
    "StepPlan": "padfree.packing",
    "TokenBudgetBatcher": "padfree.packing",
    "balance": "padfree.packing",
    "collate": "padfree.packing",
    "fill": "padfree.packing",
    "pack": "padfree.packing",
    "plan_step": "padfree.packing",
    "unpack": "padfree.packing",
    "varlen_attention": "padfree.attention",
    "UserError": "padfree.errors",
    "attend": "padfree.cp",
    "gather_tokens": "padfree.cp",
    "make_layout": "padfree.cp",
    "shard": "padfree.cp",
    "Scores": "padfree.head",
    "fused_loss": "padfree.head",
    "score": "padfree.head",
    "token_weights": "padfree.losses",
    "attach": "padfree.model",
    "hidden_states": "padfree.model",
}

_PARTS = ("api", "attention", "batch", "compat", "config", "cp", "data", "head", "losses", "model", "packing", "train")

__all__ = [
    "AttnContext",
    "CostModel",
    "FixedSizeBatcher",
    "Image",
    "Layout",
    "LocalBatch",
    "PackedBatch",
    "Rollout",
    "Sample",
    "SampleInfo",
    "Scores",
    "Segments",
    "StepPlan",
    "TokenBudgetBatcher",
    "TrainedRun",
    "UserError",
    "attach",
    "attend",
    "balance",
    "collate",
    "distill",
    "dpo",
    "evaluate",
    "fill",
    "fused_loss",
    "gather_tokens",
    "hidden_states",
    "kto",
    "make_layout",
    "pack",
    "plan_step",
    "reward",
    "rl",
    "score",
    "sft",
    "shard",
    "token_weights",
    "unpack",
    "varlen_attention",
]

__getattr__, __dir__ = load_when_used(__name__, _LAZY, parts=_PARTS)
