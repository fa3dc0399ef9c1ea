"""Record a run's settings, model and data in its checkpoints, and compare them with the run that resumes.

The data, the model, the teacher and (unless `reference.path` changes) the reference must stay the same. Settings that
affect only future steps, e.g. the learning rate, may change; the run reports the change. Settings that determine the
order of the samples or the shapes of saved tensors must not change. The number of processes may change.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from padfree.checkpoint.checkpoint_files import hash_of
from padfree.config import Config, config_from_dict
from padfree.config.loss import TASKS
from padfree.config.setting import Resume, resume_rules
from padfree.data import StoredSamples
from padfree.errors import UserError
from padfree.rollout import Prompt
from padfree.sample import TOKEN_ARRAYS, Sample

KEY = "made_with"
"""The key in a checkpoint's `extra` dict under which the record of settings, model and data is stored."""

RULES = resume_rules(Config, get_type_hints)
"""For each setting by name, whether it may change when a run resumes, as the metadata of the config's fields says."""

NOT_ARITHMETIC = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "use_cache",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
    "problem_type",
)
"""Fields of a model's config that may differ on a resume: they do not change what the model computes, or the run's own
settings determine them.
"""


def made_with(
    config: Config,
    model: PreTrainedConfig,
    *,
    data: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    teacher: str | None = None,
) -> dict[str, Any]:
    """Return the record of settings, model and data that every checkpoint of a run stores.

    `data`: see `data_record`. `reference`: config fields of the reference model and a fingerprint (hash) of its
    weights. `teacher`: a fingerprint of the teacher's weights.
    """
    return {
        "settings": flat_settings(config),
        "data": None if data is None else dict(data),
        "model": model_fields(model),
        "transformers": model.transformers_version,
        "reference": None if reference is None else dict(reference),
        "teacher": teacher,
    }


def flat_settings(config: Config) -> dict[str, Any]:
    """Return every setting except `run.folder` by its dotted name, with its value as JSON stores it (no tuples)."""
    found = _flat(json.loads(json.dumps(config.to_dict())), whole=RULES)
    del found["run.folder"]
    return found


def model_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a model's config that change what the model computes."""
    found = _flat(json.loads(json.dumps(config.to_dict(), default=str)))
    return {name: value for name, value in found.items() if not set(NOT_ARITHMETIC) & set(name.split("."))}


def data_record(samples: Sequence[Sample | Prompt] | StoredSamples, day: datetime.date | None = None) -> dict[str, Any]:
    """Return a digest of the training samples, and the number of samples and tokens.

    `day`: the date that the chat template wrote into the texts, if it wrote one.
    """
    about = {} if day is None else {"day": day.isoformat()}
    if isinstance(samples, StoredSamples):
        return {"digest": samples.digest, "samples": len(samples), "tokens": samples.report.num_tokens, **about}
    digest = hashlib.sha256()
    for sample in samples:
        for part in _parts(sample):
            digest.update(len(part).to_bytes(8, "little") + part)
    tokens = sum(len(sample.tokens) for sample in samples)
    return {"digest": digest.hexdigest(), "samples": len(samples), "tokens": tokens, **about}


def _parts(sample: Sample | Prompt) -> Iterator[bytes]:
    """Yield the bytes of everything in a sample that training uses, which excludes names such as `uid`."""
    yield np.asarray(sample.tokens, np.int64).tobytes()
    if isinstance(sample, Prompt):
        yield json.dumps(sample.row, sort_keys=True, default=str).encode()
        if sample.images:
            yield json.dumps([image.digest for image in sample.images]).encode()
        return
    yield sample.mask.tobytes()
    yield json.dumps([sample.reward, sample.group], default=str).encode()
    for name in TOKEN_ARRAYS:
        array = getattr(sample, name)
        yield b"" if array is None else np.asarray(array, np.float32).tobytes()
    if sample.kept is not None:
        yield sample.kept.counts.tobytes() + sample.kept.ids.tobytes()


# Comparing


def check_ranks_agree(record: Mapping[str, Any], group: ProcessGroup) -> None:
    """Raise a `UserError` if the settings, model or data of a rank differ from those of rank 0.

    All ranks of `group` must call this, each with its own `record`.
    """
    own = {part: hash_of(record[part]) for part in ("settings", "model", "data")}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    for rank, other in enumerate(gathered):
        for part, setting, what in (
            ("settings", "run", "settings"),
            ("model", "model.path", "model configs"),
            ("data", "data.path", "data"),
        ):
            if other[part] != gathered[0][part]:
                raise UserError(
                    setting,
                    f"ranks 0 and {rank} have different {what}",
                    "start every process with the same settings, and give files that all machines share",
                )


def rule_of(name: str) -> Resume:
    """Return the rule for a setting: whether its value may change when a run resumes.

    `name` may be inside a list, e.g. `data.sources.2.weight`.
    """
    return RULES[_without_indices(name)]


def changed_settings(there: Mapping[str, Any], here: Config) -> dict[str, tuple[Any, Any]]:
    """Return the changed settings by name, each as (old value, new value).

    `there`: the settings that the checkpoint stores. A setting that is missing there counts as its default value.
    """
    now = flat_settings(here)
    default = flat_settings(config_from_dict(_required(here)))
    found = {}
    for name in dict.fromkeys((*now, *(name for name in there if name.startswith("data.sources.")))):
        # Settings with `data.path` have no source weights; their only source counts as one of weight 1.
        missing = default.get(name, 1.0 if name.endswith(".weight") else None)
        before, value = there.get(name, missing), now.get(name, missing)
        if before != value:
            found[name] = (before, value)
    return found


def check_settings(path: Path, there: Mapping[str, Any], here: Config, *, inside: bool) -> dict[str, tuple[Any, Any]]:
    """Return the changed settings, each as (old value, new value). Raise an error if one of them must not change.

    `there`: the settings that the checkpoint stores. `inside`: whether the checkpoint was saved between two updates of
    a rollout batch.
    """
    changed = changed_settings(there, here)
    for name, (before, now) in changed.items():
        rule = rule_of(name)
        may = {
            "must stay": False,
            "may change between rollout batches": not inside,
            "may change with batch.samples": here.batch.samples is not None,
            "may change within RL": all(value not in (*TASKS, None) for value in (before, now)),
        }.get(rule, True)
        if not may:
            when = "change it after the checkpoint's rollout batch is finished" if "between" in rule else "set it back"
            raise UserError(
                name,
                f", but the checkpoint {path} was made with {before!r}",
                f"either {when}, or give another run.folder, or start over with checkpoint.resume=false",
                value=now,
            )
    return changed


def check_made_with(
    path: Path, there: Mapping[str, Any], here: Mapping[str, Any], config: Config, *, inside: bool
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from the checkpoint at `path`, as (old value, new value) by name.

    Raise an error for a forbidden change. `there`, `here`: the `made_with` records of checkpoint and run. `inside`:
    whether the checkpoint lies between two updates of a rollout batch.
    """
    changed = check_settings(path, there["settings"], config, inside=inside)
    start_over = "give another run.folder, or start over with checkpoint.resume=false"
    _check_fields("model.path", path, (there["model"], here["model"]), there["transformers"] == here["transformers"])
    data = there["data"], here["data"]
    if data[0] is not None and data[1] is not None and data[0]["digest"] != data[1]["digest"]:
        sizes = [f"{about['samples']:,} samples of {about['tokens']:,} tokens" for about in data]
        blamed = [name for name in changed if rule_of(name) == "may change if the samples stay the same"]
        blamed.sort(key=lambda name: not name.startswith("data."))
        if blamed:
            before, now = changed[blamed[0]]
            raise UserError(
                f"{blamed[0]}",
                f"gives other samples ({sizes[1]}) than the value {before!r} in {path} ({sizes[0]})",
                f"restore the earlier value, {start_over}",
                value=now,
            )
        raise UserError(
            "data.path",
            f"{', '.join(config.data.paths)} has other content ({sizes[1]}) than when {path} was made ({sizes[0]})",
            f"give the same data, {start_over}",
        )
    taught = there.get("teacher"), here["teacher"]
    if None not in taught and taught[0] != taught[1]:
        raise UserError(
            "teacher.path",
            f"{config.teacher.path} has other weights than when {path} was made",
            f"give the same model, {start_over}",
        )
    reference = there["reference"], here["reference"]
    if reference[0] is not None and reference[1] is not None and "reference.path" not in changed:
        _check_fields("reference.path", path, (reference[0]["model"], reference[1]["model"]), False)
        weights = reference[0]["weights"], reference[1]["weights"]
        if None not in weights and weights[0] != weights[1]:
            raise UserError(
                "reference.path",
                f"{config.reference.path} has other weights than when {path} was made",
                f"give the same model, {start_over}",
            )
    return changed


def _check_fields(setting: str, path: Path, fields: tuple[Mapping[str, Any], Mapping[str, Any]], same: bool) -> None:
    """Raise an error if the fields of a model's config differ between the checkpoint and this run.

    `fields`: of the checkpoint, then of this run. `same`: one version of transformers wrote both configs; otherwise
    only common fields are compared.
    """
    there, here = fields
    for name in sorted(there.keys() | here.keys() if same else there.keys() & here.keys()):
        before, now = there.get(name), here.get(name)
        if json.dumps(before) != json.dumps(now):  # as text, because NaN != NaN
            raise UserError(
                setting,
                f"{name} is {now!r} in the model's config, but {path} was made with {before!r}",
                "give the config that the run started with, or another run.folder, or start over with "
                "checkpoint.resume=false",
            )


def change_line(path: Path, changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the note that a resumed run prints about changed settings.

    `changed`: the old value and the new value of each changed setting.
    """
    parts = [f"{name} {json.dumps(now)} (was {json.dumps(before)})" for name, (before, now) in changed.items()]
    return f"resuming {path} with changed settings: {', '.join(parts)}"


def _required(config: Config) -> dict[str, Any]:
    """Return the settings that every config must give. In a config made from them, all other settings are defaults."""
    return {
        "model": {"path": config.model.path},
        "data": {"path": list(config.data.paths)},
        "batch": {"samples": 1, "max_tokens": 1},
        "run": {"folder": config.run.folder, "steps": 1},
    }


def _flat(values: Mapping[str, Any], prefix: str = "", whole: Collection[str] = ()) -> dict[str, Any]:
    """Flatten nested dicts and lists of dicts: {"a": [{"b": 1}]} becomes {"a.0.b": 1}.

    A dict whose name without list indices is in `whole` is not flattened: "a.b" in `whole` keeps a dict at "a.0.b".
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            for number, entry in enumerate(value):
                found |= _flat(entry, f"{prefix}{name}.{number}.", whole)
        elif isinstance(value, dict) and _without_indices(f"{prefix}{name}") not in whole:
            found |= _flat(value, f"{prefix}{name}.", whole)
        else:
            found[f"{prefix}{name}"] = value
    return found


def _without_indices(name: str) -> str:
    """Return the name of a setting without list indices: `data.sources.weight` for `data.sources.2.weight`."""
    return re.sub(r"\.\d+", "", name)
