"""`rollout.engine = "in_process"`: the training process samples from the model that it trains.

    module       used for                                          samples with
    `decode`     GPUs, and models with a vision tower              slots, padfree's KV cache, steps as CUDA graphs
    `hf_cache`   CPUs, and models that `decode` does not support   the attention and cache of transformers

Every rank has a whole model and samples its share of the requests. The model shares its weights with the trained model
if possible (`policy_model`).
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from padfree.config import Config
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.model.nonfinite_tensors import nonfinite_weight
from padfree.model.route_replay import RouteRecorder
from padfree.model.sharing import state_obstacle
from padfree.model.vision.families import family_of
from padfree.rollout.base import OnFinished, OnProgress, OnTokens, Response, SamplingRequest, Score
from padfree.rollout.engines.in_process.cached_model import CachedModel, layers_of_model, unsupported_reason
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.hf_cache import CacheUse, cache_use, stop_tokens, write_responses
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.row_trial import trial
from padfree.rollout.truncation import WHOLE, Truncation, truncation_of
from padfree.warning import PadfreeWarning


def make_in_process_sampler(
    config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score
) -> InProcessSampler:
    """Make a sampler for a model like `trained`. Arguments: see `make_sampler`.

    `score`, which other samplers use to verify a weight sync, is not used: weights copied in memory need no check.
    """
    return InProcessSampler(
        PolicyModel(
            trained,
            getattr(torch, config.model.dtype),
            mesh.device,
            config.lora if config.lora.rank and config.rollout.exact is True else None,
        ),
        stops=stop_tokens(tokenizer, trained),
        temperature=config.loss.temperature,
        batch_size=config.rollout.max_concurrent,
        truncation=truncation_of(config.rollout),
        cache_bytes=config.rollout.kv_cache_bytes,
        attention=config.model.attention,
        compiled=config.parallel.compile == "inductor",
        records_routes=config.rollout.routing == "replay",
        exact=config.rollout.exact is True,
    )


class InProcessSampler:
    """The sampler of `rollout.engine=in_process`: samples from a model in the training process."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        stops: Sequence[int],
        temperature: float,
        batch_size: int,
        truncation: Truncation = WHOLE,
        cache_bytes: int | None = None,
        attention: str = "auto",
        compiled: bool = False,
        decodes: bool | None = None,
        records_routes: bool = False,
        exact: bool = False,
    ) -> None:
        """`stops`: token ids that end a response. `cache_bytes`: size limit of the KV cache. `decodes`: whether to
        sample with padfree's `Decoder` or with the KV cache of transformers.

        `exact`: whether log-probabilities are bitwise equal to the trainer's. Set it only if `exact_operators.problem`
        returns None.
        """
        self.policy, self.stops, self.temperature, self.batch_size = policy, tuple(stops), temperature, batch_size
        self.truncation = truncation
        self._cache_bytes, self._attention, self._compiled, self._exact = cache_bytes, attention, compiled, exact
        # None: as `_decodes` says, and always with `exact`.
        self._decodes = (exact or _decodes(policy)) if decodes is None else decodes
        self._cache_use: CacheUse = "padded"
        self._decoder: Decoder | None = None  # made at the first call of `sample`
        self._version = 0
        self._recorder = RouteRecorder(policy.model) if records_routes else None
        self._metrics: dict[str, float] = {}
        if not self._decodes:
            policy.model.set_attn_implementation(_hf_attention(policy.model))
            self._cache_use = _cache_use(policy.model)

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        moved = self.policy.update(trained)
        if moved and self._decoder is not None:
            self._decoder.forget_graphs()
        self._version = version

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Response]:
        """Return the responses to this rank's requests, in order (see `Sampler.sample`).

        `on_tokens` receives tokens as they are sampled: one by one, or several at a time on a GPU.
        """
        begin = time.perf_counter()
        if self._decodes:
            decoder = self._decoder = self._decoder or self._made_decoder()
            responses = decoder.sample(requests, version=self._version, on_progress=on_progress, on_tokens=on_tokens)
            if on_finished is not None:
                on_finished(list(enumerate(responses)))  # all at once, because they stay on the device until the end
        else:
            responses = write_responses(
                self.policy.model,
                requests,
                temperature=self.temperature,
                stops=self.stops,
                batch_size=self.batch_size,
                use=self._cache_use,
                version=self._version,
                recorder=self._recorder,
                truncation=self.truncation,
                on_progress=on_progress,
                on_finished=on_finished,
                on_tokens=on_tokens,
            )
        seconds = time.perf_counter() - begin
        _check_finite(responses, self.policy.model, self._version)
        tokens = sum(len(response.tokens) for response in responses)
        self._metrics = {"tokens_per_second": tokens / seconds}
        return responses

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.free()

    def _made_decoder(self) -> Decoder:
        model, step_rows = self.policy.model, None
        if self._exact:
            layers = layers_of_model(model)
            assert layers is not None
            choice = trial(layers, self.batch_size, self.policy.device, model.dtype)
            assert choice.problem is None, choice.problem
            step_rows = choice.step_rows
        return Decoder(
            CachedModel(
                model,
                backend=self._attention,
                compiled=self._compiled,
                exact=self._exact,
                recorder=self._recorder,
            ),
            num_slots=self.batch_size,
            temperature=self.temperature,
            stops=self.stops,
            truncation=self.truncation,
            cache_bytes=self._cache_bytes,
            step_rows=step_rows,
        )


def _check_finite(responses: Sequence[Response], model: PreTrainedModel, version: int) -> None:
    """Raise a `UserError` if a log-probability is not finite. The message names a weight that is not finite, if any."""
    wrong = next((value for each in responses for value in each.logprobs[~np.isfinite(each.logprobs)]), None)
    if wrong is None:
        return
    weight, after = nonfinite_weight(model), f" after {version} steps" if version else ""
    fact = f"the log-probability of a sampled token is {wrong}{after}"
    if weight is None:
        raise UserError(
            "model", f"{fact}, although all weights are finite", "set model.dtype=float32, or use other weights"
        )
    raise UserError(
        "model", f"{fact}, because {weight} is not finite", "resume an earlier checkpoint with a lower optimizer.lr"
    )


def _hf_attention(model: PreTrainedModel) -> str:
    """Return the name of an attention implementation of transformers that gives correct results for this model.

    Some versions of transformers silently ignore the soft cap in sdpa.
    """
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def _cache_use(model: PreTrainedModel) -> CacheUse:
    use = cache_use(model)
    if use == "none":
        warnings.warn(
            f"{type(model).__name__} is sampled very slowly, without a KV cache, because its results with the cache of "
            "transformers differ from a forward pass over the whole sequence",
            PadfreeWarning,
            stacklevel=3,
        )
    return use


def _decodes(policy: PolicyModel) -> bool:
    """Return whether to sample with padfree's `Decoder`: on a GPU, and for vision-language models on any device.

    If the decoder does not support the model, a warning is given on a GPU, and the result is False.
    """
    if family_of(policy.model) is not None:
        check_samples_images(policy.model)
        return True
    if policy.device.type != "cuda":
        return False
    reason = policy.state_obstacle or unsupported_reason(policy.model)
    if importlib.util.find_spec("triton") is None:
        reason = "padfree's kernels need triton, which is not installed"
    if reason is not None:
        name = type(policy.model).__name__
        warnings.warn(
            f"{name} is sampled slowly, with the cache of transformers: {reason}", PadfreeWarning, stacklevel=3
        )
    return reason is None


def check_samples_images(model: PreTrainedModel) -> None:
    """Raise a `UserError` if this vision-language model cannot be sampled. The model may be on the meta device."""
    reason = state_obstacle(model) or unsupported_reason(model)
    if reason is not None:
        raise UserError(
            "model.vision",
            f"true, but responses of {type(model).__name__} to images cannot be sampled: {reason}",
            "use another model, or train on files with padfree sft or dpo",
        )
