"""Select parameters of a model: by the part of a vision-language model that they belong to, or by a pattern of names.

tower                       the vision tower without its projector
projector                   what maps the tower's output to the width of the language model
language_model              all other parameters: embeddings, layers, last norm and head
model.layers.0.*            names as in Hugging Face files; * stands for any text, ? for one character
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, get_args

from torch import nn
from transformers import PreTrainedModel

from padfree.errors import UserError
from padfree.model.named_tensors import clean_name
from padfree.model.roles import roles_of
from padfree.model.vision.families import family_of

Part = Literal["tower", "projector", "language_model"]


class FrozenWeights(TypedDict):
    """How much of a language model is frozen.

    - `frozen`: the frozen share, from 0 to 1, of the matmul weights without the head.
    - `frozen_head`: whether the head is frozen.
    """

    frozen: float
    frozen_head: bool


PARTS: tuple[Part, ...] = get_args(Part)


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return the part of a vision-language model (tower, projector or language model) that each parameter belongs to. A
    language model has only `language_model`.
    """
    family = family_of(model)
    names = [clean_name(name) for name, _ in model.named_parameters()]
    if family is None:
        return dict.fromkeys(names, "language_model")
    prefix = getattr(model, "base_model_prefix", "")
    start = f"{prefix}." if prefix and hasattr(model, prefix) else ""

    def part(name: str) -> Part:
        inside = name.removeprefix(start)

        def below(paths: Iterable[str]) -> bool:
            return any(inside == path or inside.startswith(f"{path}.") for path in paths)

        if below(family.projector):
            return "projector"
        return "tower" if below(family.encoders) else "language_model"

    return {name: part(name) for name in names}


def selected(model: nn.Module, selection: str, setting: str) -> set[str]:
    """Return the names of the parameters that `selection` stands for: a part of the model, or a pattern of names.

    Raises `UserError` if no parameter matches. `setting` is the name of the setting that holds the selection, for the
    error message.
    """
    parts = parts_of(model)
    if selection in PARTS:
        found = {name for name, part in parts.items() if part == selection}
    else:
        found = {name for name in parts if fnmatchcase(name, selection)}
    if not found:
        raise UserError(
            setting,
            f"selects no parameter of {type(model).__name__}",
            f"give {', '.join(dict.fromkeys(parts.values()))} or a pattern such as {next(iter(parts))}",
            value=selection,
        )
    return found


def freeze(model: nn.Module, selections: Iterable[str]) -> None:
    """Freeze the selected parameters: they get no gradient and do not change."""
    names = {name for selection in selections for name in selected(model, selection, "model.freeze")}
    for name, parameter in model.named_parameters():
        if clean_name(name) in names:
            parameter.requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model.freeze", "freezes all parameters", "leave one part of the model unfrozen")


def frozen_weights(model: PreTrainedModel) -> FrozenWeights:
    """Return the frozen fraction of the language model's matmul weights, and whether the head is frozen."""
    roles, parts = roles_of(model), parts_of(model)
    sums = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        if parts[clean_name(name)] == "language_model" and roles[parameter] in ("hidden", "expert"):
            sums[parameter.requires_grad] += parameter.numel()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    total = sum(sums.values())
    return FrozenWeights(
        frozen=sums[False] / total if total else 0.0,
        frozen_head=head is not None and not head.weight.requires_grad,
    )
