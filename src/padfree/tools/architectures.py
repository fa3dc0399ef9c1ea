"""Find out which models of the installed transformers padfree can train packed (without padding).

    python -m padfree.tools.architectures lfm2 rwkv     prints the lines of the table for these model types

Each causal language model and image-text model is built on the meta device from its default config. Then it is prepared
for packed training (`attach`). The result is one line of the table in docs/reference/architectures.md. If building or
preparing fails, the line gives the reason.
"""

from __future__ import annotations

import signal
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from padfree.errors import UserError
from padfree.model import TESTED, attach
from padfree.model.interface import chunk_of
from padfree.model.mixers import KINDS, installed
from padfree.model.vision.families import FAMILIES, why_refused

PATIENCE = 120
"""Maximum number of seconds to build one architecture and prepare it for packed training."""

COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv"] * 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Config arguments, by model type, that the default config lacks and without which no model can be built."""


def _sections(*sections: int, **others: Any) -> dict[str, Any]:
    """Return config arguments for rotary positions in three dimensions (M-RoPE), as released checkpoints have them.

    `sections`: the number of rotary frequencies of each dimension. `others`: further entries of `rope_parameters`.
    """
    return {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [*sections], **others}
        }
    }


COMPLETED_IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "glm46v": _sections(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v": _sections(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v_moe": _sections(8, 12, 12, partial_rotary_factor=0.5),
    "glm_ocr": _sections(16, 24, 24),
    "glmga": _sections(8, 12, 12, partial_rotary_factor=0.5),
    "qwen2_5_vl": _sections(16, 24, 24),
    "qwen2_vl": _sections(16, 24, 24),
}
"""Arguments that are added to the default config of an image-text model, by model type. `aya_vision` cannot be built
without them. For the other types, they are the `rope_parameters` (M-RoPE) of released checkpoints.
"""

PACK_KERNELS = {
    "gated_delta": "flash-linear-attention",
    "mamba2": "flash-linear-attention",
    "short_convolution": "on any device",
}
"""The package with which a mixer (a recurrence or convolution) processes all samples of a pack in one call. The value
"on any device" means that no package is needed. Mixers of other kinds process one sample at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One line of the table of architectures: a model class, and whether padfree can train its models packed."""

    model_type: str
    class_name: str
    attached: bool
    mixers: tuple[str, ...] = ()
    context: str = ""
    reason: str = ""

    @property
    def varlen_kernel(self) -> str:
        if not self.attached:
            return ""
        if not self.mixers:
            return "attention backends"
        kernels = {name: PACK_KERNELS[name] for name, kind in KINDS.items() if kind.functions is not None}
        return ", ".join(dict.fromkeys(kernels.get(name, "none: one sample at a time") for name in self.mixers))

    def line(self) -> str:
        tested = " ✓" if self.class_name in (*TESTED, *FAMILIES) else ""
        cells = (
            f"`{self.model_type}`",
            f"{self.class_name}{tested}",
            "yes" if self.attached else "no",
            ", ".join(self.mixers),
            self.varlen_kernel,
            self.context,
            self.reason.replace("|", "/"),
        )
        return f"| {' | '.join(cells)} |"


def try_architecture(model_type: str) -> Architecture:
    """Build one causal language model, and prepare it for packed training.

    Return the result, which becomes one row of the table of architectures. If building or preparing fails, the result
    contains the reason.
    """
    return _tried(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def try_image_text(model_type: str) -> Architecture:
    """Build one image-text model, and prepare it for packed training with images. Return the result."""
    class_name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    try:
        reason = why_refused(getattr(transformers, class_name))
    except (ImportError, AttributeError) as error:  # a class needs a package that is not installed
        reason = f"its class cannot be imported: {_short(str(error))}"
    if reason is not None:
        return Architecture(model_type=model_type, class_name=class_name, attached=False, reason=reason)
    return _tried(model_type, class_name, with_images=True)


def _tried(model_type: str, class_name: str, *, with_images: bool = False) -> Architecture:
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(PATIENCE)
    try:
        completed = COMPLETED_IMAGE_TEXT if with_images else COMPLETED
        config = CONFIG_MAPPING[model_type](**completed.get(model_type, {}))
        model_class = getattr(transformers, class_name)
        if not with_images and not isinstance(
            config, model_class.config_class
        ):  # a model with several parts, e.g. text and vision
            config = config.get_text_config()
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:
        reason = f"its default config gives no model: {type(error).__name__}: {_short(str(error))}"
        return Architecture(model_type=model_type, class_name=class_name, attached=False, reason=reason)
    finally:
        signal.alarm(0)
    signal.alarm(PATIENCE)
    try:
        attach(model)
    except UserError as error:
        reason = error.problem.rpartition("cannot be trained packed: ")[2].removeprefix("UserError: ")
        return Architecture(model_type=model_type, class_name=class_name, attached=False, reason=_short(reason))
    finally:
        signal.alarm(0)
    kinds = sorted({mixer.kind for module in model.modules() if (mixer := installed(module)) is not None})
    chunked = next((chunk for module in model.modules() if (chunk := chunk_of(module)) is not None), None)
    context = "whole samples" if kinds else f"samples up to {chunked}" if chunked else "yes"
    return Architecture(
        model_type=model_type, class_name=class_name, attached=True, mixers=tuple(kinds), context=context
    )


def _too_long(*_: Any) -> None:
    raise UserError(
        "model", f"was not built and prepared within {PATIENCE} s", "raise PATIENCE in padfree/tools/architectures.py"
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def architectures_page(found: list[Architecture], image_text: list[Architecture]) -> str:
    """Return the Markdown page with the tables of these causal language models and image-text models."""
    with_images = sum(each.attached for each in image_text)
    attached = sum(each.attached for each in found)
    mixers = "\n".join(
        f"- `{name}`: {(sys.modules[kind.matches.__module__].__doc__ or '').splitlines()[0]}"
        for name, kind in KINDS.items()
    )
    return f"""# Architectures

Every causal language model of transformers {transformers.__version__}: {attached} attached, \
{len(found) - attached} refused, each with its reason. ✓ marks the {len(TESTED)} classes whose packed logits and \
gradients the tests compare with those of one sample at a time. For any other class, padfree makes this comparison \
with a small copy of the model before it attaches the model.

A mixer is a layer that mixes tokens along the sequence without softmax attention:

{mixers}

Mixers run on whole samples, with the code of the model, on any device. With context parallelism a whole sample moves \
to one rank for the mixer and back; a sample that is longer than the share of a rank is refused. The column "pack \
kernel" names what runs all samples of a pack in one call.

| type | class | attached | mixers | pack kernel | context ranks | reason |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(each.line() for each in found)}

## Image-text models

Every image-text model of transformers {transformers.__version__}, trained with images: {with_images} attached, \
{len(image_text) - with_images} refused, each with its reason. For the classes marked ✓, the tests compare the loss \
and the gradients of language model, tower and projector with transformers, one sample at a time.

| type | class | attached | mixers | pack kernel | context ranks | reason |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(each.line() for each in image_text)}
"""


def try_all() -> list[Architecture]:
    """Return a line of the table for every causal language model of transformers. This takes some minutes."""
    _silence()
    return [try_architecture(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]


def try_all_image_text() -> list[Architecture]:
    """Return a line of the table for every image-text model of transformers."""
    _silence()
    return [try_image_text(name) for name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)]


def _silence() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _silence()
    for name in sys.argv[1:]:
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            sys.stdout.write(f"{try_architecture(name).line()}\n")
        if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            sys.stdout.write(f"{try_image_text(name).line()}\n")
