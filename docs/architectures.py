"""Write docs/architectures.md: every causal language model of the installed transformers, tried.

    python docs/architectures.py            all of them, some minutes
    python docs/architectures.py lfm2 rwkv  these, printed

Each is built on the meta device from the default config of its class and attached, or refused with the reason. A
default config that makes no model is completed here.
"""

from __future__ import annotations

import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from padfree.model import TESTED, attach
from padfree.model.interface import chunk_of
from padfree.model.mixers import KINDS, installed

PAGE = Path(__file__).parent / "architectures.md"
PATIENCE = 120
"""Seconds for one architecture."""

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
"""What default configs lack."""

FAST_WAYS = {
    "gated_delta": "flash-linear-attention",
    "mamba2": "flash-linear-attention",
    "short_convolution": "on any device",
}
"""Kinds of mixers that run on whole rows, and what that needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What is said of one architecture."""

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
        ways = {name: FAST_WAYS[name] for name, kind in KINDS.items() if kind.functions is not None}
        return ", ".join(dict.fromkeys(ways.get(name, "none: sample by sample") for name in self.mixers))

    def line(self) -> str:
        tested = " ✓" if self.class_name in TESTED else ""
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


def tried(model_type: str) -> Row:
    """One architecture, attached or refused; any other end is told as the reason that it is."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(PATIENCE)
    try:
        config = CONFIG_MAPPING[model_type](**COMPLETED.get(model_type, {}))
        model_class = getattr(transformers, class_name)
        if not isinstance(config, model_class.config_class):  # of a model of several parts
            config = config.get_text_config()
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:
        reason = f"its default config makes no model: {type(error).__name__}: {_short(str(error))}"
        return Row(model_type=model_type, class_name=class_name, attached=False, reason=reason)
    finally:
        signal.alarm(0)
    signal.alarm(PATIENCE)
    try:
        attach(model)
    except ValueError as error:
        _, _, reason = str(error).partition("cannot be trained packed: ")
        return Row(
            model_type=model_type, class_name=class_name, attached=False, reason=_short(reason.rpartition("; train")[0])
        )
    finally:
        signal.alarm(0)
    kinds = sorted({mixer.kind for module in model.modules() if (mixer := installed(module)) is not None})
    chunked = next((chunk for module in model.modules() if (chunk := chunk_of(module)) is not None), None)
    context = "whole samples" if kinds else f"samples up to {chunked}" if chunked else "yes"
    return Row(model_type=model_type, class_name=class_name, attached=True, mixers=tuple(kinds), context=context)


def _too_long(*_: Any) -> None:
    raise ValueError(f"cannot be trained packed: not decided in {PATIENCE} s; train")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def page(rows: list[Row]) -> str:
    attached = sum(row.attached for row in rows)
    mixers = "; ".join(f"`{name}` {(sys.modules[kind.matches.__module__].__doc__ or '').splitlines()[0]}"
                       for name, kind in KINDS.items())  # fmt: skip
    return f"""# Architectures

Every causal language model of transformers {transformers.__version__}, tried by `docs/architectures.py`: \
{attached} attached, \
{len(rows) - attached} refused, each with its reason. ✓: packed logits and gradients are compared with one sample at a \
time in the tests ({len(TESTED)} classes). Others are attached because the probe found a small copy right.

Mixers are what layers do along the sequence besides softmax attention ({mixers}). They run on whole samples, by the \
model's own code, on any device. Over context ranks whole samples move to one rank for a mixer and back; a sample \
longer than a rank's share is refused.

| type | class | attached | mixers | fast way | context ranks | reason |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(row.line() for row in rows)}
"""


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    rows = [tried(name) for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    if names:
        sys.stdout.write("".join(f"{row.line()}\n" for row in rows))
    else:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
