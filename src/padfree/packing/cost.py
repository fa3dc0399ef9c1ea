"""What a sample costs: linear · n + quadratic · n², a constant for each micro-batch, and one for each step.

    tokens of a sample        100        1000        8000
    matrix products           100 a      1000 a      8000 a       every weight meets every token once
    attention             10,000 b  1,000,000 b  64,000,000 b     every token meets every token before it

Equal numbers of tokens are therefore not equal amounts of work once samples are long. The two factors come from the
model's configuration (`from_config`, in FLOPs of forward and backward), or from times measured on the device (`fit`),
kept in a JSON file. Only ratios matter to packing, so FLOPs and seconds serve equally well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padfree.arrays import need_number, number_array

Floats = NDArray[np.float64]

FORWARD_AND_BACKWARD = 3
"""The backward pass costs twice the forward pass: one product for the input's gradient, one for the weight's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """cost of a sample of n tokens = linear · n + quadratic · n²; a micro-batch costs `constant` on top, and a step
    (the optimizer's part of it) `step`."""

    linear: float
    quadratic: float = 0.0
    constant: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            need_number(field, value, 0.0, sys.float_info.max, "give a finite number of 0 or more")

    def __call__(self, lengths: ArrayLike) -> Floats:
        """[n] lengths -> [n] costs, without the constants."""
        n = number_array(lengths, "lengths").astype(np.float64)
        return self.linear * n + self.quadratic * n * n

    @staticmethod
    def tokens() -> CostModel:
        """The cost is the number of tokens."""
        return CostModel(linear=1.0)

    @staticmethod
    def from_config(config: Any) -> CostModel:
        """FLOPs of forward and backward of an HF causal language model, from its config (object or dict).

        Counted: the projections of attention (multi-head, grouped, or DeepSeek's latent form), the MLP (three matrices;
        two where the config speaks GPT-2's language), of a mixture the router, the shared experts and the experts one
        token meets, the output head, and causal attention itself. A layer with a sliding window is counted as if
        every token saw a full window: linear, a little too much for samples shorter than the window.
        """
        read = _Reader(config)
        hidden, layers = read("hidden_size", "n_embd"), read("num_hidden_layers", "n_layer")
        projections, pair = _attention_weights(read, hidden)
        windowed, full = _layer_kinds(read, layers)
        weights = layers * projections + _mlp_weights(read, hidden, layers) + hidden * read("vocab_size")
        window = read("sliding_window", default=0)
        # a weight is one multiplication and one addition per token; causal attention has n² / 2 pairs
        return CostModel(
            linear=FORWARD_AND_BACKWARD * 2.0 * (weights + windowed * window * pair),
            quadratic=FORWARD_AND_BACKWARD * 1.0 * full * pair,
        )

    @staticmethod
    def fit(lengths: Sequence[ArrayLike], seconds: ArrayLike) -> CostModel:
        """The model closest to measured times: `lengths[i]` are the lengths of all samples of micro-batch i (or one
        number), `seconds[i]` is what it took. Least squares of the relative error, no coefficient below 0.
        """
        time = number_array(seconds, "seconds").astype(np.float64)
        if time.ndim != 1 or len(time) != len(lengths) or not len(time):
            raise ValueError(f"seconds: shape {time.shape} for {len(lengths)} measurements; give one per micro-batch")
        if not ((time > 0) & (time < np.inf)).all():
            raise ValueError(f"seconds: {time.min()} to {time.max()}; give finite times above 0")
        batches = [np.atleast_1d(number_array(batch, "lengths").astype(np.float64)) for batch in lengths]
        features = np.array([[batch.sum(), (batch * batch).sum(), 1.0] for batch in batches])
        linear, quadratic, constant = _nonnegative_least_squares(features / time[:, None], np.ones(len(time))).tolist()
        return CostModel(linear=linear, quadratic=quadratic, constant=constant)

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def from_json(path: str | Path) -> CostModel:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        names = [*CostModel.__dataclass_fields__]
        if not isinstance(values, dict) or not {"linear"} <= set(values) <= set(names):
            raise ValueError(f"{path}: not a cost model; write it with CostModel.to_json ({', '.join(names)})")
        return CostModel(**values)


class _Reader:
    """Reads integers of an HF config (object, dict, or the text part of a multimodal one) under any of their names."""

    def __init__(self, config: Any) -> None:
        self.config = self._get(config, "text_config") or config

    @staticmethod
    def _get(config: Any, name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    def get(self, name: str) -> Any:
        return self._get(self.config, name)

    def __call__(self, *names: str, default: int | None = None) -> int:
        for name in names:
            if (value := self.get(name)) is not None:
                return int(value)
        if default is None:
            raise ValueError(f"config: no {names[0]}; give a causal language model's config or CostModel(linear=...)")
        return default


def _attention_weights(read: _Reader, hidden: int) -> tuple[int, int]:
    """Weights of the projections of one layer, and numbers multiplied per (query, key) pair in it."""
    heads = read("num_attention_heads", "n_head")
    if read.get("kv_lora_rank") is not None:
        rope, nope, value = read("qk_rope_head_dim"), read("qk_nope_head_dim"), read("v_head_dim")
        rank, query_rank = read("kv_lora_rank"), read("q_lora_rank", default=0)
        query = heads * (rope + nope) * (query_rank or hidden) + hidden * query_rank
        key_value = hidden * (rank + rope) + rank * heads * (nope + value)
        return query + key_value + heads * value * hidden, heads * (rope + nope + value)
    dim = read("head_dim", default=hidden // heads)
    kv_heads = read("num_key_value_heads", default=heads)
    return hidden * dim * (2 * heads + 2 * kv_heads), 2 * heads * dim


def _mlp_weights(read: _Reader, hidden: int, layers: int) -> int:
    """Weights of the MLPs of all layers that one token meets."""
    matrices = 3 if read.get("n_embd") is None else 2
    dense = matrices * hidden * read("intermediate_size", "n_inner", default=4 * hidden)
    experts = read("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if not experts:
        return layers * dense
    width = read("moe_intermediate_size", "intermediate_size")
    shared = read("shared_expert_intermediate_size", default=width * read("n_shared_experts", default=0))
    mixture = matrices * hidden * (width * read("num_experts_per_tok") + shared) + hidden * experts
    every = read("decoder_sparse_step", default=1)
    dense_first, dense_named = read("first_k_dense_replace", default=0), set(read.get("mlp_only_layers") or ())
    sparse = sum(
        layer >= dense_first and layer not in dense_named and (layer + 1) % every == 0 for layer in range(layers)
    )
    return sparse * mixture + (layers - sparse) * dense


def _layer_kinds(read: _Reader, layers: int) -> tuple[int, int]:
    """How many layers attend in a sliding window, and how many to everything before."""
    kinds = read.get("layer_types")
    if kinds is not None:
        return kinds.count("sliding_attention"), kinds.count("full_attention")
    windowed = bool(read("sliding_window", default=0)) and read.get("use_sliding_window") is not False
    return (layers, 0) if windowed else (0, layers)


def _nonnegative_least_squares(features: Floats, target: Floats) -> Floats:
    """The coefficients of 0 or more with the least squared error: the best over all subsets of the columns."""
    scale: Floats = np.maximum(np.abs(features).max(0), np.finfo(np.float64).tiny)
    scaled = features / scale
    width = features.shape[1]
    best, least = np.zeros(width), float(target @ target)
    for columns in chain.from_iterable(combinations(range(width), size) for size in range(1, width + 1)):
        chosen = list(columns)
        solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
        error = float(np.square(scaled[:, chosen] @ solution - target).sum())
        if (solution >= 0).all() and error < least * (1 - 1e-12):
            best, least = np.zeros(width), error
            best[chosen] = solution
    return best / scale
