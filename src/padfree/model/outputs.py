"""What a loss needs from a model with padfree's attention: its last hidden states, and its output head.

    hidden_states(model, batch)   [T/cp, D]   for a pack of T tokens on `cp` context ranks
    lm_head_of(model)             LmHead      the head's weight [V, D], bias, soft cap and scale

Some models scale their logits in ways that only their code shows. `padfree.model.adapter.lm_head_of` therefore tests on
a small copy of the model (few layers, random weights) that the `LmHead` gives the model's logits.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from padfree.attention.copies import take_copies
from padfree.batch import LmHead, LocalBatch
from padfree.errors import UserError
from padfree.model.interface import need_attached, text_config
from padfree.model.vision.families import family_of
from padfree.model.vision.features import vision_hidden_states


def hidden_states(model: PreTrainedModel, batch: LocalBatch) -> Tensor:
    """Return the last hidden states [T/cp, D] of a pack of T tokens on `cp` context ranks.

    If samples share prefixes, the result is [e, D]: one hidden state for each of the e labelled tokens of this rank.
    Under FSDP2, call this function through `padfree.sharding.parallelize.inside`.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            "model",
            f"{type(model).__name__} is not a transformers model",
            "give the model that padfree.attach returned",
        )
    if not isinstance(batch, LocalBatch):
        raise UserError(
            "batch", f"{type(batch).__name__} is not a LocalBatch", "give the result of padfree.shard(batch)"
        )
    base = base_of(model)
    need_attached(base)
    family = family_of(base)
    if family is not None:
        hidden = vision_hidden_states(base, family, batch)
    elif batch.images is not None:
        raise UserError(
            "images",
            f"are given, but {type(model).__name__} reads no images",
            "remove them, or use a vision-language model",
        )
    else:
        hidden = base(**batch.model_inputs()).last_hidden_state
    assert isinstance(hidden, Tensor)
    return hidden[0] if batch.entries is None else take_copies(hidden[0], batch.entries.positions)


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of the model below its head, or the model itself if it has no head."""
    base = model.base_model
    if base is model and model.get_output_embeddings() is not None:  # type: ignore[no-untyped-call]
        # The model has no attribute named by base_model_prefix, because the prefix belongs to a larger model. Take the
        # child that is a model.
        base = next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)
    assert isinstance(base, PreTrainedModel)
    return base


def described_head(model: PreTrainedModel) -> LmHead | None:
    """Return the model's head as an `LmHead` with the soft cap and scale in the config; None if there is no head.

    The model's code may change the logits in other ways. `padfree.model.probe` therefore compares the logits of the
    `LmHead` with those of the model.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        return None
    config = text_config(model.config)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LmHead(
        weight=head.weight,
        bias=getattr(head, "bias", None),
        softcap=None if softcap is None else float(softcap),
        logit_scale=scale,
    )
