"""Possible faults (hypotheses) of a server's arithmetic: ignored config values, missing tensors, dtypes, quantisation.

For each config value that changes the arithmetic, a few faults are tested, e.g. that the server ignores the value, or
that it uses the default. To test a fault, the log-probabilities that the server reports are compared with those of a
model with the changed config and the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from padfree.model.routers import BIASES, routers_of
from padfree.tools.doctor.hypothesis import Case, Hypothesis, Proposal, Proposals, Untested
from padfree.tools.doctor.rescoring import (
    FLOAT8,
    NarrowRouters,
    fp8,
    fp8_inputs,
    in_dtype,
    int8,
    layer_weights,
    rescored,
    routes_of,
    variant,
    with_cache,
)

ROPE_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
ROPE_FACTORS = (2.0, 4.0, 8.0)
GELUS = {"gelu": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu"}
SAME_CONFIG = "start the server with the config.json of the model, without overrides"


class Change(NamedTuple):
    """A possible fault of a server: it computes with `values` instead of the values in the model's config.

    `says`: a sentence that describes the fault. `fitted`: the number of values that were guessed or fitted, because the
    model's config does not give them.
    """

    values: dict[str, Any]
    says: str
    fitted: int = 0


def of_config(cause: str, changes: Any, *, fix: str = SAME_CONFIG) -> Hypothesis:
    """Return the `Hypothesis` of a possible fault: the server computes with config values that differ from the model's.

    `changes(case)` yields a `Change` for each set of values to test, or `Untested` if the log-probabilities that the
    server reports cannot show this fault.
    """

    def propose(case: Case) -> Proposals:
        for change in changes(case):
            if isinstance(change, Untested):
                yield change
                continue
            make = partial(variant, case.model, change.values)
            yield Proposal(
                cause=cause,
                says=change.says,
                fix=fix,
                logprobs=rescored(make(), case.evidence),
                fitted=change.fitted,
                model=make,
            )

    return Hypothesis(cause=cause, propose=propose)


# Rotary embeddings


def rope_sets(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the parameters of the rotary embeddings, keyed by layer type. If all layers share them, the key is ""."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        return {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        return {"": parameters}
    return {name: value for name, value in parameters.items() if isinstance(value, dict)}


def _with_rope(config: PreTrainedConfig, kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    given = config.rope_parameters
    return {"rope_parameters": entry if kind == "" else {**given, kind: entry}}


def rope_base(case: Case) -> Iterator[Change]:
    config = case.model.config
    sets = rope_sets(config)
    for kind, entry in sets.items():
        own = float(entry.get("rope_theta", 1e4))
        where = f" in {kind} layers" if kind else ""
        others = {float(other["rope_theta"]) for other in sets.values() if "rope_theta" in other}
        for base in sorted({*ROPE_BASES, *others} - {own}):
            yield Change(
                _with_rope(config, kind, {**entry, "rope_theta": base}),
                f"the server uses the RoPE base {base:g}{where}, but the config has {own:g}",
                fitted=0 if base == 1e4 or base in others else 1,
            )


def rope_scaling(case: Case) -> Iterator[Change]:
    config = case.model.config
    for kind, entry in rope_sets(config).items():
        name = str(entry.get("rope_type", "default"))
        kept: tuple[str, ...] = ("rope_theta", "partial_rotary_factor")
        theta: dict[str, Any] = {key: entry[key] for key in kept if key in entry}
        if name != "default":
            plain: dict[str, Any] = {"rope_type": "default", **theta}
            yield Change(_with_rope(config, kind, plain), f"the server ignores the RoPE scaling {name!r} of the config")
            if "factor" in entry:
                for ratio in (0.25, 0.5, 2.0, 4.0):
                    factor = float(entry["factor"]) * ratio
                    if factor >= 1:
                        yield Change(
                            _with_rope(config, kind, {**entry, "factor": factor}),
                            f"the server scales RoPE by {factor:g}, but the config says {float(entry['factor']):g}",
                            fitted=1,
                        )
        else:
            length = int(getattr(config, "max_position_embeddings", 4096))
            for factor in ROPE_FACTORS:
                for other in ("linear", "yarn"):
                    extra: dict[str, Any] = {"original_max_position_embeddings": length} if other == "yarn" else {}
                    yield Change(
                        _with_rope(config, kind, {"rope_type": other, **theta, "factor": factor, **extra}),
                        f"the server scales RoPE ({other}, factor {factor:g}), but the config does not",
                        fitted=1,
                    )


def rope_attention_factor(case: Case) -> Iterator[Change]:
    config = case.model.config
    for kind, entry in rope_sets(config).items():
        if entry.get("rope_type") in ("yarn", "longrope") and entry.get("attention_factor") != 1.0:
            yield Change(
                _with_rope(config, kind, {**entry, "attention_factor": 1.0}),
                f"the server ignores the attention factor of the RoPE scaling {entry['rope_type']!r}",
            )


def rotary_share(case: Case) -> Iterator[Change]:
    config = case.model.config
    for kind, entry in rope_sets(config).items():
        share = entry.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            yield Change(
                _with_rope(config, kind, {**entry, "partial_rotary_factor": 1.0}),
                f"the server applies RoPE to whole heads, but the config to a fraction of {share:g} of each head",
            )


# Attention


def sliding_window(case: Case) -> Iterator[Change | Untested]:
    config = case.model.config
    window = getattr(config, "sliding_window", None)
    types = list(getattr(config, "layer_types", None) or ())
    used = isinstance(window, int) and getattr(config, "use_sliding_window", True)
    if not used or (types and "sliding_attention" not in types):
        return
    assert isinstance(window, int)
    if case.evidence.longest <= window:
        reason = f"the window of {window} tokens is longer than the longest sequence ({case.evidence.longest})"
        yield Untested(cause="sliding window", reason=reason)
        return
    full = ["full_attention" if kind == "sliding_attention" else kind for kind in types]
    ignored: dict[str, Any] = {"layer_types": full} if types else {}
    if not types or len(set(types)) == 1:
        ignored["sliding_window"] = None
    yield Change(ignored, f"the server ignores the sliding window of {window} tokens")
    if "full_attention" in types:
        windowed = ["sliding_attention" if kind == "full_attention" else kind for kind in types]
        yield Change({"layer_types": windowed}, f"the server uses the sliding window of {window} tokens in all layers")
    for other in (window - 1, window + 1):
        if other > 0:
            yield Change(
                {"sliding_window": other},
                f"the server uses a sliding window of {other} tokens, but the config has {window}",
                fitted=1,
            )


def attention_scale(case: Case) -> Iterator[Change]:
    config = case.model.config
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None and scalar != head:
        yield Change(
            {"query_pre_attn_scalar": head},
            f"the server scales attention by 1/sqrt(head size {head}), but the config by 1/sqrt({scalar}) "
            "(query_pre_attn_scalar)",
        )
    multiplier = getattr(config, "attention_multiplier", None)
    if multiplier is not None and not math.isclose(multiplier, head**-0.5):
        yield Change(
            {"attention_multiplier": head**-0.5},
            f"the server scales attention by 1/sqrt(head size {head}), but the config by {multiplier:g} "
            "(attention_multiplier)",
        )


def ignored_value(name: str, neutral: Any, what: str) -> Any:
    """Return a function that yields a possible fault: the server ignores the config field `name`, and uses `neutral`.

    `what` describes the field to the user, e.g. "scale of the logits".
    """

    def changes(case: Case) -> Iterator[Change]:
        own = getattr(case.model.config, name, None)
        if own is not None and own != neutral:
            yield Change({name: neutral}, f"the server ignores the {what} ({name} = {own:g})")

    return changes


def norm_epsilon(case: Case) -> Iterator[Change]:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        own = getattr(case.model.config, name, None)
        for epsilon in (1e-6, 1e-5):
            if isinstance(own, float) and own != epsilon:
                yield Change(
                    {name: epsilon}, f"the server uses the norm epsilon {epsilon:g}, not {own:g} as in the config"
                )


def activation(case: Case) -> Iterator[Change]:
    for name in ("hidden_act", "hidden_activation"):
        own = getattr(case.model.config, name, None)
        if own in GELUS:
            yield Change({name: GELUS[own]}, f"the server uses the activation {GELUS[own]}, not {own} as in the config")


# Experts


def number_of_experts(case: Case) -> Iterator[Change]:
    config = case.model.config
    for name in ("num_experts_per_tok", "moe_k"):
        own = getattr(config, name, None)
        if isinstance(own, int) and routers_of(case.model):
            for count in (own - 1, own + 1):
                if 0 < count <= routers_of(case.model)[0].num_experts:
                    yield Change(
                        {name: count}, f"the server uses {count} experts per token, but the config says {own}", fitted=1
                    )
            break


def expert_weights(case: Case) -> Iterator[Change]:
    config = case.model.config
    own = getattr(config, "norm_topk_prob", None)
    if isinstance(own, bool) and routers_of(case.model):
        does = "does not normalise" if own else "normalises"
        yield Change({"norm_topk_prob": not own}, f"the server {does} the weights of the chosen experts")
    yield from ignored_value("routed_scaling_factor", 1.0, "scale of the experts")(case)


def flipped_experts(case: Case) -> Proposals:
    if not routers_of(case.model):
        return
    model = variant(case.model)
    _, own = routes_of(model, case.evidence)
    with NarrowRouters(model):
        predicted, other = routes_of(model, case.evidence)
    flipped = int((own != other).any(-1).sum())
    yield Proposal(
        cause="experts flipped",
        says=(
            "the server computes routers in bfloat16, which decides near ties between experts differently "
            f"({flipped} of {len(own)} choices)"
        ),
        fix="compute the routers of the server in float32, or replay its expert choices in training (rollout.routing)",
        logprobs=predicted,
    )


# Tensors


def tied_head(case: Case) -> Proposals:
    config, state = case.model.config, case.model.state_dict()
    head = "lm_head.weight"
    embeddings = next((name for name in state if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if embeddings is None or head not in state:
        return
    fix = "serve files whose tie_word_embeddings agrees with the tensors, with a server that reads this field"
    if not getattr(config, "tie_word_embeddings", False):
        if state[embeddings].shape == state[head].shape:
            make = partial(variant, case.model, tensors={head: state[embeddings]})
            says = "the server uses the embeddings as head, but the model has a head of its own"
            yield Proposal(cause="tied head", says=says, fix=fix, logprobs=rescored(make(), case.evidence), model=make)
    elif case.stored and head in case.stored:
        make = partial(variant, case.model, {"tie_word_embeddings": False}, tensors={head: case.stored[head]})
        says = "the server uses the stored lm_head.weight, but the config ties the head to the embeddings"
        yield Proposal(cause="tied head", says=says, fix=fix, logprobs=rescored(make(), case.evidence), model=make)


def dropped_tensors(case: Case) -> Proposals:
    state = case.model.state_dict()
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        kind = name.rsplit(".", 1)[-1]
        if kind == "bias" or kind in BIASES:
            groups.setdefault("biases" if kind == "bias" else kind, {})[name] = torch.zeros_like(tensor)
        elif kind == "sinks":
            groups.setdefault("attention sinks", {})[name] = torch.full_like(tensor, -1e9)
    for what, tensors in groups.items():
        make = partial(variant, case.model, tensors=tensors)
        yield Proposal(
            cause="tensors not loaded",
            says=f"the server does not use the {what} of the model ({len(tensors)} tensors such as {min(tensors)})",
            fix="use a server version that supports the architecture of the model",
            logprobs=rescored(make(), case.evidence),
            model=make,
        )


# Precision


def dtypes(case: Case) -> Proposals:
    for dtype in (torch.bfloat16, torch.float16):
        make = partial(in_dtype, case.model, dtype)
        name = str(dtype).removeprefix("torch.")
        yield Proposal(
            cause="dtype",
            says=f"the server computes in {name}",
            fix="start the server with the model's --dtype, or give --dtype here if the server should use this dtype",
            logprobs=rescored(make(), case.evidence),
            dtype=dtype,
        )


def quantised_weights(case: Case) -> Proposals:
    model = case.model
    fix = "serve the model without quantisation, or correct for it in training (loss.corrections)"
    for what, rounded, inputs in (
        ("fp8 weights", fp8, False),
        ("fp8 weights and activations", fp8, True),
        ("int8 weights", int8, False),
    ):
        routers = {id(router.module.weight) for router in routers_of(model)}
        quantised = {
            name: rounded(weight)
            for name, weight in layer_weights(model)
            if id(model.get_parameter(name)) not in routers
        }
        other = variant(model, tensors=quantised)
        with fp8_inputs(other) if inputs else nullcontext():
            predicted = rescored(other, case.evidence)
        yield Proposal(cause="quantised weights", says=f"the server uses {what}", fix=fix, logprobs=predicted, fitted=0)


def cache_dtype(case: Case) -> Proposals:
    for name, dtype in FLOAT8.items():
        yield Proposal(
            cause="KV cache type",
            says=f"the server keeps keys and values in {name}",
            fix="start the server with --kv-cache-dtype auto",
            logprobs=rescored(with_cache(case.model, dtype), case.evidence),
        )


MODEL_HYPOTHESES = (
    Hypothesis(cause="tied head", propose=tied_head),
    of_config("RoPE scaling", rope_scaling),
    of_config("RoPE base", rope_base),
    of_config("RoPE attention factor", rope_attention_factor),
    of_config("rotary share", rotary_share),
    of_config("sliding window", sliding_window),
    of_config("logit soft cap", ignored_value("final_logit_softcapping", None, "soft cap of the logits")),
    of_config("attention soft cap", ignored_value("attn_logit_softcapping", None, "soft cap of the attention scores")),
    of_config("attention scale", attention_scale),
    of_config("logit scale", ignored_value("logits_scaling", 1.0, "scale of the logits")),
    of_config("logit scale", ignored_value("logit_scale", 1.0, "scale of the logits")),
    of_config("residual scale", ignored_value("residual_multiplier", 1.0, "scale of the residual stream")),
    of_config("embedding scale", ignored_value("embedding_multiplier", 1.0, "scale of the embeddings")),
    of_config("norm epsilon", norm_epsilon),
    of_config("activation", activation),
    of_config("number of experts", number_of_experts),
    of_config("expert weights", expert_weights),
    Hypothesis(cause="experts flipped", propose=flipped_experts),
    Hypothesis(cause="tensors not loaded", propose=dropped_tensors),
    Hypothesis(cause="KV cache type", propose=cache_dtype),
    Hypothesis(cause="quantised weights", propose=quantised_weights),
    Hypothesis(cause="dtype", propose=dtypes),
)
