"""Write a trained model, sharded or not, to a Hugging Face folder.

    export_model(model, "out", tokenizer)      -> out/config.json, model*.safetensors, generation_config.json, tokenizer
    export_adapters(model, "out", tokenizer)   -> out/adapter_config.json, adapter_model.safetensors, tokenizer

`export_model` merges adapters into the weights. Both functions are collective. Tensors are gathered one by one, and
rank 0 writes them.

The folder is written under a temporary name and then renamed, so that it is always complete. An existing folder is
replaced only if it holds nothing but an earlier export.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from padfree.distributed import raise_together
from padfree.errors import UserError
from padfree.model.expert_adapters import has_expert_adapters, merged_weight, stacked_weights
from padfree.model.export_files import default_mode, save_model
from padfree.model.lora import ADAPTER, added_weight, is_adapted, is_adapter
from padfree.model.named_tensors import clean_name, named_tensors
from padfree.model.nonfinite_tensors import nonfinite_tensor
from padfree.model.split_weight import plain_tensor
from padfree.model.structure import keep_in_float32
from padfree.model.wrapper import LEGACY_TEMPLATE, TEMPLATE, copy_processor, save_whole, wrapper_of
from padfree.version import __version__

RECORD = "padfree_export.json"
"""The file that marks a folder as an export. It holds the version of padfree, the time and the list of files."""


def export_model(
    model: PreTrainedModel,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads. Replaces an earlier export in `folder`.
    Collective.

    `dtype` is the dtype of the parameters in the files. None: the dtype of the model, or float32 if there are adapters.
    """
    if dtype is None and any(is_adapter(name) for name in named_tensors(model)):
        dtype = torch.float32
    # `save_pretrained` of a copy without weights gives the names, layout and file sizes of a transformers folder.
    empty = empty_copy(model, dtype or model.dtype)
    parameters = {clean_name(name) for name, _ in empty.named_parameters()}
    # Parameters that the architecture always keeps in float32 are float32 in `empty`.
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(empty).items() if name in parameters}
    tensors: dict[str, Tensor] = {}
    folder, first = Path(folder), _is_first()
    raise_together(_occupied(folder) if first else None)
    for name, whole in whole_tensors(model):
        if first:
            kept = whole.to(dtypes[name]) if dtype is not None and name in parameters else whole
            tensors[name] = kept.cpu().contiguous()
    raise_together(_not_finite(tensors, parameters, dtype or model.dtype))

    wrapper = wrapper_of(model)

    def write(temporary: Path) -> None:
        with _no_progress_bar():
            if wrapper is not None:
                save_whole(wrapper, empty, tensors, temporary, max_shard_size)
            else:
                save_model(empty, temporary, tensors, max_shard_size)
                copy_processor(model, temporary)

    _write_first(folder, write, tokenizer)
    return folder


def _not_finite(tensors: Mapping[str, Tensor], parameters: Collection[str], dtype: torch.dtype) -> str | None:
    """Check that all weights are finite, before and after conversion to the dtype of the files.

    Returns an error message, or None if all are finite.
    """
    found = nonfinite_tensor(tensors, parameters)
    if found is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"export: {found} has values that are not finite in {name}; set checkpoint.export_dtype=float32, or continue "
        "from an earlier checkpoint"
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Context manager that hides the progress bar of transformers, which would interfere with padfree's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def export_adapters(
    model: PreTrainedModel, folder: str | Path, tokenizer: Any = None, *, base: str | None = None
) -> Path:
    """Write only the adapters, which `peft.PeftModel.from_pretrained` loads on top of their base model.

    `base` is the path of the base model, which is stored in the adapter config.
    """
    folder, first = Path(folder), _is_first()
    raise_together(_occupied(folder) if first else None)
    found = {name: gathered(tensor) for name, tensor in named_tensors(model).items() if is_adapter(name)}
    if not found:
        raise UserError("export", f"{type(model).__name__} has no adapters", "export the model with export_model")

    def write(temporary: Path) -> None:
        config = copy.deepcopy(model.peft_config[ADAPTER])
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(temporary)
        of_experts = _peft_expert_tensors(model, found)
        plain = {name.replace(f".{ADAPTER}.", "."): whole for name, whole in found.items() if name.endswith(".weight")}
        tensors = {
            f"base_model.model.{name}": whole.cpu().contiguous() for name, whole in {**plain, **of_experts}.items()
        }
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})

    _write_first(folder, write, tokenizer)
    return folder


def _peft_expert_tensors(model: PreTrainedModel, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters of E experts, converted to PEFT's names and shapes. `found` maps names to tensors of
    adapters.

        lora_A  [E, rank, in]  -> [E * rank, in]
        lora_B  [E, out, rank] -> [out, rank * E]
    """
    tensors: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        if not has_expert_adapters(module):
            continue
        experts = clean_name(module_name)
        names = [name for name in stacked_weights(module) if f"{experts}.lora_A.{name}" in found]
        # PEFT wraps the experts once for each adapted weight. The wrapper of the first weight is the innermost.
        for number, name in enumerate(names):
            wrapper = experts + ".base_layer" * (len(names) - 1 - number)
            a, b = (found[f"{experts}.lora_{side}.{name}"] for side in "AB")
            tensors[f"{wrapper}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{wrapper}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return tensors


def whole_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model, gathered from all ranks, with its name in Hugging Face files.

    Adapters are merged into the weights that they adapt. Collective: every rank must iterate over all tensors.
    """
    for name, gather in tensor_gatherers(model).items():
        yield name, gather()


def separate_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model like `whole_tensors`, but yield adapters as separate tensors instead of merging
    them into the weights. Every rank must iterate over all tensors.
    """
    for name, tensor in named_tensors(model).items():
        yield name, gathered(tensor)


def tensor_gatherers(model: PreTrainedModel) -> dict[str, Callable[[], Tensor]]:
    """Return, for every name that `whole_tensors` yields, a function that gathers the tensor from all ranks.

    All ranks must call these functions, in the same order.
    """
    tensors = named_tensors(model)
    if getattr(model, "peft_config", None) is None:
        return {name: partial(gathered, tensor) for name, tensor in tensors.items()}
    adapted = {clean_name(f"{name}.weight"): layer for name, layer in model.named_modules() if is_adapted(layer)}
    experts = {clean_name(name): module for name, module in model.named_modules() if has_expert_adapters(module)}

    def merged(name: str) -> Tensor:
        whole = gathered(tensors[name])
        module_name, _, last = name.rpartition(".")
        if module_name in experts and f"{module_name}.lora_A.{last}" in tensors:
            a, b = (gathered(tensors[f"{module_name}.lora_{side}.{last}"]) for side in "AB")
            return merged_weight(experts[module_name], whole.to(torch.promote_types(whole.dtype, torch.float32)), a, b)
        if name in adapted:
            a, b = (gathered(tensors[f"{module_name}.lora_{side}.{ADAPTER}.weight"]) for side in "AB")
            return whole.float() + added_weight(adapted[name], a, b)
        return whole

    return {name: partial(merged, name) for name in tensors if not is_adapter(name)}


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded or a `SplitWeight`, as a plain tensor, on every rank. All ranks
    must call this function.
    """
    if isinstance(tensor, DTensor):
        # Move offloaded shards to the device first, because the communication backend needs them there.
        tensor = tensor.detach().to(tensor.device_mesh.device_type)
        assert isinstance(tensor, DTensor)
        tensor = tensor.full_tensor()
    return plain_tensor(tensor.detach())


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _write_first(folder: Path, write: Callable[[Path], None], tokenizer: Any) -> None:
    """Write an export on rank 0. If writing fails, all ranks raise the error."""
    error = None
    if _is_first():
        try:
            _write(folder, write, tokenizer)
        except (OSError, SafetensorError) as caught:
            error = f"export: {folder} cannot be written ({' '.join(str(caught).split())}); give another folder"
    raise_together(error)


def not_an_export(folder: Path) -> str | None:
    """Return why an export must not replace this folder (for example, it holds other files), or None if it may."""
    paths = list(folder.iterdir()) if folder.is_dir() else [folder] if folder.exists() else []
    if not paths:
        return None
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        own = {RECORD, *record["files"]} if record["made_by"] == "padfree" else set()
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    if not own:
        return f"is not an earlier export of padfree (it has no {RECORD})"
    others = sorted(path.name for path in paths if path.name not in own)
    return f"holds {others[0]} besides an earlier export of padfree" if others else None


def _occupied(folder: Path) -> str | None:
    reason = not_an_export(folder)
    return None if reason is None else f"export: {folder} {reason}; give a new or empty folder"


def _write(folder: Path, write: Callable[[Path], None], tokenizer: Any) -> None:
    temporary, replaced = (folder.with_name(f".{folder.name}.{kind}") for kind in ("writing", "replaced"))
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)  # an earlier export was interrupted between the two renames below
    for path in (temporary, replaced):
        shutil.rmtree(path, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
            if (temporary / TEMPLATE).exists():  # transformers would prefer an older template in the other file
                (temporary / LEGACY_TEMPLATE).unlink(missing_ok=True)
        record = {
            "made_by": "padfree",
            "padfree": __version__,
            "exported": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": sorted(path.name for path in temporary.iterdir()),
        }
        (temporary / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        mode = default_mode(temporary)
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(mode)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def empty_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of the same class and config on the meta device, without weights, sharding, compilation or
    adapters.
    """
    # fully_shard changes the class of a model to a subclass of FSDPModule and the original class.
    original = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    assert issubclass(original, PreTrainedModel)
    with torch.device("meta"):
        empty = original._from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager"
        )
    assert isinstance(empty, PreTrainedModel)
    keep_in_float32(empty, dtype)
    if empty.can_generate():
        empty.generation_config = copy.deepcopy(model.generation_config)
    return empty


def sync(path: Path) -> None:
    """Sync a file or folder to disk, so that a later rename cannot expose incomplete content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
