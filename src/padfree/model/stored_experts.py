"""Files that store experts one by one, read into stacked experts without a whole copy on the host.

    model                                  files
    experts.gate_up_proj [E, 2 I, D]       experts.0.gate_proj.weight [I, D], experts.0.up_proj.weight [I, D],
                                           experts.1.gate_proj.weight, ...
    experts.down_proj [E, D, I]            experts.0.down_proj.weight [D, I], experts.1.down_proj.weight, ...

For each architecture, transformers has a description of how it renames and merges tensors when it loads files.
`stored_names` understands two kinds of descriptions: renamed tensors, and experts that are stacked and concatenated
along their first dimension, as in the picture. For any other description `stored_names` returns None, and
`padfree.model.broadcast_weights` loads the files with transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

StoredNames = dict[str, str | list[list[str]]]
"""Maps the name of each model tensor to the name of the checkpoint tensor that holds its values.

Stacked experts [E, ...] have E lists instead: for each expert, the names of the tensors to concatenate.
"""

STACKED = [("MergeModulelist", 0)]
CONCATENATED = [*STACKED, ("Concatenate", 1)]


def stored_names(model: PreTrainedModel, files: Iterable[str]) -> StoredNames | None:
    """Map the name of each model tensor to the names of the tensors in the files from which it is read.

    Returns None if transformers changes tensors on loading in a way that this function does not know.
    """
    renamings: list[tuple[str, str]] = []
    patterns: list[tuple[re.Pattern[str], str, int, int]] = []  # of a name, its tensor, index and number of the part
    for each in get_model_conversion_mapping(model, add_legacy=False):
        conversion: Any = each
        if getattr(conversion, "scope_prefix", None) is not None or len(conversion.target_patterns) != 1:
            return None
        (target,) = conversion.target_patterns
        if isinstance(conversion, WeightConverter):
            parts = conversion.source_patterns
            operations = [
                (type(operation).__name__, getattr(operation, "dim", None)) for operation in conversion.operations
            ]
            if operations != (STACKED if len(parts) == 1 else CONCATENATED):
                return None
            patterns += [(_pattern(part), target, index, len(parts)) for index, part in enumerate(parts)]
        elif isinstance(conversion, WeightRenaming):
            renamings += [(source, target) for source in conversion.source_patterns]
        else:
            return None
    plain: dict[str, str] = {}
    experts: dict[str, dict[tuple[int, int], str]] = {}
    counts: dict[str, int] = {}
    for name in files:
        own = name
        for source, target in renamings:
            own = re.sub(source, target, own)
        for pattern, target, index, count in patterns:
            if (match := pattern.fullmatch(own)) is not None:
                stacked = match["prefix"] + target
                counts[stacked] = count
                other = experts.setdefault(stacked, {}).setdefault((int(match["expert"]), index), name)
                break
        else:
            other = plain.setdefault(own, name)
        if other != name:
            return None  # two tensors for one
    found: StoredNames = {**plain}
    for stacked, names in experts.items():
        count, num_experts = counts[stacked], 1 + max(expert for expert, _ in names)
        if stacked in found or len(names) != num_experts * count:
            return None  # an expert is incomplete
        found[stacked] = [[names[expert, index] for index in range(count)] for expert in range(num_experts)]
    return found


def _pattern(part: str) -> re.Pattern[str]:
    """Return a regular expression for tensor names that end in `part`, where `*` stands for the number of an expert.

    For example, "mlp.experts.*.up_proj.weight" matches this weight of any expert in any layer.
    """
    before, _, after = part.partition("*")
    return re.compile(f"(?P<prefix>.*?){re.escape(before)}(?P<expert>[0-9]+){re.escape(after)}")
