"""Check that the sampler and the trainer compute the same log-probabilities, bit by bit.

`check_sampler` samples responses, and scores them with the trainer. If a bit differs, it runs the tokens through
sampler and trainer again, without the compiler, and records the results of all operators. Operators run in the same
order in sampler and trainer, so the first one whose results differ is the cause. In this example, v_proj is the cause:

    operator         input_layernorm   q_proj   k_proj   v_proj
    equal results    yes               yes      yes      no
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from padfree.attention.backend import PAGE_SIZE
from padfree.batch import IGNORE, LocalBatch
from padfree.cp import shard
from padfree.distributed import distributed
from padfree.errors import UserError
from padfree.head import score
from padfree.layers.compile import compile_layers
from padfree.model import attach, hidden_states, lm_head_of
from padfree.model.grouped_matmuls import use_exact_matmuls
from padfree.model.load import load_model
from padfree.model.sharing import state_obstacle
from padfree.model.stacked_experts import stacked_experts
from padfree.model.structure import layers_of
from padfree.packing import collate
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.engines.in_process.cached_model import CachedModel, unsupported_reason
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.decode_steps import NUM_SLOT_FIELDS, prefill_rows
from padfree.rollout.engines.in_process.exact_operators import attention_problem, model_problem
from padfree.rollout.engines.in_process.kv_cache import KVCache
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.row_trial import STEP_ROWS, trial
from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, OWN, PROMPT, STORED, WRITTEN
from padfree.rollout.sampling_rng import response_keys
from padfree.sample import Sample
from padfree.tools.check.model_check import check_samples, longest_of
from padfree.tools.check.model_source import model_source
from padfree.tools.check.samples import LONGEST, random_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerReport:
    """The result of `check_sampler`.

    `operator`: the first operator whose results in sampler and trainer differ in any bit; None if there is none.
    """

    model: str
    dtype: str
    num_tokens: int
    unequal: int  # number of tokens whose log-probabilities differ
    largest: float  # the largest difference
    operator: str | None
    problem: str | None  # why a run with this model on this device has rollout.exact=false

    @property
    def passed(self) -> bool:
        return self.unequal == 0

    @property
    def verdict(self) -> str:
        if self.passed:
            return f"passed: sampler and trainer agree to the bit for all {self.num_tokens} sampled tokens"
        return (
            f"FAILED: {self.unequal} of {self.num_tokens} log-probabilities differ, by at most {self.largest:.3g}; "
            f"first operator whose results differ: {self.operator}"
        )


def check_sampler_of(
    source: str,
    samples: Sequence[Sample] | int,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    layers: int | None = None,
    full: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> SamplerReport:
    """Load a model as `check_model` does, and check its sampler. The first half of each sample is the prompt.

    On a CPU, `backend="auto"` is `tiles`, because the fastest backend rounds differently in decode steps and in packs.
    """
    with distributed(device=device) as chosen:
        dtype = dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)
        used = "tiles" if chosen.type == "cpu" and backend == "auto" else backend
        with model_source(source, layers=layers, full=full, backend=used, trust_remote_code=trust_remote_code) as found:
            if isinstance(samples, int):
                samples = random_samples(found.limits.vocabulary, samples, longest=longest_of(found.config, LONGEST))
            check_samples(samples, found)
            model = load_model(found.source, dtype=dtype, device=chosen, trust_remote_code=trust_remote_code)
            report = check_sampler(
                model,
                [sample.tokens[: max(1, len(sample) // 2)] for sample in samples],
                backend=used,
                compiled=chosen.type == "cuda",
            )
            return replace(report, problem=report.problem or attention_problem(model, chosen, dtype, backend))


@torch.no_grad()
def check_sampler(
    model: PreTrainedModel,
    prompts: Sequence[NDArray[np.integer[Any]]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    backend: str = "auto",
    compiled: bool = False,
) -> SamplerReport:
    """Sample a response to each prompt, and compare the sampler's log-probabilities with the trainer's.

    `model`: a loaded model on its device. This function attaches it and, if `compiled`, compiles it. Raise a
    `UserError` if the sampler does not support the model.
    """
    device, dtype = model.device, model.dtype
    obstacle = state_obstacle(attach(model, backend)) or unsupported_reason(model)
    if obstacle is not None:
        raise UserError(
            "--sampler",
            f"padfree's sampler with a KV cache does not support {type(model).__name__} ({obstacle}), so sampler and "
            "trainer cannot agree to the bit",
            "remove --sampler, and set rollout.exact=false",
        )
    model.train(False)
    use_exact_matmuls(model, device)
    problem = model_problem(model, device)
    trained = model
    step_rows, row_problem = _step_rows(trained, len(prompts), device, dtype)
    decoder = Decoder(
        CachedModel(sampling_model(trained, dtype, device), backend=backend, compiled=compiled, exact=True),
        num_slots=len(prompts),
        temperature=temperature,
        stops=[int(model.config.vocab_size)],  # an id that no token has, so that no response ends early
        step_rows=step_rows,
    )
    keys = response_keys(0, 0, np.arange(len(prompts)))
    requests = [
        SamplingRequest(tokens=prompt, max_new_tokens=max_new_tokens, key=int(key))
        for prompt, key in zip(prompts, keys, strict=True)
    ]
    responses = decoder.sample(requests)
    decoder.free()
    if compiled:
        compile_layers(layers_of(trained), "inductor", exact=True)
    samples = [_sample(request, response) for request, response in zip(requests, responses, strict=True)]
    expected = _trainer_logprobs(trained, samples, temperature)
    found = np.concatenate([response.logprobs for response in responses])
    unequal = found != expected
    operator = None
    if unequal.any():
        first, token = divmod(int(np.flatnonzero(unequal)[0]), max_new_tokens)
        _forget_compilation(trained)
        sampled = responses[first].tokens[: token + 1]
        operator = first_difference(trained, requests[first].tokens, sampled, backend=backend, rows=step_rows[-1])
        if operator is None:
            operator = "a compiled layer (not compiled, all operators agree)" if compiled else "the head"
    return SamplerReport(
        model=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        num_tokens=len(found),
        unequal=int(unequal.sum()),
        largest=float(np.abs(found - expected).max()),
        operator=operator,
        problem=problem or attention_problem(model, device, dtype, backend) or row_problem,
    )


def sampling_model(trained: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a model for sampling that shares its weights with `trained`."""
    policy = PolicyModel(trained, dtype, device)
    policy.update(trained)
    return policy.model


def _step_rows(
    model: PreTrainedModel, num_slots: int, device: torch.device, dtype: torch.dtype
) -> tuple[Sequence[int], str | None]:
    """Return batch sizes for decode steps with which matmuls give the same bits as in training, and None.

    If no size does so for all matmuls, return one size and the reason.
    """
    choice = trial(layers_of(model), num_slots, device, dtype)
    if choice.problem is None:
        return choice.step_rows, None
    return [next((rows for rows in STEP_ROWS if rows >= num_slots), num_slots)], choice.problem


def _sample(request: SamplingRequest, response: Response) -> Sample:
    tokens = np.concatenate([request.tokens, response.tokens])
    return Sample(tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(request.tokens))


def _packed(samples: Sequence[Sample], device: torch.device) -> LocalBatch:
    """Return one pack of the samples, padded to the number of tokens to which the sampler pads a prefill."""
    packed = collate(samples)
    return shard(packed.padded_to(prefill_rows(packed.num_tokens)).to(device))


def _trainer_logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> NDArray[np.float32]:
    local = _packed(samples, model.device)
    logprobs = score(hidden_states(model, local), lm_head_of(model), local.labels, temperature=temperature).logprobs
    found: NDArray[np.float32] = logprobs[local.labels != IGNORE].float().cpu().numpy()
    return found


def _forget_compilation(model: PreTrainedModel) -> None:
    for layer in layers_of(model):
        layer._compiled_call_impl = None


# The search for the operator

Trace = Mapping[str, list[Tensor]]
"""Inputs and outputs by operator, e.g. "layer 0, self_attn.q_proj": one tensor [tokens, ...] per forward pass."""


def first_difference(
    trained: PreTrainedModel,
    prompt: NDArray[np.integer[Any]],
    sampled: NDArray[np.integer[Any]],
    *,
    backend: str,
    rows: int,
) -> str | None:
    """Return the first operator whose results differ between the sampler and the trainer, or None if all are equal.

    `sampled`: the response, up to the first token whose log-probability differs. `rows`: the batch size of a decode
    step. Only its first row is used.
    """
    tokens = np.concatenate([prompt, sampled])
    expected = _trainer_trace(trained, Sample(tokens=tokens))
    cached = CachedModel(sampling_model(trained, trained.dtype, trained.device), backend=backend, exact=True)
    found = _sampler_trace(cached, tokens, len(prompt) - 1, rows)
    for name, results in expected.items():
        if not torch.equal(torch.cat(found[name]), torch.cat(results)[: len(tokens) - 1]):
            return name
    return None


def _trainer_trace(model: PreTrainedModel, sample: Sample) -> Trace:
    local = _packed([sample], model.device)
    with _recorded(model, local.num_tokens, slice(0, len(sample))) as trace:
        hidden_states(model, local)
    return trace


def _sampler_trace(model: CachedModel, tokens: NDArray[np.integer[Any]], stored: int, rows: int) -> Trace:
    """Run the sampler on given tokens, and record the inputs and outputs of its operators.

    The first `stored` tokens are prefilled. All other tokens except the last are decoded. `rows`: the batch size of a
    decode step. Only its first row is used.
    """
    # The KV cache holds the pages of the prompt, the pages of the response, and an unused page.
    own = -(-stored // PAGE_SIZE) * PAGE_SIZE
    length = len(tokens) - 1
    capacity = own + -(-(length - stored + stored % PAGE_SIZE) // PAGE_SIZE + 1) * PAGE_SIZE + PAGE_SIZE
    cache = KVCache.allocated(model.layer_shapes(), capacity, model.device)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.device)
    parts: list[Trace] = []
    if stored:
        padded = prefill_rows(stored)
        pack = collate([Sample(tokens=tokens[:stored])], share_prefixes=False).padded_to(padded).to(model.device)
        indices = torch.full((padded,), capacity - 1, device=model.device)
        indices[:stored] = torch.arange(stored, device=model.device)
        with _recorded(model.model, padded, slice(0, stored)) as trace:
            model.prefill(shard(pack), indices, cache)
        parts.append(trace)
    tail = stored % PAGE_SIZE
    for cached in (*cache.keys, *cache.values):
        cached[own : own + tail] = cached[stored - tail : stored].clone()
    slots = torch.zeros(NUM_SLOT_FIELDS, rows, dtype=torch.int64, device=model.device)
    slots[[PROMPT, STORED, OWN, ACTIVE], 0] = torch.tensor([0, stored, own + tail, 1], device=model.device)
    inputs = torch.zeros(rows, dtype=torch.int64, device=model.device)
    for position in range(stored, length):
        slots[WRITTEN, 0] = position - stored
        inputs[0] = ids[position]
        with _recorded(model.model, rows, slice(0, 1)) as trace:
            model.decode(inputs, slots[STORED] + slots[WRITTEN], slots, cache, length)
        parts.append(trace)
    return {name: [result for part in parts for result in part[name]] for name in parts[-1]}


@contextmanager
def _recorded(model: PreTrainedModel, num_tokens: int, kept: slice) -> Iterator[Trace]:
    """Record the inputs and outputs of operators, for the tokens in `kept`.

    An operator is a module without children, or a module of stacked experts. `num_tokens`: number of tokens of the
    forward pass.
    """
    trace: dict[str, list[Tensor]] = defaultdict(list)
    handles: list[Any] = []
    last = ["the embedding"]

    def keep(name: str, value: Any) -> None:
        if isinstance(value, tuple):  # such as cos and sin
            for number, part in enumerate(value):
                keep(f"{name}, result {number}", part)
        elif isinstance(value, Tensor) and (dim := _token_dim(value, num_tokens)) is not None:
            key, number = name, 1
            while key in trace:  # such as a dropout module that a layer calls twice
                number += 1
                key = f"{name}, call {number}"
            trace[key].append(value.detach().movedim(dim, 0)[kept].clone())

    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    stacked = stacked_experts(model)
    # Modules inside of experts are left out, because they see the tokens in the order of experts.
    inside = {part for experts in stacked for part in experts.modules()} - {*stacked}
    for path, module in model.named_modules():
        is_whole = module in stacked or not any(True for _ in module.children())
        if not is_whole or module in inside or module is head:
            continue
        name = operator_name(model, path)

        def before(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if args:  # the input shows an operator that is not a module, such as attention
                keep(f"an operator between {last[0]} and {name}", args[0])

        def after(_: nn.Module, args: tuple[Any, ...], result: Any, name: str = name) -> None:
            keep(name, result)
            last[0] = name

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _token_dim(value: Tensor, num_tokens: int) -> int | None:
    """Return the dimension of `value` that runs over tokens, or None if no such dimension has the size `num_tokens`.

    In a matrix, as experts get it, tokens are dimension 0. Other tensors begin with a batch dimension, and tokens are
    dimension 1 or 2.
    """
    candidates = (0,) if value.ndim == 2 else (1, 2)
    return next((dim for dim in candidates if dim < value.ndim and value.shape[dim] == num_tokens), None)


def operator_name(model: PreTrainedModel, path: str) -> str:
    """Return the name of a module for the user: `layer 3, self_attn.q_proj`, or its path if it is in no layer."""
    prefix = next(name for name, module in model.named_modules() if module is layers_of(model))
    if not path.startswith(f"{prefix}."):
        return path
    number, _, rest = path.removeprefix(f"{prefix}.").partition(".")
    return f"layer {number}, {rest}"
